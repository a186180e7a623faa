"""Compilation with XLA."""

import tensorflow as tf
from tensorflow.python.ops import control_flow_util


def is_tracing() -> bool:
    """Whether the current graph is traced for XLA. No public function returns it."""
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def error() -> str | None:
    """Returns why XLA cannot compile a function on this machine; `None` if it can."""
    try:
        tf.function(tf.exp, jit_compile=True, autograph=False)(tf.ones(8)).numpy()  # a number would be a constant
    except (tf.errors.OpError, NotImplementedError) as reason:
        return str(reason)
    return None
