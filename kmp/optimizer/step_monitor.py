"""What each replica saw of a step before `apply`: what was called, and whether losses and gradients were finite."""

import enum
import math
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import ops

from kmp.backend import distribution
from kmp.gradients import Gradients, nonfinite_flag, nonfinite_flags
from kmp.utils import FLOAT16, user_messages

_NOT_SCALED = (
    "`apply` got gradients of a loss that did not go through `scale_loss`, and divides them by the"
    " loss scale. Scale the loss inside the tape, and differentiate the result:\n    scaled_loss ="
    " {optimizer}.scale_loss(loss)\n    gradients = tape.gradient(scaled_loss, variables)\nIf the"
    " loss is multiplied by the loss scale in another way, pass unscaled=False to `apply`."
)
_STAGE_UNKNOWN = (
    "`apply` cannot know whether its gradients went through `unscale`: a tf.function that runs"
    " again calls no Python, and one call of `unscale` is for one call of `apply`. Pass"
    " unscaled=True if they did, else unscaled=False."
)
_FEWER_UNSCALED = (
    "`apply` got {count} gradients, but the last call of `unscale` only {unscaled}. Pass all"
    " gradients of a step to one call of `unscale`, after the last `scale_loss`. If the others are"
    " unscaled too, pass unscaled=True."
)
_LOSS_IN_FLOAT16 = (
    "The loss was computed in float16, which rounds it to 11 bits and overflows beyond 65504."
    " Compute it in float32: end the model with kmp.layers.Softmax() or a layer with"
    " dtype='float32', or cast its output."
)
_EMPTY_BATCH = -(2.0**20)  # stays negative whatever number of losses is added to it
_NONFINITE_LOSS_COUNT, _LOSS_COUNT = 3, 4  # the elements of the record after those of `StepLosses`


class Stage(enum.Enum):
    """What was called last, as in `torch.amp.GradScaler`; in a graph, in the order of the trace."""

    READY = enum.auto()  # `apply`, or nothing
    TRAIN_STEP = enum.auto()  # a `train_step` of `fit` has begun
    SCALED = enum.auto()  # `scale_loss`
    UNSCALED = enum.auto()  # `unscale`
    APPLIED_UNSCALED = enum.auto()  # `apply`, after `unscale`


class StepLosses(NamedTuple):
    """The losses that went through `scale_loss` in a step.

    Attributes:
        nonfinite: Scalar float32, how many of them were non-finite; negative if a replica's batch
            had no rows. A custom loop may scale a loss and discard it, so only the last one can
            skip the step. But each of them can be the cause of non-finite gradients.
        last_nonfinite: Scalar float32, 1 if the last one was non-finite, else 0.
        last: Scalar float32, the mean of the last one, or its sum over replicas; 0 if there was
            none.
    """

    nonfinite: Any
    last_nonfinite: Any
    last: Any

    @property
    def skip_threshold(self) -> Any:
        """Scalar float32, below 0 if the last one was non-finite or a batch had no rows: flags of 0 exceed it."""
        return ops.minimum(-self.last_nonfinite, self.nonfinite)

    @property
    def were_finite(self) -> Any:
        """Scalar bool, whether all of them were finite, and no batch was empty."""
        return ops.equal(self.nonfinite, 0.0)


