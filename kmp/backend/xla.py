"""Compilation with XLA."""

from collections.abc import Callable, Hashable
from typing import Any

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


class Compiler:
    """Compiles functions with XLA if their caller is not compiled."""

    def __init__(self) -> None:
        # Each entry keeps its dependency alive, so that the `id` in its key is not reused.
        self._eager: dict[Hashable, tuple[Any, Callable[..., Any]]] = {}

    def call(self, key: Hashable, dependency: Any, function: Callable[..., Any], *args: Any) -> Any:
        """Calls `function(*args)` compiled with XLA.

        Args:
            key: Identifies the function. Eager calls reuse the first function with the same key and dependency; in a
                graph, `function` is compiled in every call.
            dependency: An object that the function uses, and that can be replaced by another one.
            function: A function of tensors, or lists of tensors.
            *args: The function's arguments.
        """
        if is_tracing():
            return function(*args)
        compiled = tf.function(function, jit_compile=True, autograph=False)
        if tf.executing_eagerly():
            _, compiled = self._eager.setdefault((key, id(dependency)), (dependency, compiled))
        return compiled(*args)

    def forget(self) -> None:
        """Clears the compiled functions: the next eager calls compile again."""
        self._eager.clear()
