"""Records whether the losses of a step were finite before they were scaled."""

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


class LossMonitor:
    """Records on each replica whether the losses of its forward passes were finite before they were scaled.

    The records are variables because `scale_loss` and `apply` may be traced into separate functions.
    """

    def __init__(self) -> None:
        self.nonfinite_calls = distribution.variable("nonfinite_loss_calls", "int64")
        self.last_was_nonfinite = distribution.variable("last_loss_was_nonfinite", "float32")
        self.any_was_nonfinite = distribution.variable("any_loss_was_nonfinite", "float32")
        self.has_recorded = False
        self.last_loss = distribution.variable("last_loss", "float32")

    def record(self, loss: Any) -> None:
        """Records a loss of the current step until `reset`; warns if the first recorded loss is float16."""
        if keras.backend.standardize_dtype(loss.dtype) == FLOAT16.name and not self.has_recorded:
            user_messages.warn(_LOSS_IN_FLOAT16)
        self.has_recorded = True
        nonfinite = tensor_statistics.nonfinite_flag(loss)
        self.last_loss.assign(ops.cast(ops.mean(loss), "float32"))
        self.nonfinite_calls.assign_add(ops.cast(nonfinite, "int64"))
        self.last_was_nonfinite.assign(nonfinite)
        self.any_was_nonfinite.assign(ops.maximum(self.any_was_nonfinite, nonfinite))

    def ignore_where(self, where: Any) -> None:
        """Prevents a backoff in this step if the scalar bool is true, as a non-finite loss does."""
        self.any_was_nonfinite.assign(ops.maximum(self.any_was_nonfinite, ops.cast(where, "float32")))

    def read(self) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns three float32 scalars: flag of a non-finite last loss, flag of any non-finite loss, last loss.

        A flag is 1.0 or 0.0. A custom loop may scale a loss and discard it, so only the last loss can skip the step.
        But in a step with several losses, each of them can be the cause of non-finite gradients.
        """
        return ops.copy(self.last_was_nonfinite), ops.copy(self.any_was_nonfinite), ops.copy(self.last_loss)

    def reset(self) -> None:
        """Clears the losses of the step, but not `nonfinite_calls`."""
        for variable in (self.last_was_nonfinite, self.any_was_nonfinite, self.last_loss):
            variable.assign(0.0)
