"""Records whether the losses of a step were finite before they were scaled."""

from typing import Any, NamedTuple

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


class StepLosses(NamedTuple):
    """The losses that went through `scale_loss` in a step.

    Attributes:
        nonfinite: Scalar float32, how many of them were non-finite. A custom loop may scale a loss and discard it, so
            only the last one can skip the step. But each of them can be the cause of non-finite gradients.
        last_nonfinite: Scalar float32, 1 if the last one was non-finite, else 0.
        last: Scalar float32, the mean of the last one; 0 if there was none.
    """

    nonfinite: Any
    last_nonfinite: Any
    last: Any

    @property
    def were_finite(self) -> Any:
        """Scalar bool, whether all of them were finite."""
        return ops.equal(self.nonfinite, 0.0)


class LossMonitor:
    """Records on each replica whether the losses of its forward passes were finite before they were scaled.

    The record is a variable because `scale_loss` and `apply` may be traced into separate functions. It has four
    elements: those of `StepLosses`, and the number of non-finite losses in all steps. They are float32, which every
    device can sum over replicas. That number stays at 2^24 once it is reached.
    """

    def __init__(self) -> None:
        self._record = distribution.variable("losses_of_step", "float32", (4,))
        self.has_recorded = False
        self.loss_dtype: str | None = None

    def record(self, loss: Any) -> None:
        """Records a loss of the current step; warns if the first recorded loss is float16."""
        self.loss_dtype = keras.backend.standardize_dtype(loss.dtype)
        if self.loss_dtype == FLOAT16.name and not self.has_recorded:
            user_messages.warn(_LOSS_IN_FLOAT16)
        self.has_recorded = True
        flag = tensor_statistics.nonfinite_flag(loss)
        nonfinite, _, _, in_all_steps = tf.unstack(self._record)
        mean = ops.cast(ops.mean(loss), "float32")
        self._record.assign(tf.stack([nonfinite + flag, flag, mean, in_all_steps + flag]))

    def ignore_where(self, where: Any) -> None:
        """Prevents a backoff in this step if the scalar bool is true, as a non-finite loss does."""
        nonfinite, *others = tf.unstack(self._record)
        self._record.assign(tf.stack([nonfinite + ops.cast(where, "float32"), *others]))

    def nonfinite_losses(self) -> tf.Tensor:
        """Returns the number of non-finite losses in all steps, scalar float32."""
        return self._record.value[3]

    def end_step(self) -> StepLosses:
        """Returns the losses of the step, and begins the next one."""
        *of_step, in_all_steps = tf.unstack(self._record)
        self._record.assign(tf.stack([0.0, 0.0, 0.0, in_all_steps]))
        return StepLosses(*of_step)
