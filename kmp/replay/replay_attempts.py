"""What to replay next, after replays of a training that failed."""

from typing import Any, Literal

import tensorflow as tf

from kmp.replay.batch_capture import MOST_EXAMPLES, CapturedBatch, is_ragged
from kmp.replay.failure_reasons import reason_of

_FEWEST = 2  # examples
_MOST_FAILURES = 2  # in the same way

NextAttempt = Literal["none", "same batch", "another batch", "whole batch"]


class ReplayAttempts:
    """Decides what to replay after a replay that failed, which does not end those of a training.

    A replay begins with a few examples of a batch, and with the whole training step. If that fails,
    it is tried with the forward pass of the model alone; with fewer examples, if the memory is too
    small; with the whole batch, because rows such as the nodes of a graph may not stand alone; and
    with another batch.

    Args:
        runs_step: Whether the training step can be replayed, not the forward pass alone.
        can_run_less: Whether the forward pass alone may be possible where the step is not: a step
            of the user's own, or of a loop.
        takes_whole: Whether batches are captured as a whole already.

    Attributes:
        can_run_less: The argument.
        examples: The most examples of a replay.
        runs_step: Whether to replay the training step.
        takes_whole: Whether to replay a batch as a whole.
        reason: Why no more batches are replayed, or `None`.
        last_reason: Why the last replay failed, or `None` if it did not.
    """

    def __init__(self, *, runs_step: bool, can_run_less: bool, takes_whole: bool = False) -> None:
        self.examples = MOST_EXAMPLES
        self.runs_step = runs_step
        self.takes_whole = takes_whole
        self.reason: str | None = None
        self.last_reason: str | None = None
        self._has_step = runs_step
        self.can_run_less = can_run_less
        self._failures = 0

    def parts(self, captured: CapturedBatch) -> list[Any]:
        """Returns the parts of a batch to replay one of."""
        return [captured.data] if self.takes_whole else captured.parts(self.examples)

    def succeeded(self) -> None:
        """Notes that a replay did not fail."""
        self._failures = 0
        self.last_reason = None

    def take_fewer(self, replayed: CapturedBatch | None) -> bool:
        """Replays fewer examples from now on than these; returns whether the batch has parts."""
        if replayed is None or self.takes_whole or is_ragged(replayed.data):
            return False
        self.examples = min(self.examples, max(_FEWEST, replayed.examples // 4))
        return True

    def took_too_long(self, replayed: CapturedBatch | None) -> None:
        """Replays fewer examples from now on, or nothing if the batch has no parts."""
        if not self.take_fewer(replayed):
            self.stop("the replay of a batch without parts takes too long")

    def failed(
        self, error: Exception, replayed: CapturedBatch | None, captured: CapturedBatch
    ) -> NextAttempt:
        """Returns what to replay next, after an error.

        Args:
            error: The error.
            replayed: The part of the batch that was replayed.
            captured: The batch.
        """
        self.last_reason = reason_of(error)
        if self.runs_step and self.can_run_less:
            self.runs_step = False
            return "same batch"
        self._failures += 1
        examples = replayed.examples if replayed else captured.examples
        if isinstance(error, tf.errors.ResourceExhaustedError | MemoryError):
            if examples > _FEWEST and self.take_fewer(replayed):
                return "same batch"
        elif not self.takes_whole and examples < captured.batch_size:
            self.takes_whole = True
            self.runs_step = self._has_step
            self._failures = 0
            return "whole batch"
        if self._failures < _MOST_FAILURES:
            return "another batch"
        self.stop(self.last_reason)
        return "none"

    def stop(self, reason: str) -> None:
        """Ends the replays of the training."""
        self.reason = self.last_reason = reason
