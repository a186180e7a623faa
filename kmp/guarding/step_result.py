"""What the optimizers did in a training step, read from their counters on the device."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from keras import ops

from kmp.optimizer import LossScaleOptimizer
from kmp.optimizer.counters import COUNT_INDEX


class StepResult(NamedTuple):
    """What the optimizers did in a training step, on this replica.

    Attributes:
        any_skipped: Scalar bool, whether an optimizer skipped an update.
        has_nonfinite_loss: Scalar bool, whether a loss of this replica, or of a skipped step, was
            non-finite before scaling.
        counts: For each optimizer, its counts before and after the step.
    """

    any_skipped: Any
    has_nonfinite_loss: Any
    counts: Sequence[tuple[Any, Any]]

    def without_update(self) -> Any:
        """Returns a scalar bool, whether an optimizer skipped its updates and none applied one."""
        step, skipped = COUNT_INDEX["step"], COUNT_INDEX["skipped_or_empty"]
        increases = [after - before for before, after in self.counts]
        skipped_all = [ops.equal(each[step], each[skipped]) for each in increases]
        return functools.reduce(ops.logical_and, skipped_all, self.any_skipped)


class StepWatch:
    """Compares the counters of optimizers after a step with those at the creation of the watch."""

    def __init__(self, optimizers: Sequence[LossScaleOptimizer]) -> None:
        self._optimizers = optimizers
        self._counts_before = _counts_of(optimizers)
        self._losses_before = [each.step_monitor.losses() for each in optimizers]

    def result(self) -> StepResult:
        """Returns what the optimizers did since."""
        pairs = list(zip(self._counts_before, _counts_of(self._optimizers), strict=True))
        has_increased = [after > before for before, after in pairs]
        nonfinite = [
            optimizer.step_monitor.nonfinite_loss_since(losses)
            for optimizer, losses in zip(self._optimizers, self._losses_before, strict=True)
        ]
        if tf.distribute.has_strategy():  # the losses of other replicas too
            index = COUNT_INDEX["nonfinite_loss_count"]
            nonfinite += [counts[index] for counts in has_increased]
        return StepResult(
            any_skipped=any_of(each[COUNT_INDEX["skipped_or_empty"]] for each in has_increased),
            has_nonfinite_loss=any_of(nonfinite),
            counts=pairs,
        )


def any_of(conditions: Iterable[Any]) -> Any:
    """Returns a scalar bool, whether at least one of scalar bools is true."""
    return functools.reduce(ops.logical_or, conditions)


def _counts_of(optimizers: Iterable[LossScaleOptimizer]) -> list[Any]:
    return [ops.copy(each.counters.counts) for each in optimizers]
