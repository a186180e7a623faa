"""Keras' private names that kmp reads or sets. In Keras 3.15 no public name has what they have.

Where one comes close, the function says what it lacks.
"""

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from kmp.backend.patching import instance_attribute
from kmp.utils import DTYPES_16_BIT


def is_keras_class(cls: type) -> bool:
    """Whether a class is defined in Keras."""
    return cls.__module__.startswith("keras.")


def defining_class(cls: type, name: str) -> type:
    """Returns the class in the MRO of `cls` that defines `name`: Keras treats a replacement there as its own method."""
    return next(base for base in cls.__mro__ if name in vars(base))


def calls_of(operation: keras.Operation) -> list[Any]:
    """Returns one node per call of an operation in a graph, with `arguments`, `input_tensors` and `output_tensors`.

    The public `input` and `output` are those of the first call only.
    """
    return list(operation._inbound_nodes)


def graph_tensors(model: keras.Model, name: str) -> list[keras.KerasTensor]:
    """Returns the `"inputs"` or `"outputs"` of a functional or Sequential model, in order; none for other models.

    A subclassed model has no such attributes, or its own with other values.
    """
    tensors = keras.tree.flatten(getattr(model, name, None) or [])
    return tensors if all(isinstance(tensor, keras.KerasTensor) for tensor in tensors) else []


def producer_of(tensor: keras.KerasTensor) -> keras.Operation:
    """Returns the operation that produces a tensor of a graph."""
    return tensor._keras_history.operation


def functional_outputs(model: keras.Model, inputs: Any, replace: Callable[[keras.Operation], Any]) -> Any:
    """Returns the outputs of a functional model for other inputs, with each operation replaced.

    The public `keras.models.clone_model` also clones the inputs and compiles the clone from a config.
    """
    return model._run_through_graph(inputs, operation_fn=replace)


def unconnected_copy(operation: keras.Operation) -> keras.Operation:
    """Returns a copy of an operation that is in no graph; it shares the arguments of the original.

    `copy.copy` would save and load it. The config of an operation lacks arguments such as arrays and functions.
    """
    copy = object.__new__(type(operation))
    vars(copy).update(vars(operation), _inbound_nodes=[], _outbound_nodes=[])
    return copy


def attached_to(tensor: Any) -> dict[str, Any]:
    """Returns what Keras attached to a tensor: a mask, or the logits of a softmax, which a loss may use instead."""
    return {name: value for name, value in vars(tensor).items() if name.startswith("_keras")}


def in_float32(tensors: Any) -> Any:
    """Returns a structure with its 16-bit tensors cast to float32; each keeps its mask, which no public name has."""

    def cast(tensor: Any) -> Any:
        if not isinstance(tensor, tf.Tensor) or tensor.dtype.name not in DTYPES_16_BIT:
            return tensor
        result = tf.cast(tensor, tf.float32)
        if getattr(tensor, "_keras_mask", None) is not None:
            result._keras_mask = tensor._keras_mask
        return result

    return keras.tree.map_structure(cast, tensors)


def uncast_value(variable: keras.Variable) -> tf.Tensor:
    """Returns a copy of a variable's value. In the call of a layer, the public `value` is cast to its compute dtype."""
    return tf.identity(variable._value)


def learning_rate_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns an optimizer's learning rate schedule, or the variable that holds its learning rate.

    The public `learning_rate` is the current value of the schedule.
    """
    return optimizer._learning_rate


def variables_to_train(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the variables that an optimizer was built with. The public `variables` are its state."""
    return list(optimizer._trainable_variables)


def optimizer_state(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns all state variables of an optimizer, in the order of its attributes.

    The public `variables` lists only the variables that Keras tracks. Keras builds an inner optimizer of a
    `LossScaleOptimizer` without tracking, so variables in plain attributes are missing: Nadam's momentum product and
    Adafactor's placeholders.
    """
    is_tracking_list = re.compile("_variables|_trainable_variables|_self_.*").fullmatch  # of Keras and TensorFlow
    attributes = {name: value for name, value in vars(optimizer).items() if not is_tracking_list(name)}
    trained_ids = set(map(id, variables_to_train(optimizer)))
    variables = {id(variable): variable for variable in (*_variables_in(attributes), *optimizer.variables)}
    return [variable for key, variable in variables.items() if key not in trained_ids]


def _variables_in(value: Any) -> Iterator[keras.Variable]:
    if isinstance(value, keras.Variable):
        yield value
    elif isinstance(value, keras.optimizers.Optimizer):  # such as those in a MultiOptimizer
        yield from optimizer_state(value)
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _variables_in(item)


def takes_training(model: keras.Model) -> bool:
    """Whether Keras' `train_step` passes `training=True` to a model. Without it, its layers run as for inference."""
    return bool(model._call_has_training_arg)


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Returns the arguments that a model was compiled with. The public `get_compile_config` has only their configs."""
    return model._compile_config.config


@contextlib.contextmanager
def layer_names_restored() -> Iterator[None]:
    """Restores the numbers that Keras gives to unnamed layers."""
    state = importlib.import_module("keras.src.backend.common.global_state")
    numbers = state.get_global_attribute("object_name_uids")
    before = dict(numbers or {})
    try:
        yield
    finally:
        numbers = state.get_global_attribute("object_name_uids")
        if numbers is not None:
            numbers.clear()
            numbers.update(before)


@contextlib.contextmanager
def dtype_policy_replaced(layer: keras.Layer, policy: keras.DTypePolicy) -> Iterator[None]:
    """Sets a layer's policy in the context. The public setter would change a `DTypePolicyMap`, and quantize."""
    with instance_attribute(layer, "_dtype_policy", policy):
        yield


def declared_trainable(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the trainable variables that a layer itself created.

    The public list also has those of sublayers, and is empty if the layer is frozen.
    """
    return list(layer._trainable_variables)


def declared_not_trainable(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the non-trainable variables that a layer itself created.

    The public list also has those of sublayers, and all weights if the layer is frozen.
    """
    return list(layer._non_trainable_variables)


def is_symbolic() -> bool:
    """Whether Keras calls a layer only for the shapes and dtypes of its outputs."""
    return bool(importlib.import_module("keras.src.backend.common.symbolic_scope").in_symbolic_scope())


def functional_input_cast() -> tuple[type, str]:
    """Returns the class and the method that casts the arguments of a functional model to the dtypes of its `Input`s."""
    return importlib.import_module("keras.src.models.functional").Functional, "_convert_inputs_to_tensors"
