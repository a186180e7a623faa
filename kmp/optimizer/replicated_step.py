"""The step of `kmp.optimizer.step` with parts that XLA compiles on each replica of a strategy."""

import contextlib
from typing import Any

import keras
import tensorflow as tf

from kmp.backend import distribution
from kmp.gradients.tensor_groups import Gradients, Variables
from kmp.gradients.unscaling import is_overwritten, nonfinite_flags, unscale_for_update
from kmp.optimizer.inner_optimizer import clip, without_clipping, without_strategy
from kmp.optimizer.predicated_writes import supports_predicated_writes
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
    # Keras adds nothing up over replicas where a gradient is the new value, as of float8.
    are_summed = not any(map(is_overwritten, variables))
    is_predicable = supports_predicated_writes(inner, variables)
    return are_summed and is_predicable and distribution.can_update_parts()


def take_step_on_replicas(state: StepState, gradients: Gradients, arguments: StepArguments) -> None:
    """Takes a step as `take_step` does, with a compiled check and update on each replica.

    Replicas synchronize in between, which compiled code cannot: they agree, and sum the unscaled
    gradients, which each has clipped, as in Keras. Accumulated gradients are sums over replicas,
    and clipped when they are complete. Keras cannot accumulate under most strategies: it
    synchronizes in a branch.
    """
    variables = [state.variables[index] for index in arguments.indices]
    scale = state.bounded_scale()
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    clips_first = not state.inner.gradient_accumulation_steps

    # Measure, on each replica.
    @tf.function(jit_compile=True, autograph=False)
    def measure(gradients: Gradients, divisor: tf.Tensor | None) -> tuple[tf.Tensor, list[Any]]:
        flags = nonfinite_flags(gradients, variables, divisor, replicas)
        unscaled = unscale_for_update(gradients, variables, divisor)
        return flags, clip(state.inner, unscaled) if clips_first else unscaled

    flags, gradients = measure(gradients, divisor_of(state, scale, arguments.unscaled))
    flags = flags_of_all(state, flags, arguments)

    # Agree, over replicas and workers.
    flags, losses = agree(state, flags)
    present = [gradient for gradient in gradients if gradient is not None]
    sums = iter(distribution.all_reduce_sum(present))
    gradients = [None if gradient is None else next(sums) for gradient in gradients]
    agreed = Agreed(scale, None, flags, losses)

    # Update or skip, adapt and count.
    def update(agreed: Agreed, gradients: Gradients) -> None:
        clipped = without_clipping(state.inner) if clips_first else contextlib.nullcontext()
        with without_strategy(state.inner), clipped:
            update_or_skip(state, variables, arguments, agreed, gradients)

    count = len(tf.distribute.get_strategy().extended.worker_devices)
    functions = [tf.function(update, jit_compile=True, autograph=False) for _ in range(count)]
    used = [*state.written, *state.read]
    distribution.update_parts(functions, used, (agreed,), gradients)
