"""What a function that is traced for XLA, a strategy or a stateless call has to do differently."""

import importlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras import ops
from tensorflow.python.ops import control_flow_util


def is_tracing() -> bool:
    """Whether the current graph is traced for XLA. TensorFlow 2.21 has no public name for it."""
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def call_if(condition: Any, function: Callable[[], None]) -> None:
    """Calls a function in a branch, or without one where branches must not write variables.

    XLA copies every variable that a branch writes; under a strategy, a variable that is aggregated over replicas cannot
    be written in one; and a `keras.StatelessScope` keeps the written tensors for use outside the branch. Without a
    branch, the function must write the old values where the scalar bool tensor `condition` is false.
    """
    # Keras 3.15 has no public name for whether a `StatelessScope` is open.
    scope = importlib.import_module("keras.src.backend.common.stateless_scope")
    if is_tracing() or tf.distribute.has_strategy() or scope.in_stateless_scope():
        function()
    else:
        ops.cond(condition, outlined(function), lambda: None)


def outlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that a graph calls as one operation, for a branch that is rarely taken.

    TensorFlow visits each operation of a branch in every step, even in a branch that is not taken. Of a function that
    is called in such a branch, it visits only the call.
    """

    def call(*args: Any) -> Any:
        if tf.executing_eagerly() or is_tracing() or tf.distribute.has_strategy():
            return function(*args)
        # The attribute is private: in TensorFlow 2.21, nothing else prevents that Grappler inlines the function.
        return tf.function(function, autograph=False, experimental_attributes={"_noinline": True})(*args)

    return call
