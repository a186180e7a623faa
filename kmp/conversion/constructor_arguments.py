"""The arguments of `keras.Layer` that a config contains but a custom layer's `__init__` may not take."""

import inspect
from typing import Any

import keras

from kmp.backend import defining_class, is_keras_class
from kmp.conversion.model_parts import Part, config_contains_sublayers, is_graph

Config = dict[str, Any]

_BASE_ARGUMENTS = ("name", "trainable", "dtype")


def refused_arguments(layer: keras.Layer) -> set[str]:
    """Returns which of `name`, `trainable` and `dtype` the `__init__` of a layer does not take.

    `keras.Layer.get_config` returns all three, and Keras' `from_config` passes them to `__init__`. Empty if the class
    has its own `from_config`, which may omit them.
    """
    if is_graph(layer) or not is_keras_class(defining_class(type(layer), "from_config")):
        return set()
    parameters = inspect.signature(type(layer).__init__).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return set()
    return set(_BASE_ARGUMENTS) - set(parameters)


def obstacles_to_dtypes(parts: list[Part]) -> dict[str, str]:
    """Returns the paths of the layers whose dtype policy cannot be set when they are rebuilt, each with the reason.

    It can be set for operations and models, and for sublayers that a custom layer creates in code: these use the global
    policy.
    """
    return {part.path: obstacle for part in parts if (obstacle := _obstacle_to_dtype(part))}


def _obstacle_to_dtype(part: Part) -> str:
    layer = part.operation
    if not part.is_layer or is_keras_class(type(layer)) or isinstance(layer, keras.Model):
        return ""
    try:
        config = layer.get_config() or {}
    except Exception:  # custom code may raise anything; cloning the model reports it
        return ""
    if "dtype" not in config:
        return "its config has no `dtype`, so its policy cannot be set"
    if "dtype" in refused_arguments(layer) and config_contains_sublayers(part.parent):
        return "its `__init__` takes no `dtype`, so its policy cannot be set"
    return ""


def from_config(layer: keras.Layer, new_class: type[keras.Layer], config: Config) -> keras.Layer:
    """Returns a new layer from the config of `layer`, without the arguments that its `__init__` does not take.

    The new layer has the same name. Its dtype policy is the global one unless the config has a `dtype`.
    """
    refused = refused_arguments(layer)
    clone = new_class.from_config({key: value for key, value in config.items() if key not in refused})
    if "name" in refused:
        clone.name = layer.name
    return clone
