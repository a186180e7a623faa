"""The ways in which a layer, operation or model is rebuilt: the first one of `WAYS` that applies.

Functional and Sequential models are connected again, call by call. Every other layer is created
from its `get_config`, in which its sublayers are replaced by their clones, and functions by those
of the original. Everything else in a config is deserialized in safe mode: it must not run code that
`keras.models.load_model` has not run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from kmp import layers
from kmp.backend import keras_internals
from kmp.backend.keras_internals import (
    defining_class,
    functional_outputs,
    global_policy,
    is_keras_class,
    unconnected_copy,
)
from kmp.conversion.config_references import References, referring_config
from kmp.conversion.model_parts import (
    Config,
    children_of,
    config_of,
    has_float_dtype,
    is_graph,
    refused_arguments,
)
from kmp.layers.float32 import Float32Operation
from kmp.utils.float_formats import DTYPES_16_BIT, FLOAT32

_KERAS_CLASSES = {
    layers.Softmax: keras.layers.Softmax,
    layers.BatchNormalization: keras.layers.BatchNormalization,
}
_KMP_CLASSES = {keras.layers.BatchNormalization: layers.BatchNormalization}
_GRAPH_KEYS = ("layers", "input_layers", "output_layers")


@dataclass(frozen=True)
class Task:
    """One layer, operation or model that is to be rebuilt.

    Args:
        original: The layer, operation or model.
        policy: The dtype policy of its clone.
        is_to_float32: Whether all is float32, with Keras' own layers in place of kmp's.
        references: The objects to which its config may refer.
        clone_of: Returns the clone of another one, which is created at the first call.
    """

    original: Any
    policy: str
    is_to_float32: bool
    references: References
    clone_of: Callable[[keras.Operation], Any]


@dataclass(frozen=True)
class Way:
    """One way of rebuilding.

    Args:
        applies: Whether it is the way of a task.
        rebuild: Rebuilds.
        connects: Whether the clone has the clones of its layers, connected call by call. Otherwise
            the code of its class may create sublayers.
    """

    applies: Callable[[Task], bool]
    rebuild: Callable[[Task], Any]
    connects: bool = False


def way_of(task: Task) -> Way:
    """Returns the way in which a task is done."""
    return next(way for way in WAYS if way.applies(task))


def _is_operation_of_kmp(task: Task) -> bool:
    return task.is_to_float32 and isinstance(task.original, Float32Operation)


def _take_operation_of_keras(task: Task) -> keras.Operation:
    return _copy(task.original.operation, task.original.name)


def _is_operation_in_float32(task: Task) -> bool:
    is_operation = not isinstance(task.original, keras.Layer | Float32Operation)
    return is_operation and not task.is_to_float32 and task.policy == FLOAT32.name


def _run_operation_in_float32(task: Task) -> keras.Operation:
    name = task.original.name
    return Float32Operation(_copy(task.original, name), name=name)


def _is_operation(task: Task) -> bool:
    return not isinstance(task.original, keras.Layer)


def _copy_operation(task: Task) -> keras.Operation:
    return _copy(task.original, task.original.name)


def _copy(operation: keras.Operation, name: str) -> keras.Operation:
    clone = unconnected_copy(operation)
    clone.name = name
    return clone


def _is_input(task: Task) -> bool:
    return isinstance(task.original, keras.layers.InputLayer)


def _rebuild_input(task: Task) -> keras.Layer:
    config = task.original.get_config()
    # Keras creates that of a Sequential in 16 bits.
    if task.is_to_float32 and task.original.dtype in DTYPES_16_BIT:
        config["dtype"] = FLOAT32.name
    with global_policy(FLOAT32.name):
        return type(task.original).from_config(config)


def _is_sequential(task: Task) -> bool:
    return type(task.original) is keras.Sequential


def _rebuild_sequential(task: Task) -> keras.Model:
    original = task.original
    inputs = [
        child for child in children_of(original) if isinstance(child, keras.layers.InputLayer)
    ]
    # `layers` may have one twice.
    clones = [task.clone_of(layer) for layer in (*inputs, *original.layers)]
    return keras.Sequential(clones, name=original.name)


def _is_connected_graph(task: Task) -> bool:
    return _arguments_of_graph(task.original) is not None


def _connect_graph(task: Task) -> keras.Model:
    original = task.original

    def clone_of_input(tensor: keras.KerasTensor) -> keras.KerasTensor:
        return task.clone_of(keras_internals.producer_of(tensor)).output

    inputs = keras.tree.map_structure(clone_of_input, original.input)
    outputs = functional_outputs(original, inputs, task.clone_of)
    arguments = _arguments_of_graph(original) or {}
    return type(original)(inputs=inputs, outputs=outputs, name=original.name, **arguments)


def _arguments_of_graph(model: keras.Layer) -> Config | None:
    """Returns the arguments of a functional model besides its inputs and outputs.

    `None` for a model that the code of its class builds.
    """
    if not is_graph(model) or not is_keras_class(defining_class(type(model), "from_config")):
        return None
    if is_keras_class(type(model)):
        return {}
    config = config_of(model)
    if not all(key in config for key in _GRAPH_KEYS):
        return None
    known = {*_GRAPH_KEYS, "name", "trainable"}
    return {key: value for key, value in config.items() if key not in known}


def _is_layer_in_float32(task: Task) -> bool:
    is_around_layer = _is_float32(task) and isinstance(task.original.layer, keras.Layer)
    return task.is_to_float32 and is_around_layer


def _take_layer_of_float32(task: Task) -> keras.Layer:
    clone = task.clone_of(task.original.layer)
    clone.name = task.original.name
    return clone


def _is_lambda_in_float32(task: Task) -> bool:
    if not task.is_to_float32 or not _is_function_in_float32(task):
        return False
    for call in keras_internals.calls_of(task.original):
        arguments = call.arguments
        if len(arguments.args) + len(arguments.kwargs.keys() - {"training"}) != 1:
            return False
    return True


def _make_lambda(task: Task) -> keras.Layer:
    return keras.layers.Lambda(task.original.layer, **_config_of_base(task))


def _is_function_in_float32(task: Task) -> bool:
    return _is_float32(task) and not isinstance(task.original.layer, keras.Layer)


def _rebuild_float32(task: Task) -> keras.Layer:
    return type(task.original)(layer=task.original.layer, **_config_of_base(task))


def _is_float32(task: Task) -> bool:
    return isinstance(task.original, layers.Float32)


def _config_of_base(task: Task) -> Config:
    """Returns a config without the function.

    `get_config` needs the source of a lambda, which an interactive session does not have.
    """
    return keras.Layer.get_config(task.original) | {"dtype": task.policy}


def _is_exported_model(task: Task) -> bool:
    return isinstance(task.original, keras.layers.TFSMLayer)


def _load_exported_model(task: Task) -> keras.Layer:
    # Safe mode refuses its config, even that of a layer in use.
    return type(task.original)(**_config_with_policy(task))


def _is_any(task: Task) -> bool:
    return True


def _rebuild_from_config(task: Task) -> keras.Layer:
    original = task.original
    config = referring_config(original, _config_with_policy(task), task.references, task.clone_of)
    refused = refused_arguments(original)
    for name in refused:
        config.pop(name, None)
    with global_policy(task.policy):
        clone = _class_of_clone(task).from_config(config)
    if "name" in refused:
        clone.name = original.name
    if isinstance(original, keras.Model) and not clone.built and original.get_build_config():
        clone.build_from_config(original.get_build_config())
        # As Keras does: `build_from_config` does not, if the model has no `build`.
        clone.built = True
    return clone


def _config_with_policy(task: Task) -> Config:
    config = dict(config_of(task.original))
    if "dtype" in config and has_float_dtype(task.original):
        config["dtype"] = task.policy
    return config


def _class_of_clone(task: Task) -> Any:
    cls = type(task.original)
    if task.is_to_float32:
        return _KERAS_CLASSES.get(cls, cls)
    # "float16" and "bfloat16" keep all weights in 16 bits, which kmp's layer does not.
    return cls if task.policy in DTYPES_16_BIT else _KMP_CLASSES.get(cls, cls)


WAYS = (
    Way(_is_operation_of_kmp, _take_operation_of_keras),
    Way(_is_operation_in_float32, _run_operation_in_float32),
    Way(_is_operation, _copy_operation),
    Way(_is_input, _rebuild_input),
    Way(_is_sequential, _rebuild_sequential, connects=True),
    Way(_is_connected_graph, _connect_graph, connects=True),
    Way(_is_layer_in_float32, _take_layer_of_float32),
    Way(_is_lambda_in_float32, _make_lambda),
    Way(_is_function_in_float32, _rebuild_float32),
    Way(_is_exported_model, _load_exported_model),
    Way(_is_any, _rebuild_from_config),
)
