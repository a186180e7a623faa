"""Lists the layers and operations of a model, each with its path and its precision rule."""

import inspect
import threading
import warnings
from dataclasses import dataclass
from typing import Any

import keras

from kmp.backend.keras_internals import (
    compute_dtypes,
    defining_class,
    direct_sublayers,
    is_keras_class,
    is_passthrough,
    sublayers,
)
from kmp.conversion.precision import Precision, Rule
from kmp.utils.names import unique_names

WRAPPERS = (
    keras.layers.Wrapper,
    keras.layers.Bidirectional,
    keras.layers.RNN,
    keras.layers.StackedRNNCells,
)

Config = dict[str, Any]
_warnings_lock = threading.RLock()


@dataclass(frozen=True)
class Part:
    """One layer or operation of a model.

    Args:
        path: Its name, prefixed with the names of the layers and models that contain it, joined by
            `/`.
        operation: The layer, or the operation of a functional graph, such as that of
            `keras.ops.exp(x)`.
        parent: The model, nested model, wrapper or layer that directly contains it.
        rule: Its precision rule.
        is_planned: Whether a plan decides its dtype. It does not for input layers, sublayers that
            Keras' own layers create, and operations that custom code creates, which no config
            contains.
        obstacle: Why its dtype policy cannot be set, although a plan may name it; may be empty.
    """

    path: str
    operation: keras.Operation
    parent: keras.Layer
    rule: Rule
    is_planned: bool
    obstacle: str

    @property
    def is_layer(self) -> bool:
        """Whether it is a layer, which has its own dtype policy."""
        return isinstance(self.operation, keras.Layer)

    @property
    def parent_path(self) -> str:
        """The path of its parent; empty for the model."""
        return self.path.rpartition("/")[0]


def parts_of(model: keras.Model, precision: Precision | None = None) -> list[Part]:
    """Returns all layers and operations of a model, with their rules.

    They are in graph order, parents before children. Shared ones are listed once.

    Args:
        model: A built model.
        precision: What needs float32; by default nothing is known of that.
    """
    parts: dict[int, Part] = {}

    def walk(
        parent: keras.Layer, parent_config: Config | None, prefix: str, is_created_by_keras: bool
    ) -> None:
        children = children_of(parent)
        names = unique_names(child.name for child in children)
        is_of_keras = is_keras_class(type(parent))
        # Sublayers whose configs are in that of their parent are not created in custom code.
        is_in_config = is_of_keras or "layers" in (parent_config or {})
        is_created_by_keras |= is_of_keras and not isinstance(parent, (keras.Model, *WRAPPERS))
        for name, operation in zip(names, children, strict=True):
            if id(operation) in parts:
                continue
            is_layer = isinstance(operation, keras.Layer)
            is_input = isinstance(operation, keras.layers.InputLayer)
            is_planned = (is_layer or is_in_config) and not (is_input or is_created_by_keras)
            if is_created_by_keras:
                rule = Rule(reason=f"uses the dtype of {parent.name}, which creates it")
            else:
                rule = precision.rule_of(operation) if precision else Rule()
            config = _config_of_custom(operation)
            obstacle = ""
            # The policy of a model can be set, and that of a sublayer that a custom layer creates
            # in code: without a `dtype`, it uses the global policy.
            if is_planned and config is not None and not isinstance(operation, keras.Model):
                if "dtype" not in config:
                    obstacle = "its config has no `dtype`, so its policy cannot be set"
                elif is_in_config and "dtype" in refused_arguments(operation):
                    obstacle = "its `__init__` takes no `dtype`, so its policy cannot be set"
            path = prefix + name
            parts[id(operation)] = Part(path, operation, parent, rule, is_planned, obstacle)
            if is_layer:
                walk(operation, config, f"{path}/", is_created_by_keras)

    walk(model, _config_of_custom(model), "", False)
    return list(parts.values())


def _config_of_custom(operation: keras.Operation) -> Config | None:
    """Returns the config of a layer that is not Keras' own.

    It is `None` if its code raises an error, which cloning the model reports.
    """
    if is_keras_class(type(operation)) or not isinstance(operation, keras.Layer):
        return None
    try:
        return config_of(operation) or {}
    except Exception:
        return None


def config_of(layer: keras.Layer) -> Config:
    """Returns the config of a layer without Keras' warning: lambdas are not taken from it."""
    held = (value for sublayer in sublayers(layer) for value in vars(sublayer).values())
    if not any(getattr(value, "__name__", "") == "<lambda>" for value in held):
        return layer.get_config()
    # The filter is global state, which two threads would not restore.
    with _warnings_lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The object being serialized includes a `lambda`")
        return layer.get_config()


def children_of(parent: keras.Layer) -> list[keras.Operation]:
    """Returns the direct sublayers of a layer, and the operations of a graph, in graph order."""
    operations = parent.operations if is_graph(parent) else []
    return list({id(child): child for child in (*operations, *direct_sublayers(parent))}.values())


def check_built(model: Any) -> None:
    """Raises an error if `model`, or a model inside its graph, is not a built Keras model."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`model` must be a keras.Model, such as keras.models.load_model(file) returns."
            f" Received: model={model!r}"
        )
    # Only models are checked: Keras leaves some layers without weights unbuilt. Custom code may use
    # a nested model as a container of layers, or never.
    children = (
        child
        for layer in sublayers(model)
        if is_passthrough(layer)
        for child in direct_sublayers(layer)
    )
    unbuilt = [
        inner for inner in (model, *children) if isinstance(inner, keras.Model) and not inner.built
    ]
    if unbuilt:
        raise ValueError(
            f"{type(unbuilt[0]).__name__} {unbuilt[0].name!r} is not built: call it on a batch"
            " first, or give it an `Input`."
        )


def check_not_float64(model: keras.Model) -> None:
    """Raises an error if a layer of a model computes in float64."""
    if "float64" in compute_dtypes(model):
        raise ValueError(
            f"{model.name!r} computes in float64: conversion would round its weights to float32."
        )


def is_quantized(model: keras.Model) -> bool:
    """Whether any layer of a model is quantized."""
    return any(getattr(layer, "quantization_mode", None) for layer in sublayers(model))


def is_graph(layer: keras.Operation) -> bool:
    """Whether a layer is a functional model, whose operations and their connections are known."""
    return isinstance(layer, keras.Model) and hasattr(layer, "operations")


def has_float_dtype(operation: keras.Operation) -> bool:
    """Whether it is a layer that computes in floats, unlike a look-up of strings or integers."""
    is_layer = isinstance(operation, keras.Layer)
    return is_layer and keras.backend.is_float_dtype(operation.compute_dtype)


def refused_arguments(layer: keras.Layer) -> set[str]:
    """Returns which of `name`, `trainable` and `dtype` the `__init__` of a layer does not take.

    `keras.Layer.get_config` returns all three, and Keras' `from_config` passes them to `__init__`.
    There are none if the class has its own `from_config`, which may omit them.
    """
    if is_graph(layer) or not is_keras_class(defining_class(type(layer), "from_config")):
        return set()
    parameters = inspect.signature(type(layer).__init__).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return set()
    return {"name", "trainable", "dtype"} - set(parameters)
