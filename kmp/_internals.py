"""What kmp takes from inside of Keras because nothing public tells it; each with what the public names lack."""

import re
from collections.abc import Iterator
from typing import Any

import keras


def calls_of(operation: keras.Operation) -> list[Any]:
    """Returns a node for each call of an operation in a graph: `arguments`, `input_tensors`, `output_tensors`.

    Keras shows the `input` and `output` of the first one.
    """
    return list(operation._inbound_nodes)


def maker_of(tensor: keras.KerasTensor) -> keras.Operation:
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


def state_of(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
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
        yield from state_of(value)
    elif isinstance(value, list | tuple | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _variables_in(inner)


def declared_trainable(layer: keras.Layer) -> list[keras.Variable]:
    """Returns what a layer itself declared as trained. The public list has the layers below, and is empty if frozen."""
    return list(layer._trainable_variables)


def declared_not_trainable(layer: keras.Layer) -> list[keras.Variable]:
    """Returns what a layer itself declared as not trained. The public list has all weights of a frozen layer."""
    return list(layer._non_trainable_variables)
