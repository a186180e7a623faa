"""One step of the optimizer: measure, agree across replicas, update or skip, adapt the loss scale, count."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import keras
import tensorflow as tf
from keras import ops

from kmp import scaling
from kmp.backend import distribution
from kmp.gradients import GradientSampler
from kmp.optimizer import conditional_update
from kmp.optimizer.gradient_scaling import GradientScaling
from kmp.optimizer.loss_monitor import LossMonitor
from kmp.optimizer.overflow_counters import OverflowCounters
from kmp.optimizer.unscaling import applied_scale, nonfinite_flags, unscale

_NO_SCALE = scaling.FixedScale(1.0)


def by_index(gradients: Sequence[Any], indices: Sequence[int], count: int) -> list[Any]:
    """Returns a list of length `count` with each gradient at its index and `None` elsewhere."""
    gradient_at = dict(zip(indices, gradients, strict=True))
    return [gradient_at.get(index) for index in range(count)]


class LossScaler(Protocol):
    """The attributes of `kmp.LossScaleOptimizer` that a step uses."""

    inner_optimizer: keras.optimizers.Optimizer
    rule: scaling.Rule
    scale_variable: keras.Variable
    step_counter: keras.Variable
    counters: OverflowCounters
    loss_monitor: LossMonitor
    gradient_scaling: GradientScaling
    sampler: GradientSampler | None


@dataclass(frozen=True)
class Step:
    """One training step of a `kmp.LossScaleOptimizer`.

    Args:
        optimizer: The optimizer, built.
        trainable_variables: The variables that the optimizer was built on.
        variables: The variables that this step updates.
        indices: The index of each of `variables` in `trainable_variables`.
        order: The indices of all `trainable_variables`, from the input to the loss.
        is_scaled: Whether the gradients are multiplied by the loss scale. If not, the step leaves the scale unchanged.
    """

    optimizer: LossScaler
    trainable_variables: Sequence[Any]
    variables: Sequence[Any]
    indices: Sequence[int]
    order: Sequence[int]
    is_scaled: bool

    @property
    def _rule(self) -> scaling.Rule:
        return self.optimizer.rule if self.is_scaled else _NO_SCALE

    def take(self, gradients: Sequence[Any]) -> None:
        """Applies gradients to `variables` or skips the step, then adapts the loss scale and counts."""
        scale = ops.copy(applied_scale(self._rule.bounded(self.optimizer.scale_variable)))
        agreed = self._agree(self._measure(gradients, scale))
        distribution.run_across_replicas(self._update_adapt_count, [agreed, scale], [gradients])

    def _measure(self, gradients: Sequence[Any], scale: Any) -> tf.Tensor:
        """Samples the gradients if this step is sampled; returns a non-finite flag for each trainable variable."""
        optimizer, replicas = self.optimizer, tf.distribute.get_strategy().num_replicas_in_sync
        if optimizer.sampler:
            gradient_or_none = by_index(gradients, self.indices, len(self.trainable_variables))

            def unscale_subset(subset: Sequence[Any], indices: Sequence[int]) -> list[Any]:
                return unscale(subset, [self.trainable_variables[index] for index in indices], scale)

            optimizer.sampler.sample(gradient_or_none, unscale_subset, scale, optimizer.counters.steps + 1)
        return self._by_trainable_variable(nonfinite_flags(gradients, self.variables, scale, replicas))

    def _by_trainable_variable(self, flags: tf.Tensor) -> tf.Tensor:
        """Returns the flags of `variables` as flags of `trainable_variables`; a variable without gradient has 0.0."""
        count = len(self.trainable_variables)
        if list(self.indices) == list(range(count)):
            return flags
        return tf.maximum(tf.math.unsorted_segment_max(flags, list(self.indices), count), 0.0)

    def _agree(self, flags: tf.Tensor) -> tf.Tensor:
        """Returns the flags and the three values of the loss monitor, summed over replicas and workers."""
        # All values are float32, which every device can send, so one all-reduce is enough.
        return distribution.sum_over_replicas(tf.concat([flags, tf.stack(self.optimizer.loss_monitor.read())], 0))

    def _update_adapt_count(self, on_each: Any, agreed: Any, scale: Any, gradients: Any) -> None:
        """Takes the stages after the agreement; `on_each(f, *args)` calls `f` on each replica."""
        count = len(self.trainable_variables)
        flags, (last_was_nonfinite, any_was_nonfinite, loss) = agreed[:count] > 0, tf.unstack(agreed[count:], 3)
        overflowed = ops.logical_or(ops.any(flags), last_was_nonfinite > 0)
        update = functools.partial(on_each, self._update, scale, gradients)
        conditional_update.update_or_skip(self.optimizer.inner_optimizer, self.trainable_variables, overflowed, update)
        outcome = scaling.StepOutcome(overflowed, ops.equal(any_was_nonfinite, 0.0))
        # At the end of a dataset of unknown length, Keras starts a step that gets no batch. It stops at the first
        # operation that needs one. Without this dependency, the counters would not wait for the gradients and would
        # count that step.
        with tf.control_dependencies([agreed]):
            overflows_in_a_row, overflowed_at_min_scale = self._adapt(outcome)
            self.optimizer.counters.count(outcome, overflows_in_a_row, overflowed_at_min_scale, flags, self.order, loss)
            if not self.is_scaled:
                self.optimizer.gradient_scaling.unscaled_steps.assign_add(1)
            self.optimizer.loss_monitor.reset()

    def _update(self, scale: Any, gradients: Any) -> None:
        unscaled = unscale(gradients, self.variables, scale)  # inside the branch, so that a skipped step does not pay
        self.optimizer.inner_optimizer.apply(unscaled, list(self.variables))

    def _adapt(self, outcome: scaling.StepOutcome) -> tuple[Any, Any]:
        """Applies the rule of the loss scale; returns its `overflows_in_a_row` and `overflowed_at_min_scale`."""
        optimizer = self.optimizer
        scale = ops.copy(self._rule.bounded(optimizer.scale_variable))
        clean_steps, in_a_row = ops.copy(optimizer.step_counter), ops.copy(optimizer.counters.overflows_in_a_row)
        before = scaling.ScaleState(scale, clean_steps, in_a_row)
        after = self._rule.update(before, outcome)
        if self.is_scaled:
            optimizer.scale_variable.assign(after.scale)
            optimizer.step_counter.assign(after.clean_steps)
        return after.overflows_in_a_row, self._rule.overflowed_at_min_scale(before, outcome)
