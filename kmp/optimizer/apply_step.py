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
from kmp.optimizer.counter_values import CounterValues, Overflow, after_overflow, after_update
from kmp.optimizer.loss_monitor import LossMonitor, StepLosses
from kmp.optimizer.overflow_counters import OverflowCounters
from kmp.optimizer.overflow_origin import origin_flags
from kmp.optimizer.unscaling import LARGEST_APPLIED_SCALE, nonfinite_flags, unscale

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

    def take(self, gradients: Sequence[Any], unscaled_flags: tf.Tensor | None = None) -> None:
        """Applies gradients to `variables` or skips the step, then adapts the loss scale and counts.

        Args:
            gradients: The gradient of each variable, or `None`.
            unscaled_flags: What `UnscaledFlags.take` returned. If a gradient was not finite in `unscale`, these flags
                show which: clipping by the norm of all gradients makes all of them non-finite.
        """
        scale = self._rule.bounded(self.optimizer.scale_variable)
        applied = ops.minimum(scale, LARGEST_APPLIED_SCALE)
        flags = self._measure(gradients, applied)
        if unscaled_flags is not None:
            unscaled_flags = self._by_trainable_variable(unscaled_flags)
            flags = tf.where(tf.reduce_any(unscaled_flags > 0), unscaled_flags, flags)
        agreed = distribution.sum_over_replicas(flags, *self.optimizer.loss_monitor.end_step())
        distribution.run_across_replicas(self._update_or_skip, [scale, applied, *agreed], [gradients])

    def _measure(self, gradients: Sequence[Any], scale: Any) -> tf.Tensor:
        """Samples the gradients if this step is sampled; returns a non-finite flag for each trainable variable."""
        optimizer, replicas = self.optimizer, tf.distribute.get_strategy().num_replicas_in_sync
        if optimizer.sampler:
            gradient_or_none = by_index(gradients, self.indices, len(self.trainable_variables))

            def unscale_subset(subset: Sequence[Any], indices: Sequence[int]) -> list[Any]:
                return unscale(subset, [self.trainable_variables[index] for index in indices], scale)

            optimizer.sampler.sample(gradient_or_none, unscale_subset, scale, optimizer.counters.values().steps + 1)
        return self._by_trainable_variable(nonfinite_flags(gradients, self.variables, scale, replicas))

    def _by_trainable_variable(self, flags: tf.Tensor) -> tf.Tensor:
        """Returns the flags of `variables` as flags of `trainable_variables`; a variable without gradient has 0.0."""
        count = len(self.trainable_variables)
        if list(self.indices) == list(range(count)):
            return flags
        return tf.maximum(tf.math.unsorted_segment_max(flags, list(self.indices), count), 0.0)

    def _update_or_skip(
        self, on_each: Any, scale: Any, applied_scale: Any, flags: Any, *losses_and_gradients: Any
    ) -> None:
        """Takes the stages after the agreement.

        Args:
            on_each: `on_each(f, *args)` calls `f` on each replica.
            scale: Scalar float32, the loss scale.
            applied_scale: The same, at most `LARGEST_APPLIED_SCALE`.
            flags: As returned by `_measure`, summed over replicas.
            *losses_and_gradients: The elements of `StepLosses`, summed over replicas; and each replica's gradients.
        """
        *of_step, gradients = losses_and_gradients
        losses = StepLosses(*of_step)
        # The reduction comes last because XLA computes anything cheaper again in each loop that uses it.
        overflowed = ops.any(ops.maximum(flags, losses.last_nonfinite) > 0)
        # At the end of a dataset of unknown length, Keras starts a step that gets no batch. It stops at the first
        # operation that needs one. Without this dependency, the counters would not wait for the gradients and would
        # count that step.
        with tf.control_dependencies([overflowed]):
            conditional_update.update_or_skip(
                self.optimizer.inner_optimizer,
                self.trainable_variables,
                overflowed,
                update=functools.partial(on_each, self._update, applied_scale, gradients),
                finish=functools.partial(self._adapt_and_count, scale, flags, losses),
            )

    def _update(self, applied_scale: Any, gradients: Any) -> None:
        # Unscaled inside the branch, so that a skipped step does not pay for it.
        unscaled = unscale(gradients, self.variables, applied_scale)
        self.optimizer.inner_optimizer.apply(unscaled, list(self.variables))

    def _adapt_and_count(self, scale: Any, flags: Any, losses: StepLosses, overflowed: Any) -> None:
        """Adapts the loss scale and counts the step; `overflowed` is a bool where only one outcome is possible."""
        optimizer, before = self.optimizer, self.optimizer.counters.values()
        state = scaling.ScaleState(scale, ops.copy(optimizer.step_counter), before.overflows_in_a_row)
        are_nonfinite = flags > 0
        origin = None if overflowed is False else origin_flags(are_nonfinite, self.order, losses.were_finite)
        after, counters = conditional_update.select(
            overflowed,
            if_skipped=lambda: self._after_overflow(state, before, losses, origin),
            if_updated=lambda: (self._rule.after_update(state), after_update(before, losses, self.is_scaled)),
        )
        if self.is_scaled:
            optimizer.scale_variable.assign(after.scale)
            optimizer.step_counter.assign(after.clean_steps)
        optimizer.counters.assign(counters)
        if origin is not None:
            optimizer.counters.count_by_variable(are_nonfinite, origin)

    def _after_overflow(
        self, state: scaling.ScaleState, counters: CounterValues, losses: StepLosses, origin: Any
    ) -> tuple[scaling.ScaleState, CounterValues]:
        outcome = scaling.StepOutcome(ops.ones([], "bool"), losses.were_finite)
        after = self._rule.after_overflow(state, losses.were_finite)
        is_at_min_scale = self._rule.overflowed_at_min_scale(state, outcome)
        overflow = Overflow(losses, origin, after.overflows_in_a_row, is_at_min_scale)
        return after, after_overflow(counters, overflow, self.is_scaled)
