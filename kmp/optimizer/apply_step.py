"""How a step goes: unscale and measure, agree across replicas, update or skip, adapt the scale, count."""

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
from kmp.optimizer.loss_monitor import LossMonitor
from kmp.optimizer.overflow_counters import OverflowCounters
from kmp.optimizer.unscaling import divisor, nonfinite, unscale


def by_index(gradients: Sequence[Any], places: Sequence[int], count: int) -> list[Any]:
    """Returns a gradient or `None` for each of so many variables."""
    found = dict(zip(places, gradients, strict=True))
    return [found.get(place) for place in range(count)]


class LossScaler(Protocol):
    """What a step uses of its `kmp.LossScaleOptimizer`."""

    inner_optimizer: keras.optimizers.Optimizer
    rule: scaling.Rule
    dynamic_scale: keras.Variable
    step_counter: keras.Variable
    counters: OverflowCounters
    loss_monitor: LossMonitor
    sampler: GradientSampler | None


@dataclass(frozen=True)
class Step:
    """What a step is taken with.

    Args:
        optimizer: Its owner, a `kmp.LossScaleOptimizer` that is built.
        trained: The variables that it was built on.
        variables: Those that this step updates.
        places: The place of each of these among `trained`.
        order: The places of all of `trained`, from the input to the loss.
    """

    optimizer: LossScaler
    trained: Sequence[Any]
    variables: Sequence[Any]
    places: Sequence[int]
    order: Sequence[int]

    def take(self, gradients: Sequence[Any]) -> None:
        """Applies loss-scaled gradients to `variables`, or skips the step, and learns from it."""
        optimizer, replicas = self.optimizer, tf.distribute.get_strategy().num_replicas_in_sync
        scale = ops.copy(divisor(optimizer.rule.bounded(optimizer.dynamic_scale)))
        if optimizer.sampler:
            placed = by_index(gradients, self.places, len(self.trained))

            def unscaled(some: Sequence[Any], places: Sequence[int]) -> list[Any]:
                return unscale(some, [self.trained[place] for place in places], scale)

            optimizer.sampler.sample(placed, unscaled, scale, optimizer.counters.steps + 1)
        flags = self._flags(nonfinite(gradients, self.variables, scale, replicas))
        # All in float32, which every device can send: one sum over the replicas tells each of them everything.
        agreed = distribution.agree(tf.concat([flags, tf.stack(optimizer.loss_monitor.seen())], 0))
        distribution.once(self._finish, [agreed, scale], [gradients])

    def _flags(self, of_gradients: tf.Tensor) -> tf.Tensor:
        """Returns a flag for each of `trained`."""
        count = len(self.trained)
        if list(self.places) == list(range(count)):
            return of_gradients
        return tf.maximum(tf.math.unsorted_segment_max(of_gradients, list(self.places), count), 0.0)

    def _finish(self, on_each: Any, agreed: Any, scale: Any, gradients: Any) -> None:
        """The rest of the step, once all replicas have agreed on what was measured."""
        count = len(self.trained)
        flags, (last_was_nonfinite, any_was_nonfinite, loss) = agreed[:count] > 0, tf.unstack(agreed[count:], 3)
        overflowed = ops.logical_or(ops.any(flags), last_was_nonfinite > 0)
        update = functools.partial(on_each, self._update, scale, gradients)
        conditional_update.update_or_skip(self.optimizer.inner_optimizer, self.trained, overflowed, update)
        outcome = scaling.StepOutcome(overflowed, ops.equal(any_was_nonfinite, 0.0))
        # At the end of data whose length is not known, Keras starts a step that gets no batch and stops where it needs
        # one: what does not wait for the gradients would count a step that never was.
        with tf.control_dependencies([agreed]):
            self._adapt_and_count(outcome, flags, loss)
            self.optimizer.loss_monitor.forget()

    def _update(self, scale: Any, gradients: Any) -> None:
        unscaled = unscale(gradients, self.variables, scale)  # here, where a skipped step does not pay for it
        self.optimizer.inner_optimizer.apply(unscaled, list(self.variables))

    def _adapt_and_count(self, outcome: scaling.StepOutcome, flags: Any, loss: Any) -> None:
        optimizer, counters = self.optimizer, self.optimizer.counters
        scale = ops.copy(optimizer.rule.bounded(optimizer.dynamic_scale))
        before = scaling.ScaleState(scale, ops.copy(optimizer.step_counter), ops.copy(counters.overflows_in_a_row))
        after = optimizer.rule.update(before, outcome)
        optimizer.dynamic_scale.assign(after.scale)
        optimizer.step_counter.assign(after.clean_steps)
        is_at_min_scale = optimizer.rule.is_at_min_scale(before, outcome)
        counters.count(outcome, after.overflows_in_a_row, is_at_min_scale, flags, self.order, loss)
