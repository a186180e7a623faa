"""The stage of a step: what was called last, as `torch.amp.GradScaler` keeps it."""

import enum

import tensorflow as tf

from kmp.backend import distribution
from kmp.utils import user_messages

_NOT_SCALED = (
    "`apply` of `{optimizer}` got gradients of a loss that did not go through `scale_loss`, and"
    " divides them by the loss scale. Scale the loss inside the tape, and differentiate the"
    " result:\n    scaled_loss = {optimizer}.scale_loss(loss)\n    gradients ="
    " tape.gradient(scaled_loss, variables)\nIf the loss is multiplied by the loss scale in another"
    " way, pass unscaled=False to `apply`."
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


class Stage(enum.Enum):
    """What was called last; in a graph, in the order of the trace."""

    READY = enum.auto()  # `apply`, or nothing
    TRAIN_STEP = enum.auto()  # a `train_step` of `fit` has begun
    SCALED = enum.auto()  # `scale_loss`
    UNSCALED = enum.auto()  # `unscale`
    APPLIED_UNSCALED = enum.auto()  # `apply`, after `unscale`


class StepStage:
    """Knows the stage on each replica, and raises where a call is out of order.

    Args:
        requires_scaling: Whether gradients of a loss that was not scaled are a mistake; not at a
            fixed scale of 1.
    """

    def __init__(self, requires_scaling: bool) -> None:
        self._requires_scaling = requires_scaling
        self._name = "optimizer"  # what the user's code calls it
        self._stages: dict[int, Stage] = {}
        self._has_scaled = False
        self._has_warned = False
        self._unscaled_count = 0
        self._unscale_is_traced = False

    def begin_train_step(self, name: str) -> None:
        """A `train_step` of `fit` begins, which has to scale its loss: it calls this `name`."""
        self._name = name
        self._set(Stage.TRAIN_STEP)

    def scale_loss(self) -> bool:
        """`scale_loss` is called. Returns whether `unscale` was called before it, but not `apply`.

        The batch before was discarded then, or the step has a second pass.
        """
        starts_again = self.is_unscaled
        self._has_scaled = True
        self._set(Stage.SCALED)
        return starts_again

    def unscale(self, count: int) -> None:
        """`unscale` is called, with `count` gradients that are not `None`."""
        self._unscaled_count = count
        self._unscale_is_traced = not tf.executing_eagerly()
        self._set(Stage.UNSCALED)

    def apply(self) -> None:
        """`apply` is called. What `unscale` returned is for one call of it."""
        self._set(Stage.APPLIED_UNSCALED if self.is_unscaled else Stage.READY)

    @property
    def is_unscaled(self) -> bool:
        """Whether `unscale` was called last."""
        return self._current is Stage.UNSCALED

    def check_scaled(self) -> None:
        """Warns once if `scale_loss` was never called.

        Raises:
            ValueError: In a `train_step` that did not call `scale_loss`.
        """
        if not self._requires_scaling:
            return
        if self._current is Stage.TRAIN_STEP:
            raise ValueError(_NOT_SCALED.format(optimizer=self._name))
        if not self._has_scaled and not self._has_warned:
            self._has_warned = True
            user_messages.warn(_NOT_SCALED.format(optimizer=self._name))

    def check_apply(self, count: int) -> None:
        """Checks that `apply` can be called with `count` gradients that are not `None`.

        Raises:
            ValueError: If it is not known whether they are unscaled, in a `train_step` without
                `scale_loss`, or if `unscale` got fewer.
        """
        if not self._requires_scaling:
            return  # scaled or not, the gradients are the same
        is_traced = not tf.executing_eagerly()
        is_only_one_traced = self.is_unscaled and self._unscale_is_traced != is_traced
        if self._current is Stage.APPLIED_UNSCALED or is_only_one_traced:
            raise ValueError(_STAGE_UNKNOWN)
        self.check_scaled()
        if self.is_unscaled and self._unscaled_count < count:
            raise ValueError(_FEWER_UNSCALED.format(count=count, unscaled=self._unscaled_count))

    @property
    def _current(self) -> Stage:
        return self._stages.get(distribution.replica_id(), Stage.READY)

    def _set(self, stage: Stage) -> None:
        self._stages[distribution.replica_id()] = stage
