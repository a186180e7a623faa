"""What each replica saw of a step before `apply`: its stage, its losses and its gradients."""

from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import ops

from kmp.backend import distribution
from kmp.gradients.tensor_groups import Gradients
from kmp.gradients.unscaling import nonfinite_flag
from kmp.optimizer.stage import StepStage
from kmp.optimizer.unscaled_flags import UnscaledFlags
from kmp.utils import user_messages
from kmp.utils.float_formats import FLOAT16

_LOSS_IN_FLOAT16 = (
    "The loss was computed in float16, which rounds it to 11 bits and overflows beyond 65504."
    " Compute it in float32: end the model with kmp.layers.Softmax() or a layer with"
    " dtype='float32', or cast its output."
)


class StepLosses(NamedTuple):
    """The losses that went through `scale_loss`: the elements of the record on the device.

    Each is a scalar float32, which every device can sum over replicas.

    Attributes:
        nonfinite: How many losses of the step were non-finite. A custom loop may scale a loss and
            discard it, so only the last one can skip the step. But each of them can be the cause of
            non-finite gradients.
        last_nonfinite: 1 if the last one was non-finite, else 0.
        last: The mean of the last one, or its sum over replicas; 0 if there was none.
        empty_batches: 1 if the batch had no rows, else 0; over replicas, how many had none.
        all_nonfinite: How many losses of all steps were non-finite. It stays at 2^24 once that is
            reached, as `all_losses` does.
        all_losses: The number of losses of all steps.
    """

    nonfinite: Any
    last_nonfinite: Any
    last: Any
    empty_batches: Any
    all_nonfinite: Any
    all_losses: Any

    @property
    def must_skip(self) -> Any:
        """Scalar float32, above 0 if the last one was non-finite or a batch had no rows."""
        return self.last_nonfinite + self.empty_batches

    @property
    def had_rows(self) -> Any:
        """Scalar bool, whether the batch of each replica had rows."""
        return ops.equal(self.empty_batches, 0.0)

    @property
    def were_finite(self) -> Any:
        """Scalar bool, whether all of them were finite, and no batch was empty."""
        return ops.equal(self.nonfinite + self.empty_batches, 0.0)


_INDEX = {name: index for index, name in enumerate(StepLosses.__annotations__)}
_OF_ALL_STEPS = ("all_nonfinite", "all_losses")


class StepMonitor:
    """Records, on each replica, whether the losses and the gradients of a step were finite.

    The records are variables because `scale_loss`, `unscale` and `apply` may be traced into
    separate functions. Python knows the order of these calls.

    Args:
        requires_scaling: Whether gradients of a loss that was not scaled are a mistake; not at a
            fixed scale of 1.

    Attributes:
        stage: The order of the calls.
        unscaled_flags: Which gradients `unscale` returned with NaN or Inf.
        loss_dtype: The dtype of the loss that `scale_loss` got last; `None` before the first one.
        has_applied_unscaled: Whether the last `apply` got gradients that were divided by the loss
            scale already.
    """

    def __init__(self, requires_scaling: bool) -> None:
        self.stage = StepStage(requires_scaling)
        self.unscaled_flags = UnscaledFlags()
        self.loss_dtype: str | None = None
        self.has_applied_unscaled = False
        self._record = distribution.variable("losses_of_step", "float32", (len(_INDEX),))
        self._loss_is_traced = False
        self._losses_at_unscale: float | None = None

    def begin_train_step(self, is_empty: Any = None, name: str = "self.optimizer") -> None:
        """Begins a `train_step` of `fit`, which has to call `scale_loss`.

        Args:
            is_empty: Scalar bool, whether the batch has no rows: a skipped step is no overflow
                then.
            name: What the `train_step` calls the optimizer.
        """
        self.stage.begin_train_step(name)
        if is_empty is not None:
            # This replaces the mark of an earlier batch, on which another optimizer of the model
            # may have stepped.
            mark = ops.cast(is_empty, "float32")
            self._record.assign(tf.where(_mask("empty_batches"), mark, self._record.value))

    def record_loss(self, loss: tf.Tensor) -> None:
        """Records a loss of the current step before it is scaled; warns if it is float16."""
        dtype = keras.backend.standardize_dtype(loss.dtype)
        if dtype == FLOAT16.name and self.loss_dtype is None:
            user_messages.warn(_LOSS_IN_FLOAT16)
        self.loss_dtype = dtype
        self._loss_is_traced |= not tf.executing_eagerly()

        flag = nonfinite_flag(loss)
        cause = flag
        kept = ["empty_batches", *_OF_ALL_STEPS]
        if self.stage.scale_loss():
            # In sharpness-aware minimization, an overflow of the first gradients is in the weights
            # of the second pass: its loss is not the cause.
            cause = flag * (1.0 - self.unscaled_flags.take_any())
        else:
            kept.append("nonfinite")
        new = StepLosses(
            nonfinite=cause,
            last_nonfinite=flag,
            last=ops.cast(ops.mean(loss), "float32"),
            empty_batches=tf.zeros([]),
            all_nonfinite=flag,
            all_losses=tf.ones([]),
        )
        self._record.assign(_only(kept, self._record.value) + tf.stack(new))

    def record_unscaled(self, gradients: Gradients) -> None:
        """Records which gradients `unscale` returned with NaN or Inf."""
        self.stage.unscale(sum(gradient is not None for gradient in gradients))
        self._losses_at_unscale = self._losses_of_functions()
        self.unscaled_flags.record(gradients)

    def follow_functions(self) -> None:
        """Corrects the stage if a function, which runs without calling Python, scaled a loss.

        The batch that `unscale` got was discarded then.
        """
        before, self._losses_at_unscale = self._losses_at_unscale, None
        if before is None or not self.stage.is_unscaled:
            return
        if self._losses_of_functions() not in (None, before):
            self.stage.scale_loss()
            self.unscaled_flags.clear()

    def _losses_of_functions(self) -> float | None:
        """Returns the number of losses so far, if functions may scale one between eager calls."""
        is_eager = tf.executing_eagerly() and not tf.distribute.has_strategy()
        if not is_eager or not self._loss_is_traced:
            return None
        return float(self._record.value[_INDEX["all_losses"]])

    def end_apply(self, unscaled: bool) -> None:
        """Records that `apply` was called with this argument."""
        if self.stage.is_unscaled and not unscaled:
            self.unscaled_flags.clear()
        self.stage.apply()
        self.has_applied_unscaled = unscaled

    def take_losses(self) -> tf.Tensor:
        """Returns the record of losses of shape `(6,)` for `StepLosses`; begins the next step."""
        record = ops.copy(self._record)
        self._record.assign(_only(_OF_ALL_STEPS, record))
        return record

    def losses(self) -> tf.Tensor:
        """Returns a copy of the record of losses."""
        return ops.copy(self._record)

    def nonfinite_loss_since(self, record: tf.Tensor) -> tf.Tensor:
        """Returns a scalar bool, whether a loss was non-finite since `losses` returned `record`."""
        return (self._record.value > record)[_INDEX["all_nonfinite"]]


def _mask(*names: str) -> list[bool]:
    return [name in names for name in _INDEX]


def _only(names: list[str] | tuple[str, ...], record: tf.Tensor) -> tf.Tensor:
    """Returns the record with zeros in place of its other elements."""
    return tf.where(_mask(*names), record, 0.0)  # not `*`: 0 * NaN is NaN
