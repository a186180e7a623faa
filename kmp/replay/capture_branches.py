"""The two branches that copy a batch: in its own training step, or in the next one."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import ops

from kmp.backend.xla import outlined
from kmp.optimizer import LossScaleOptimizer
from kmp.replay.batch_variables import BatchVariables, StepInfo


class StateBefore(NamedTuple):
    """Copies of the state before a step.

    Attributes:
        loss_scale: Scalar float32.
        is_requested: Scalar int64, 1 if the batch of a step is requested.
        overflows_in_a_row: Scalar int64.
        kept: float64 of shape `(3,)`: what is known of the batch that is kept.
    """

    loss_scale: Any
    is_requested: Any
    overflows_in_a_row: Any
    kept: Any


class SameStepBranch:
    """Copies the batch of a step at its end, if the step is skipped or the batch is requested.

    On a GPU, a branch that needs the result of its step makes the host wait for it, as the branch
    does in which the optimizer updates the weights.
    """

    def __init__(self, optimizer: LossScaleOptimizer, is_requested: keras.Variable) -> None:
        self._optimizer = optimizer
        self._is_requested = is_requested

    def add(
        self,
        variables: BatchVariables,
        tensors: Sequence[tf.Tensor],
        before: StateBefore,
        *,
        is_whole: bool,
    ) -> None:
        """Adds the branch to the step that is traced now."""
        counters = self._optimizer.counters

        def capture() -> None:
            # Read here, because each tensor that a branch gets takes time in every step.
            skipped_in_a_row = counters.value("overflows_in_a_row")
            info = StepInfo(counters.value("step"), before.loss_scale, skipped_in_a_row)
            self._is_requested.assign(0)
            variables.copy(tensors, info, is_whole=is_whole)

        is_wanted = self._is_requested.value + counters.value("overflows_in_a_row") > 0
        ops.cond(is_wanted, outlined(capture), lambda: None)


class NextStepBranch:
    """Keeps the batch of each step, without a copy, and copies it in the next step if it is wanted.

    A step whose optimizer is compiled has no branch that needs its result, so that the host never
    waits. Whether the step before was skipped is known when a step begins.
    """

    def __init__(self, optimizer: LossScaleOptimizer, is_requested: keras.Variable) -> None:
        self._optimizer = optimizer
        self._is_requested = is_requested
        # Step, loss scale and index of the variables of the batch that is kept; without one, step
        # 0.
        self.kept = keras.Variable(
            "zeros", (3,), "float64", trainable=False, autocast=False, name="kept_batch"
        )

    def add(
        self,
        variables: BatchVariables,
        tensors: Sequence[tf.Tensor],
        before: StateBefore,
        *,
        is_whole: bool,
    ) -> None:
        """Adds the branch for the batch of the step before, and keeps that of this one."""
        self.copy_kept(variables, before, is_whole=is_whole)
        for variable, tensor in zip(variables.last_batch, tensors, strict=True):
            variable.assign(tensor)
        step = self._optimizer.counters.value("step")
        about = step, before.loss_scale, float(variables.index)
        self.kept.assign(tf.stack([ops.cast(each, "float64") for each in about]))

    def copy_kept(self, variables: BatchVariables, before: StateBefore, *, is_whole: bool) -> None:
        """Copies the batch that is kept, if it is in these variables and is wanted."""
        if not variables.last_batch:
            return
        step, loss_scale, index = tf.unstack(before.kept)
        info = StepInfo(step, loss_scale, before.overflows_in_a_row)

        def capture() -> None:
            self._is_requested.assign(0)
            tensors = [variable.value() for variable in variables.last_batch]
            variables.copy(tensors, info, is_whole=is_whole)

        is_wanted = before.is_requested + before.overflows_in_a_row > 0
        is_here = ops.logical_and(step > 0, ops.equal(index, float(variables.index)))
        ops.cond(ops.logical_and(is_wanted, is_here), outlined(capture), lambda: None)

    def forget(self) -> None:
        """Forgets the batch that is kept."""
        self.kept.assign(tf.zeros([3], tf.float64))
