"""One step of the optimizer: measure, agree, update or skip, adapt, count."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import ops

from kmp import scaling
from kmp.backend import distribution, keras_internals, xla
from kmp.backend.xla import outlined
from kmp.gradients.tensor_groups import Gradients, Variables
from kmp.gradients.unscaling import nonfinite_flags, unscale_for_update
from kmp.optimizer.counters import Counters
from kmp.optimizer.predicated_writes import predicated_writes, supports_predicated_writes
from kmp.optimizer.step_monitor import StepLosses, StepMonitor
from kmp.scaling.rules import LARGEST_APPLIED_SCALE, LARGEST_SCALE


@dataclass(frozen=True, eq=False)
class StepState:
    """What a step reads and writes.

    Attributes:
        inner: The optimizer that updates the variables.
        rule: The rule of the loss scale.
        scale: float32 variable, the loss scale of the rule's state.
        clean_steps: int64 variable, that of the rule's state.
        counters: The counters of steps and overflows.
        monitor: What `scale_loss` and `unscale` recorded.
        variables: All variables that the optimizer was built on.
    """

    inner: keras.optimizers.Optimizer
    rule: scaling.Rule
    scale: keras.Variable
    clean_steps: keras.Variable
    counters: Counters
    monitor: StepMonitor
    variables: Variables

    def bounded_scale(self) -> tf.Tensor:
        """Returns the loss scale within the bounds of the rule."""
        return bounded_scale(self.rule, self.scale)

    @property
    def written(self) -> list[keras.Variable]:
        """The variables that a step writes on a replica, but for the monitor's."""
        state = keras_internals.optimizer_state(self.inner)
        state = [each for each in state if all(each is not other for other in self.read)]
        own = self.scale, self.clean_steps, *self.counters.weights
        return [*self.variables, *state, *own]

    @property
    def read(self) -> list[keras.Variable]:
        """The variables that a step only reads: a learning rate that is not a schedule."""
        rate = keras_internals.learning_rate_of(self.inner)
        return [rate] if isinstance(rate, keras.Variable) else []


class StepArguments(NamedTuple):
    """How a step is taken: Python's values, which a compiled step is traced for.

    Attributes:
        indices: The indices of the gradients' variables, among all variables.
        order: The indices of all variables, from the input to the loss.
        unscaled: Whether the gradients are divided by the loss scale already.
        method: What the user called: `"apply"` or `"apply_gradients"`. The step calls the same
            method of the inner optimizer, because the user may have overridden it.
    """

    indices: tuple[int, ...]
    order: tuple[int, ...]
    unscaled: bool
    method: str


class Agreed(NamedTuple):
    """What all replicas and workers know of a step before one of them branches.

    Attributes:
        scale: Scalar float32, the loss scale.
        divisor: Scalar float32, by which the gradients are still to be divided; `None` if there is
            nothing left to divide by.
        flags: float32 of shape `(all variables,)`, above 0 for a non-finite gradient.
        losses: The losses of the step, summed over replicas.
    """

    scale: tf.Tensor
    divisor: tf.Tensor | None
    flags: tf.Tensor
    losses: StepLosses


def take_step(state: StepState, gradients: Gradients, arguments: StepArguments) -> None:
    """Takes a step."""
    variables = [state.variables[index] for index in arguments.indices]
    scale = state.bounded_scale()
    divisor = divisor_of(state, scale, arguments.unscaled)

    # Measure, on each replica.
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    flags = nonfinite_flags(gradients, variables, divisor, replicas)
    flags = flags_of_all(state, flags, arguments)

    # Agree, over replicas and workers.
    flags, losses = agree(state, flags)
    agreed = Agreed(scale, divisor, flags, losses)

    # Update or skip, adapt and count.
    update = functools.partial(update_or_skip, state, variables, arguments)
    distribution.in_update_context(update, (agreed,), gradients)


def bounded_scale(
    rule: scaling.Rule, scale: keras.Variable, highest: float = LARGEST_SCALE
) -> tf.Tensor:
    """Returns a loss scale within the bounds of a rule, and at most `highest`.

    A file or the user may have written any value to the variable: NaN, Inf, 0 and negative numbers
    become the initial scale.
    """
    initial = min(rule.initial_scale, highest)
    if isinstance(rule, scaling.FixedScale):
        return ops.full_like(scale, initial)
    low, high = min(rule.min_scale, highest), min(rule.max_scale, highest)
    # `ops.clip` is two operations.
    clipped = tf.raw_ops.ClipByValue(t=scale, clip_value_min=low, clip_value_max=high)
    # The logarithm of 0 is -Inf, and that of a negative number NaN.
    return ops.where(ops.isfinite(ops.log(scale)), clipped, initial)


