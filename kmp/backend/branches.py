"""Branches that write variables, where the graph supports them."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras import ops

from kmp.backend import keras_internals, xla


def call_if(condition: Any, function: Callable[[], None]) -> None:
    """Calls a function in a branch, or without one where branches must not write variables.

    XLA copies every variable that a branch writes; under a strategy, a variable that is aggregated over replicas cannot
    be written in one; and a `keras.StatelessScope` keeps the written tensors for use outside the branch. Without a
    branch, the function must write the old values where `condition` is false.

    Args:
        condition: Scalar bool tensor.
        function: Writes variables.
    """
    if xla.is_tracing() or tf.distribute.has_strategy() or keras_internals.is_stateless():
        function()
    else:
        ops.cond(condition, outlined(function), lambda: None)


def outlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that a graph calls as one operation, for a branch that is rarely taken.

    TensorFlow visits each operation of a branch in every step, even in a branch that is not taken. Of a function that
    is called in such a branch, it visits only the call.

    Args:
        function: A function of tensors.
    """

    def call(*args: Any) -> Any:
        if tf.executing_eagerly() or xla.is_tracing() or tf.distribute.has_strategy():
            return function(*args)
        return tf.function(function, autograph=False, experimental_attributes={"_noinline": True})(*args)

    return call
