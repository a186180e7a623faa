"""Remembers which gradients were not finite when `unscale` received them."""

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kmp.optimizer.unscaling import nonfinite_flags


class UnscaledFlags:
    """Keeps the flags from `unscale` to the next `apply`: a clip by value in between would hide an overflow.

    Both calls have to be in the same function, or eager.
    """

    def __init__(self) -> None:
        self._graph: weakref.ref[tf.Graph] | None = None
        self._flags: list[tf.Tensor] = []

    def record(self, unscaled: Sequence[Any]) -> None:
        """Records the results of a call of `unscale`.

        Args:
            unscaled: Unscaled gradients: tensors, `tf.IndexedSlices` or `None`.
        """
        if not self._is_of_current_graph():
            self._flags.clear()
            self._graph = None if tf.executing_eagerly() else weakref.ref(tf.compat.v1.get_default_graph())
        flags = nonfinite_flags(unscaled, unscaled, 1.0, replicas=1) if unscaled else tf.zeros([0])
        if self._flags and self._flags[-1].shape == flags.shape:  # of another micro-batch
            self._flags[-1] = tf.maximum(self._flags[-1], flags)
        else:
            self._flags.append(flags)

    def take(self, count: int) -> tf.Tensor | None:
        """Returns and forgets the flags.

        Args:
            count: Number of gradients that `apply` received.

        Returns:
            float32 tensor of shape `(count,)`, 1.0 where a gradient was not finite; if the calls of `unscale` received
            another number of gradients, all are 1.0 if any was not finite. `None` without a call.
        """
        flags = self._flags if self._is_of_current_graph() else []
        self._flags = []
        if not flags:
            return None
        joined = tf.concat(flags, 0)
        if joined.shape[0] % count:
            return tf.fill([count], tf.reduce_max(joined))
        return tf.reduce_max(tf.reshape(joined, [-1, count]), 0)

    def _is_of_current_graph(self) -> bool:
        if tf.executing_eagerly():
            return self._graph is None
        return self._graph is not None and self._graph() is tf.compat.v1.get_default_graph()