def divisor_of(state: StepState, scale: tf.Tensor, unscaled: bool) -> tf.Tensor | None:
    """Returns what gradients are to be divided by; `None` if nothing is left to divide by."""
    if unscaled or not state.rule.scales_loss:
        return None
    return ops.minimum(scale, LARGEST_APPLIED_SCALE)


def flags_of_all(state: StepState, flags: tf.Tensor, arguments: StepArguments) -> tf.Tensor:
    """Returns the flags of all variables, from those of the given gradients."""
    indices = arguments.indices
    if arguments.unscaled:
        # A clip by value hides NaN and Inf, and a clip by the norm of all gradients makes all of
        # them NaN.
        before_clip = state.monitor.unscaled_flags.take(len(indices))
        flags = tf.where(tf.reduce_any(before_clip > 0), before_clip, flags)
    count = len(state.variables)
    if indices == tuple(range(count)):
        return flags
    # A variable without a gradient has the flag 0.
    return tf.maximum(tf.math.unsorted_segment_max(flags, list(indices), count), 0.0)


def agree(state: StepState, flags: tf.Tensor) -> tuple[tf.Tensor, StepLosses]:
    """Returns the flags and the losses of all replicas and workers."""
    flags, record = distribution.sum_over_replicas((flags, state.monitor.take_losses()))
    return flags, StepLosses(*tf.unstack(record))


def update_or_skip(
    state: StepState,
    variables: Variables,
    arguments: StepArguments,
    agreed: Agreed,
    gradients: Gradients,
) -> None:
    """Updates the variables unless the loss or a gradient is non-finite; adapts and counts."""
    # XLA would compute the comparison again in each loop that uses it.
    overflowed = xla.opaque(ops.max(agreed.flags) + agreed.losses.must_skip > 0)
    finish = functools.partial(_adapt_and_count, state, arguments.order, agreed)

    def update_replica(divisor: tf.Tensor | None, gradients: Gradients) -> None:
        # Unscaled inside the branch, so that a skipped step does not pay for it.
        unscaled = unscale_for_update(gradients, variables, divisor)
        if tf.distribute.has_strategy():
            # TensorFlow sums over replicas what is of one graph: in a branch, some gradients are
            # cast and others are not.
            unscaled = [None if each is None else tf.identity(each) for each in unscaled]
        if arguments.method == "apply_gradients":
            state.inner.apply_gradients(list(zip(unscaled, variables, strict=True)))
        else:
            state.inner.apply(unscaled, list(variables))

    def update() -> None:
        distribution.on_each_replica(update_replica, agreed.divisor, gradients)
        finish(False)

    # Under a strategy a variable has one component per replica, and the optimizer writes the
    # components.
    predicates = xla.is_tracing() and not tf.distribute.has_strategy()
    if predicates and supports_predicated_writes(state.inner, state.variables):
        with predicated_writes(state.inner, state.variables, overflowed):
            update_replica(agreed.divisor, gradients)
        finish(overflowed)
    else:
        ops.cond(overflowed, outlined(functools.partial(finish, True)), update)


def _adapt_and_count(
    state: StepState, order: Sequence[int], agreed: Agreed, overflowed: Any
) -> None:
    """Adapts the loss scale and counts the step.

    In a branch that one outcome reaches, `overflowed` is a Python bool. That is why each branch
    calls this, and not `update_or_skip` after both: a step with callbacks then has 60 operations
    more than the bare step, not 112.
    """
    rule, counts = state.rule, state.counters.values()

    # Adapt.
    clean_steps = ops.copy(state.clean_steps)
    before = scaling.ScaleState(agreed.scale, clean_steps, counts.overflows_in_a_row)
    outcome = scaling.StepOutcome(overflowed, agreed.losses.were_finite)
    after = rule.update(before, outcome, xp=ops)
    if rule.scales_loss:
        state.scale.assign(after.scale)
    state.clean_steps.assign(after.clean_steps)

    # Count.
    backs_off = rule.backs_off(before, outcome, xp=ops)
    is_at_min_scale = ops.logical_and(backs_off, agreed.scale <= rule.min_scale)
    state.counters.count(
        counts,
        overflowed,
        agreed.losses,
        is_at_min_scale,
        agreed.flags > 0,
        order,
        scale=agreed.scale,
        scales_loss=rule.scales_loss,
    )