class StepMonitor:
    """Knows the stage of a step, and records whether its losses, and the gradients in `unscale`, were finite.

    The records are variables because `scale_loss`, `unscale` and `apply` may be traced into
    separate functions. They are float32, which every device can sum over replicas. That of losses
    has the elements of `StepLosses`, and the numbers of non-finite losses and of losses in all
    steps, which stay at 2^24 once that is reached.

    Args:
        requires_scaling: Whether gradients of a loss that was not scaled are a mistake; not at a
            fixed scale of 1.
    """

    def __init__(self, requires_scaling: bool) -> None:
        self._requires_scaling = requires_scaling
        self._record = distribution.variable("losses_of_step", "float32", (5,))
        self._flags: Any = (
            None  # a variable; 1.0 for each gradient that `unscale` returned with NaN or Inf
        )
        self._flag_count = self._unscaled_count = 0
        self.loss_dtype: str | None = None
        self._stages: dict[int, Stage] = {}
        self._unscale_is_traced = self._loss_is_traced = self._has_warned = False
        self._losses_at_unscale: float | None = None

    @property
    def stage(self) -> Stage:
        """What was called last on this replica."""
        return self._stages.get(distribution.replica_id(), Stage.READY)

    @stage.setter
    def stage(self, stage: Stage) -> None:
        self._stages[distribution.replica_id()] = stage

    def build_for(self, gradient_count: int) -> None:
        """Creates the record of the gradients in `unscale`, which are at most this many."""
        before = self._flags
        if before is not None and before.shape[0] == gradient_count:
            return
        self._flags = distribution.variable("unscaled_nonfinite", "float32", (gradient_count,))
        if before is not None:  # `unscale` came first, with another number of gradients
            self._flags.assign(tf.fill([gradient_count], tf.reduce_max(before)))

    def begin_train_step(self, is_empty: Any = None) -> None:
        """Makes `apply` and `unscale` raise an error until `scale_loss` is called: a `train_step` of `fit` begins.

        If the scalar bool `is_empty` is true, the batch has no rows, and a skipped step is no
        overflow.
        """
        self.stage = Stage.TRAIN_STEP
        if is_empty is not None:
            # Without the mark of an earlier batch, which another optimizer of the model may have
            # stepped on.
            record = tf.maximum(self._record.value, [0.0, *[-math.inf] * 4])
            self._record.assign(
                record + ops.cast(is_empty, "float32") * [_EMPTY_BATCH, 0.0, 0.0, 0.0, 0.0]
            )

    def record_loss(self, loss: tf.Tensor) -> None:
        """Records a loss of the current step before it is scaled; warns if the first one is float16."""
        loss_dtype, is_first = keras.backend.standardize_dtype(loss.dtype), self.loss_dtype is None
        if loss_dtype == FLOAT16.name and is_first:
            user_messages.warn(_LOSS_IN_FLOAT16)
        self.loss_dtype = loss_dtype
        starts_again = (
            self.stage is Stage.UNSCALED
        )  # the batch before was discarded, or the step has a second pass
        self.stage = Stage.SCALED
        flag, mean = nonfinite_flag(loss), ops.cast(ops.mean(loss), "float32")
        cause = flag
        if starts_again and self._flags is not None:
            # In sharpness-aware minimization, an overflow of the first gradients is in the weights
            # of the second pass.
            cause = flag * (1.0 - tf.reduce_max(self._flags))
            self._flags.assign(tf.zeros(self._flags.shape))
        self._loss_is_traced |= not tf.executing_eagerly()
        kept = tf.where(
            [True, False, False, True, True], self._record.value, 0.0
        )  # not `*`: 0 * NaN is NaN
        if (
            starts_again
        ):  # forgets non-finite losses of the batch before, and keeps the mark of an empty one
            kept = tf.minimum(kept, [0.0, 0.0, 0.0, float("inf"), float("inf")])
        self._record.assign(kept + tf.stack([cause, flag, mean, flag, tf.ones([])]))

    def record_unscaled(self, gradients: Gradients) -> None:
        """Records which gradients `unscale` returned with NaN or Inf: a clip before `apply` would hide it."""
        self.stage, self._unscale_is_traced = Stage.UNSCALED, not tf.executing_eagerly()
        is_needed = (
            self._loss_is_traced and tf.executing_eagerly() and not tf.distribute.has_strategy()
        )
        self._losses_at_unscale = float(self._record.value[_LOSS_COUNT]) if is_needed else None
        self._unscaled_count = sum(gradient is not None for gradient in gradients)
        if not gradients:
            return
        if self._flags is None:
            self.build_for(len(gradients))
        # They are in the dtypes that decide: the gradients stand for their variables.
        flags, size = (
            nonfinite_flags(gradients, variables=gradients, divisor=1.0, replicas=1),
            self._flags.shape[0],
        )
        fits = len(gradients) <= size
        self._flags.assign(
            tf.pad(flags, [[0, size - len(gradients)]])
            if fits
            else tf.fill([size], tf.reduce_max(flags))
        )
        self._flag_count = len(gradients) if fits else 0

    def check_scaled(self) -> None:
        """Warns once if `scale_loss` was never called.

        Raises:
            ValueError: In a `train_step` that did not call `scale_loss`.
        """
        if self._requires_scaling and self.stage is Stage.TRAIN_STEP:
            raise ValueError(_NOT_SCALED.format(optimizer="self.optimizer"))
        if self._requires_scaling and self.loss_dtype is None and not self._has_warned:
            self._has_warned = True
            user_messages.warn(_NOT_SCALED.format(optimizer="optimizer"))

    def takes_unscaled(self, count: int) -> bool:
        """Returns whether `unscale` was called last, so that `apply` gets its gradients, `count` without `None`.

        Raises:
            ValueError: If that is not known, in a `train_step` without `scale_loss`, or if
                `unscale` got fewer.
        """
        is_eager = tf.executing_eagerly()
        before, self._losses_at_unscale = self._losses_at_unscale, None
        count_now = (
            None if before is None or not is_eager else float(self._record.value[_LOSS_COUNT])
        )
        if self.stage is Stage.UNSCALED and count_now not in (None, before):
            # A function, which runs without calling Python, scaled a loss: the batch of `unscale`
            # was discarded.
            self.stage = Stage.SCALED
            self._flags.assign(tf.zeros(self._flags.shape))
        is_only_one_traced = self.stage is Stage.UNSCALED and self._unscale_is_traced == is_eager
        if self.stage is Stage.APPLIED_UNSCALED or is_only_one_traced:
            raise ValueError(_STAGE_UNKNOWN)
        self.check_scaled()
        if self.stage is Stage.UNSCALED and self._unscaled_count < count:
            raise ValueError(_FEWER_UNSCALED.format(count=count, unscaled=self._unscaled_count))
        return self.stage is Stage.UNSCALED

    def end_apply(self, unscaled: bool) -> None:
        """Records that `apply` was called with this argument: what `unscale` returned is for one `apply`."""
        if self.stage is Stage.UNSCALED and not unscaled and self._flags is not None:
            self._flags.assign(tf.zeros(self._flags.shape))
        self.stage = Stage.APPLIED_UNSCALED if self.stage is Stage.UNSCALED else Stage.READY

    def take_unscaled_flags(self, count: int) -> tf.Tensor:
        """Returns and clears float32 flags of shape `(count,)`: 1.0 where `unscale` returned NaN or Inf.

        All are set, if any is, where `unscale` got another number of gradients.
        """
        flags = ops.copy(self._flags)
        self._flags.assign(tf.zeros_like(flags))
        return (
            flags[:count] if count == self._flag_count else tf.fill([count], tf.reduce_max(flags))
        )

    def take_losses(self) -> StepLosses:
        """Returns the losses of the step, and begins the next one."""
        record = ops.copy(self._record)
        self._record.assign(tf.where([False, False, False, True, True], record, 0.0))
        return StepLosses(*tf.unstack(record)[:3])

    def losses(self) -> tf.Tensor:
        """Returns a copy of the record of losses."""
        return ops.copy(self._record)

    def nonfinite_loss_since(self, record: tf.Tensor) -> tf.Tensor:
        """Returns a scalar bool, whether a loss was non-finite since `record`, a copy that `losses` returned."""
        return (self._record.value > record)[_NONFINITE_LOSS_COUNT]
