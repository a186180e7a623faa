"""What XLA compiles."""

from collections.abc import Callable, Hashable
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_util


def is_tracing() -> bool:
    """Tells whether what is being traced is for XLA; nothing public does."""
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


class Compiler:
    """Compiles functions with XLA where what calls them is not compiled itself."""

    def __init__(self) -> None:
        self._eager: dict[Hashable, Callable[..., Any]] = {}

    def call(self, key: Hashable, function: Callable[..., Any], *args: Any) -> Any:
        """Calls `function(*args)`, compiled.

        Args:
            key: What tells it from the others that are given to this object. Called eagerly, the one that had the same
                key first is kept and called again; a graph gets what it is given.
            function: Takes tensors, or lists of them.
            *args: Its arguments.
        """
        if is_tracing():
            return function(*args)
        compiled = tf.function(function, jit_compile=True, autograph=False)
        if tf.executing_eagerly():
            compiled = self._eager.setdefault(key, compiled)
        return compiled(*args)

    def forget(self) -> None:
        """Compiles anew what is called from now on."""
        self._eager.clear()
