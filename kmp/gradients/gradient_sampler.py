"""Sampling of gradients in the compiled step: when, of which variables, and what the last sample was."""

import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from kmp.backend import distribution
from kmp.gradients import tensor_statistics
from kmp.records import BIN_COUNT, GradientSample
from kmp.utils import matching, unique

Patterns = tuple[str, ...] | None


def paths_of(variables: Sequence[Any]) -> list[str]:
    """Returns the paths of variables; a second one of a path has a number."""
    return unique(getattr(variable, "path", variable.name) for variable in variables)


def extended_sampler(before: "GradientSampler | None", wanted: Patterns) -> "GradientSampler":
    """Returns a sampler of what `wanted` asks for, and of what the one before it was for; that one, if it does both."""
    if before is None:
        return GradientSampler(wanted)
    if before.patterns is None or (wanted is not None and set(wanted) <= set(before.patterns)):
        return before
    return GradientSampler(None if wanted is None else tuple(dict.fromkeys((*before.patterns, *wanted))), before)


class GradientSampler:
    """The last sample, and when to take the next: set by callbacks, read by the compiled step.

    The cadence is a variable, so that changing or pausing it needs no new trace. Where several callbacks ask, it is the
    greatest common divisor of theirs, so that each finds the samples it asked for.

    Args:
        patterns: Which variables to measure, by path; `None` for all.
        before: A sampler whose place this one takes, at the same cadence.
    """

    def __init__(self, patterns: Patterns = None, before: "GradientSampler | None" = None) -> None:
        self.patterns = patterns
        self._asked: WeakKeyDictionary[Any, int] = before._asked if before else WeakKeyDictionary()
        asked = math.gcd(*self._asked.values())
        self._cadence = keras.Variable(asked, dtype="int64", trainable=False, name="sample_every")
        self._first = keras.Variable(0, dtype="int64", trainable=False, name="sample_first")
        self._step = distribution.variable("sample_step", "int64", aggregation="only_first_replica")
        self._scale = distribution.variable("sample_loss_scale", "float32", aggregation="only_first_replica")
        self._chosen: list[int] | None = None

    def check(self, paths: Sequence[str]) -> None:
        """Makes sure that each pattern matches a variable, before anything is built.

        Raises:
            ValueError: If one does not. The patterns are forgotten then, so that a later training can have its own.
        """
        patterns, self.patterns = self.patterns, ()
        matching(patterns or (), paths)
        self.patterns = patterns

    def build(self, paths: Sequence[str], scale_is_power_of_two: bool) -> None:
        """Creates what holds a sample.

        Args:
            paths: Those of all variables.
            scale_is_power_of_two: Whether it always is; then the gradients without the scale need no count of theirs.

        Raises:
            ValueError: If a pattern matches no variable.
        """
        self._chosen = list(range(len(paths))) if self.patterns is None else matching(self.patterns, paths)
        self._paths = list(paths)
        rows = len(self._chosen)
        self._counts = distribution.variable("sample_counts", "int64", (rows, BIN_COUNT))
        self._amax = distribution.variable("sample_amax", "float32", (rows,))
        self._square_sum = distribution.variable("sample_square_sum", "float64", (rows,))
        self._unscaled = None
        if not scale_is_power_of_two:
            self._unscaled = distribution.variable("sample_unscaled_counts", "int64", (rows, BIN_COUNT))

    def start(self, owner: Any, every_n_steps: int, first: int) -> None:
        """Samples step `first`, and from then on each step that `every_n_steps` divides."""
        self._asked[owner] = every_n_steps
        self._first.assign(first)
        self._cadence.assign(math.gcd(*self._asked.values()))

    def stop(self, owner: Any) -> None:
        """Forgets what `owner` asked for."""
        self._asked.pop(owner, None)
        self._cadence.assign(math.gcd(*self._asked.values()))

    def sample(self, gradients: list[Any], unscaled: tensor_statistics.Prepare, scale: Any, step: Any) -> None:
        """Measures the gradients if `step` is one to sample; part of the compiled step.

        Args:
            gradients: One for each variable, loss-scaled.
            unscaled: Takes some of them and their places, and returns them without the scale.
            scale: Scalar float32.
            step: Scalar int64, the step's number, from 1.
        """
        on_cadence = step % ops.maximum(self._cadence, 1) == 0
        due = ops.logical_and(self._cadence > 0, ops.logical_or(on_cadence, ops.equal(step, self._first)))
        ops.cond(due, lambda: self._record(gradients, unscaled, scale, step), lambda: None)

    def read(self, order: Sequence[int], steps: int) -> GradientSample | None:
        """Returns the last sample of this process' replicas, or `None` before the first one.

        Args:
            order: The places of all variables, from the input to the loss.
            steps: How many were taken; a file may have set the optimizer back to before its last sample.
        """
        step = int(self._step.numpy())
        if not 0 < step <= steps or self._chosen is None:
            return None
        row_of = {place: row for row, place in enumerate(self._chosen)}
        rows = [row_of[place] for place in order if place in row_of]
        counts, amax, square_sum = map(distribution.local_values, (self._counts, self._amax, self._square_sum))
        nothing, unknown = np.zeros(len(rows), np.int64), np.full(len(rows), math.nan)
        scale = float(self._scale.numpy())
        unscaled = None
        if self._unscaled is not None:
            unscaled = np.sum(distribution.local_values(self._unscaled), axis=0)[rows]
        return GradientSample(
            step,
            scale,
            tuple(self._paths[self._chosen[row]] for row in rows),
            np.sum(counts, axis=0)[rows],
            amax=np.max(amax, axis=0)[rows].astype(np.float64),
            norm=np.sqrt(np.sum(square_sum, axis=0))[rows] / scale,
            weight_norm=unknown,
            update_norm=unknown,
            updates=nothing,
            lost_updates=nothing,
            unscaled_counts=unscaled,
        )

    def _record(self, gradients: list[Any], unscaled: tensor_statistics.Prepare, scale: Any, step: Any) -> None:
        chosen = self._chosen
        assert chosen is not None
        if not chosen:
            return
        given = [gradients[place] for place in chosen]
        measured = tensor_statistics.of_gradients(given)
        self._counts.assign(measured.counts)
        self._amax.assign(measured.amax)
        self._square_sum.assign(measured.square_sum)
        if self._unscaled is not None:
            with tf.control_dependencies([measured.counts]):  # so that both do not take memory at once
                again = tensor_statistics.of_gradients(
                    given, lambda some, rows: unscaled(some, [chosen[row] for row in rows])
                )
            self._unscaled.assign(again.counts)
        with tf.control_dependencies([measured.counts]):  # a step that got no batch is no sample: see `Step._finish`
            self._step.assign(step)
            self._scale.assign(scale)
