"""Decides which steps a monitor samples, and which samples measure the update of the weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kmp.gradients.gradient_sampler import copies_of, with_updates
from kmp.gradients.sampling_clock import NEVER
from kmp.optimizer import LossScaleOptimizer
from kmp.records import GradientSample, Snapshot

_RETRIES = 16  # as many halvings lead from the default loss scale to 1
# Samples that measure the update of the weights: the 8 before step 250, and some after it.
_FIRST_UPDATES = 12
# In samples after these: measuring an update takes several times as long as sampling.
UPDATES_EVERY = 10


@dataclass(frozen=True)
class _Before:
    """The weights before the call whose update is measured, and what had happened until then."""

    step: int
    updates: int
    weights: dict[str, Any]


class SampleSchedule:
    """The samples of one training.

    Args:
        optimizer: The optimizer whose gradients are sampled.
        selected: Returns the variables to sample by path; none before the model is built.
        selects_all: Whether these are all variables.
    """

    def __init__(
        self,
        optimizer: LossScaleOptimizer,
        selected: Callable[[], dict[str, Any]],
        selects_all: bool,
    ) -> None:
        self._optimizer = optimizer
        self._selected, self._selects_all = selected, selects_all
        self._before: _Before | None = None
        self.last_step = 0

    def prepare(self) -> bool:
        """Prepares the training step. Returns whether it must be traced again."""
        return self._optimizer.sampler.start(self, NEVER)

    def start(self, snapshot: Snapshot, interval: int) -> None:
        """Begins a training after a snapshot."""
        self.last_step = snapshot.sample.step if snapshot.sample else 0
        self._retries_left = _RETRIES
        self._until_update = self._measured = 0
        # Of the weights after how many updates, and of which variables; until an update is measured
        self._norms: tuple[tuple[int, tuple[str, ...]], np.ndarray] | None = None
        self.sample_next_step(interval)

    def stop(self) -> None:
        """Ends the training."""
        self._optimizer.sampler.stop(self)

    def sample_next_step(self, interval: int) -> None:
        """Samples the next step, and each step divisible by the interval."""
        # Another callback may have trained since the last read.
        self._requested_step = self._optimizer.counters.read_counts().step + 1
        self._interval = interval
        self._optimizer.sampler.start(self, interval, first=self._requested_step)

    def follow(self, interval: int, step: int) -> None:
        """Samples each step divisible by the interval, and the given one if it is not 0."""
        if (interval, step) != (self._interval, self._requested_step):
            self._interval, self._requested_step = interval, step
            self._optimizer.sampler.start(self, interval, first=step)

    def begin_batch(self) -> None:
        """Copies the weights before a call of the step that is sampled, if an update is due."""
        if self._until_update <= 0:
            # The updates of the weights so far; a step that is skipped or accumulates gradients
            # adds none.
            updates = int(self._optimizer.iterations.numpy())
            step = self._optimizer.counters.read_counts().step
            self._before = _Before(step, updates, copies_of(self._selected()))

    def end_batch(self) -> None:
        """Frees the copies."""
        self._before = None

    def take(self, snapshot: Snapshot) -> GradientSample | None:
        """Returns the sample of a snapshot, with the update of the weights if it was measured.

        `None` if it was taken before, or is that of another callback with another interval.
        """
        sample = snapshot.sample
        if sample is None:
            return None
        is_next = self.last_step < self._requested_step <= sample.step
        if not is_next and sample.step // self._interval <= self.last_step // self._interval:
            return None
        self.last_step = sample.step
        if sample.is_finite:
            self._retries_left = 0
        self._until_update -= 1
        if not self._selects_all:
            sample = sample.select([name for name in self._selected() if name in sample])
        return self._with_update(sample)

    def needs_another(self) -> bool:
        """Whether the next step is to be sampled, after one that overflowed.

        The first steps often overflow, and a short training has few other samples.
        """
        self._retries_left -= 1
        return self._retries_left >= 0

    def _with_update(self, sample: GradientSample) -> GradientSample:
        before = self._before
        updates = int(self._optimizer.iterations.numpy())
        # If the sampled call has updated the weights.
        if before and before.weights and sample.step > before.step and updates > before.updates:
            self._measured += 1
            self._until_update = 0 if self._measured < _FIRST_UPDATES else UPDATES_EVERY - 1
            return with_updates(sample, before.weights, self._selected())
        if self._measured:
            return sample
        # Skipped steps leave the weights as they were, and the first steps are often skipped. Of
        # hundreds of variables, measuring takes as long as a part of a step.
        measured_at = (updates, sample.names)
        if self._norms is None or self._norms[0] != measured_at:
            weights = self._selected()  # the first step may have built the model
            self._norms = measured_at, with_updates(sample, weights, weights).weight_norm
        return replace(sample, weight_norm=self._norms[1])
