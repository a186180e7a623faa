"""What kmp reads and sets of Keras' private attributes; each with what the public names lack."""

import re
from collections.abc import Iterator
from typing import Any

import keras


def calls_of(operation: keras.Operation) -> list[Any]:
    """Returns a node for each call of an operation in a graph: `arguments`, `input_tensors`, `output_tensors`.

    Keras shows the `input` and `output` of the first one.
    """
    return list(operation._inbound_nodes)


def producer_of(tensor: keras.KerasTensor) -> keras.Operation:
    """Returns the operation that a tensor of a graph comes from. A tensor has no public name for it."""
    return tensor._keras_history.operation


def learning_rate_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns an optimizer's schedule, or the variable that holds its rate.

    The public `learning_rate` is the number that a schedule comes to now.
    """
    return optimizer._learning_rate


def variables_to_train(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the variables that an optimizer was built on; the public `variables` are its own state."""
    return list(optimizer._trainable_variables)


def optimizer_state(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns all that an optimizer keeps, attribute by attribute.

    Its public `variables` are those that Keras tracks. A loss scaler builds its inner optimizer untracked, and what
    that makes as plain attributes is in no list: Nadam's product of momenta, Adafactor's placeholders.
    """
    is_list = re.compile("_variables|_trainable_variables|_self_.*").fullmatch  # Keras' lists, TensorFlow's
    attributes = {name: value for name, value in vars(optimizer).items() if not is_list(name)}
    trained = set(map(id, variables_to_train(optimizer)))
    found = {id(variable): variable for variable in (*_variables_in(attributes), *optimizer.variables)}
    return [variable for key, variable in found.items() if key not in trained]


def _variables_in(value: Any) -> Iterator[keras.Variable]:
    if isinstance(value, keras.Variable):
        yield value
    elif isinstance(value, keras.optimizers.Optimizer):  # one of those that a MultiOptimizer holds
        yield from optimizer_state(value)
    elif isinstance(value, list | tuple | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _variables_in(inner)


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Returns the arguments that a model was compiled with. The public `get_compile_config` has only their configs."""
    return model._compile_config.config


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Sets the epoch that `fit` starts with; `None` for its argument. Keras' own `BackupAndRestore` does the same."""
    model._initial_epoch = epoch


def lambda_output_shape(layer: keras.layers.Lambda) -> Any:
    """Returns the output shape that a `Lambda` layer was given. No public attribute holds it."""
    return layer._output_shape


def declared_trainable(layer: keras.Layer) -> list[keras.Variable]:
    """Returns what a layer itself declared as trained. The public list has the layers below, and is empty if frozen."""
    return list(layer._trainable_variables)


def declared_not_trainable(layer: keras.Layer) -> list[keras.Variable]:
    """Returns what a layer itself declared as not trained. The public list has all weights of a frozen layer."""
    return list(layer._non_trainable_variables)
