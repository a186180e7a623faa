"""The step of `kmp.optimizer.step` with parts that XLA compiles on each replica of a strategy."""

import functools
from typing import Any

import keras
import tensorflow as tf

from kmp.backend import distribution, keras_internals
from kmp.gradients.tensor_groups import Gradients, Variables
from kmp.gradients.unscaling import nonfinite_flags, unscale_for_update
from kmp.optimizer.inner_optimizer import (
    supports_predicated_writes,
    supports_updates_of_sums,
    without_strategy,
)
from kmp.optimizer.step import (
    Agreed,
    StepArguments,
    StepState,
    agree,
    divisor_of,
    flags_of_all,
    update_or_skip,
)


def can_compile_on_replicas(inner: keras.optimizers.Optimizer, variables: Variables) -> bool:
    """Whether each replica can update its part of these variables in compiled code."""
    is_predicable = supports_predicated_writes(inner, variables)
    return is_predicable and supports_updates_of_sums(inner) and distribution.can_update_parts()


def take_step_on_replicas(state: StepState, gradients: Gradients, arguments: StepArguments) -> None:
    """Takes a step as `take_step` does, with a compiled check and update on each replica.

    Replicas synchronize in between, which compiled code cannot: they agree, and sum the unscaled
    gradients.
    """
    variables = [state.variables[index] for index in arguments.indices]
    scale = state.bounded_scale()

    # Measure, on each replica.
    @tf.function(jit_compile=True, autograph=False)
    def measure(gradients: Gradients, divisor: tf.Tensor | None) -> tuple[tf.Tensor, list[Any]]:
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        flags = nonfinite_flags(gradients, variables, divisor, replicas)
        return flags, unscale_for_update(gradients, variables, divisor)

    flags, gradients = measure(gradients, divisor_of(state, scale, arguments.unscaled))
    flags = flags_of_all(state, flags, arguments)

    # Agree, over replicas and workers.
    flags, losses = agree(state, flags)
    gradients = _sums_of(gradients)
    agreed = Agreed(scale, None, flags, losses)

    # Update or skip, adapt and count.
    update = functools.partial(_update_on_replica, state, variables, arguments)
    count = len(tf.distribute.get_strategy().extended.worker_devices)
    functions = [tf.function(update, jit_compile=True, autograph=False) for _ in range(count)]
    distribution.update_parts(functions, _written_by(state), (agreed,), gradients)


def _sums_of(gradients: Gradients) -> list[Any]:
    """Returns the sums over all replicas of the gradients that are not `None`."""
    present = [gradient for gradient in gradients if gradient is not None]
    sums = iter(distribution.all_reduce_sum(present))
    return [None if gradient is None else next(sums) for gradient in gradients]


def _written_by(state: StepState) -> list[keras.Variable]:
    return [
        *state.variables,
        *keras_internals.optimizer_state(state.inner),
        state.scale,
        state.clean_steps,
        *state.counters.weights,
    ]


def _update_on_replica(
    state: StepState,
    variables: Variables,
    arguments: StepArguments,
    agreed: Agreed,
    gradients: Any,
) -> None:
    with without_strategy(state.inner):
        update_or_skip(state, variables, arguments, agreed, gradients)
