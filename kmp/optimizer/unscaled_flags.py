"""Which gradients were non-finite in `unscale`, recorded on the device."""

from typing import Any

import tensorflow as tf
from keras import ops

from kmp.backend import distribution
from kmp.gradients.tensor_groups import Gradients
from kmp.gradients.unscaling import nonfinite_flags


class UnscaledFlags:
    """Records which gradients `unscale` returned with NaN or Inf: a clip after it would hide them.

    The record is a variable, 1.0 for each of these gradients, because `unscale` and `apply` may be
    traced into separate functions.
    """

    def __init__(self) -> None:
        self._flags: Any = None
        self._count = 0  # of gradients that have a flag of their own

    def build_for(self, gradient_count: int) -> None:
        """Creates the record of at most this many gradients."""
        before = self._flags
        if before is not None and before.shape[0] == gradient_count:
            return
        self._flags = distribution.variable("unscaled_nonfinite", "float32", (gradient_count,))
        if before is not None:  # `unscale` came first, with another number of gradients
            self._flags.assign(tf.fill([gradient_count], tf.reduce_max(before)))

    def record(self, gradients: Gradients) -> None:
        """Records which of these unscaled gradients are non-finite."""
        if not gradients:
            return
        count = len(gradients)
        if self._flags is None:
            self.build_for(count)
        # Their own dtypes decide, so they stand for their variables too.
        flags = nonfinite_flags(gradients, variables=gradients, divisor=None, replicas=1)
        size = self._flags.shape[0]
        if count <= size:
            self._count = count
            self._flags.assign(tf.pad(flags, [[0, size - count]]))
        else:
            self._count = 0
            self._flags.assign(tf.fill([size], tf.reduce_max(flags)))

    def take_any(self) -> Any:
        """Returns a scalar float32, 1.0 if one is recorded, else 0.0, and clears the record."""
        if self._flags is None:
            return tf.zeros([])
        flag = tf.reduce_max(self._flags)
        self.clear()
        return flag

    def take(self, count: int) -> tf.Tensor:
        """Returns float32 flags of shape `(count,)` of the gradients in `unscale`; clears them.

        A flag is 1.0 if the gradient had NaN or Inf, else 0.0. If `unscale` got another number of
        gradients, and any of them had NaN or Inf, all flags are 1.0.
        """
        flags = ops.copy(self._flags)
        self.clear()
        if count == self._count:
            return flags[:count]
        return tf.fill([count], tf.reduce_max(flags))

    def clear(self) -> None:
        """Forgets what was recorded."""
        if self._flags is not None:
            self._flags.assign(tf.zeros(self._flags.shape))
