"""Whether the losses of a step were finite before they were scaled."""

from typing import Any

import keras
import tensorflow as tf
from keras import ops

from kmp.backend import distribution
from kmp.gradients import tensor_statistics
from kmp.utils import FLOAT16, user_messages

_LOSS_IN_FLOAT16 = (
    "The loss was computed in float16, which rounds it to 11 bits and overflows beyond 65504. Compute it in float32: "
    "end the model with kmp.layers.Softmax() or a layer with dtype='float32', or cast its output."
)
_WITHOUT_SCALE_LOSS = (
    "`apply` got gradients before any loss went through `scale_loss`, and divides them by the loss scale all the same. "
    "Differentiate the scaled loss: scaled_loss = optimizer.scale_loss(loss), inside the tape."
)


class LossMonitor:
    """Whether losses were finite before they were scaled, as each replica saw it in its own forward passes.

    Variables, because `scale_loss` and `apply` may be traced into functions of their own.
    """

    def __init__(self) -> None:
        self.nonfinite_calls = distribution.variable("nonfinite_loss_calls", "int64")
        self.last_was_nonfinite = distribution.variable("last_loss_was_nonfinite", "float32")
        self.any_was_nonfinite = distribution.variable("any_loss_was_nonfinite", "float32")
        self.has_recorded = self._has_warned = False
        self.last_loss = distribution.variable("last_loss", "float32")

    def note(self, loss: Any) -> None:
        """Remembers a loss of a step, until `forget`; warns if the first one is float16."""
        if keras.backend.standardize_dtype(loss.dtype) == FLOAT16.name and not self.has_recorded:
            user_messages.warn(_LOSS_IN_FLOAT16)
        self.has_recorded = True
        nonfinite = tensor_statistics.nonfinite(loss)
        self.last_loss.assign(ops.cast(ops.mean(loss), "float32"))
        self.nonfinite_calls.assign_add(ops.cast(nonfinite, "int64"))
        self.last_was_nonfinite.assign(nonfinite)
        self.any_was_nonfinite.assign(ops.maximum(self.any_was_nonfinite, nonfinite))

    def ignore_where(self, where: Any) -> None:
        """Takes the blame from the loss scale for what this step's gradients will be, if the scalar bool is true."""
        self.any_was_nonfinite.assign(ops.maximum(self.any_was_nonfinite, ops.cast(where, "float32")))

    def seen(self) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns scalar float32: 1.0 if the step's last loss was not finite; the same of any of them; the last loss.

        A loop may scale a loss and drop it, so only the last one can make a step count as skipped; but where a step has
        several losses, any of them can be why its gradients are not finite.
        """
        return ops.copy(self.last_was_nonfinite), ops.copy(self.any_was_nonfinite), ops.copy(self.last_loss)

    def forget(self) -> None:
        """Forgets the losses of a step; the count of calls goes on."""
        for variable in (self.last_was_nonfinite, self.any_was_nonfinite, self.last_loss):
            variable.assign(0.0)

    def warn_without_scale_loss(self) -> None:
        """Warns, once, that gradients are about to be unscaled which come from no scaled loss."""
        if not self.has_recorded and not self._has_warned:
            self._has_warned = True
            user_messages.warn(_WITHOUT_SCALE_LOSS)
