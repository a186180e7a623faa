"""Compilation with XLA."""

from collections.abc import Callable, Hashable
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_util


def is_tracing() -> bool:
    """Whether the current graph is traced for XLA. No public function returns it."""
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


class Compiler:
    """Compiles functions with XLA if their caller is not compiled."""

    def __init__(self) -> None:
        # With the object that each function uses: while it exists, no other one has its `id`.
        self._eager: dict[Hashable, tuple[Any, Callable[..., Any]]] = {}

    def call(self, key: Hashable, used: Any, function: Callable[..., Any], *args: Any) -> Any:
        """Calls `function(*args)` compiled with XLA.

        Args:
            key: Identifies the function. Eager calls reuse the first function with the same key and the same `used`; in
                a graph, `function` is compiled in every call.
            used: An object that the function uses, which another one may replace.
            function: A function of tensors, or lists of tensors.
            *args: The function's arguments.
        """
        if is_tracing():
            return function(*args)
        compiled = tf.function(function, jit_compile=True, autograph=False)
        if tf.executing_eagerly():
            _, compiled = self._eager.setdefault((key, id(used)), (used, compiled))
        return compiled(*args)

    def forget(self) -> None:
        """Clears the compiled functions: the next eager calls compile again."""
        self._eager.clear()
