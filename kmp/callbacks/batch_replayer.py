"""Decides when to replay a batch that the training saw."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from kmp.optimizer import LossScaleOptimizer
from kmp.policy import guarding
from kmp.records import Snapshot, to_line
from kmp.replay import BatchCapture, replay
from kmp.utils import user_messages

logger = logging.getLogger("kmp")

_MANY_ZEROS = 0.1
_MORE_ZEROS = 0.1
_OVERFLOWS_IN_A_ROW = 3
_MANY_OVERFLOWS = 8
_MOST_REPLAYS = 3  # of one training, for each reason
_LONGEST_ERROR = 500
_MOST_SECONDS = 5.0  # of one replay

Record = dict[str, Any]


@dataclass
class _Replays:
    """The replays of one training for one reason."""

    count: int = 0
    step: int = 0
    zero_share: float = -_MORE_ZEROS
    nonfinite_losses: int = 0
    overflows: int = 0

    @property
    def are_left(self) -> bool:
        return self.count < _MOST_REPLAYS


class BatchReplayer:
    """Replays a batch when many gradients are zero, or steps are skipped.

    Captures the batch of the first step, and of each skipped step, on one replica. With a `train_step` of the user's
    own, only the forward pass is replayed, and only after a non-finite loss.
    """

    def __init__(self) -> None:
        self._capture: BatchCapture | None = None
        self._for_overflows, self._for_zeros = _Replays(), _Replays()
        self._has_failed = self._is_forward_only = False

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_capture": None}  # the model has it, and it cannot be copied

    def install(self, model: keras.Model, optimizer: LossScaleOptimizer) -> bool:
        """Adds the capture to the model's training step. Returns whether the step must be traced again."""
        self._is_forward_only = not guarding.has_keras_step(model)
        guard = guarding.guard_of(model)
        assert guard is not None
        self._capture = previous = guard.capture
        if model.distribute_strategy.num_replicas_in_sync > 1:
            self._capture = None
        elif previous is None or previous.optimizer is not optimizer:
            self._capture = BatchCapture(model, optimizer)
        guard.capture = self._capture
        return self._capture is not previous

    def begin(self, snapshot: Snapshot) -> None:
        """Begins a training: captures its first batch."""
        self._for_zeros = _Replays()
        self._for_overflows = _Replays(
            nonfinite_losses=snapshot.nonfinite_loss_count, overflows=snapshot.overflow_count
        )
        self._first = self._for_overflows.nonfinite_losses, self._for_overflows.overflows
        self._has_failed = False
        if self._capture:
            self._capture.forget()
            self._capture.request()

    def end(self) -> None:
        """Frees the captured batch."""
        if self._capture:
            self._capture.forget()

    def replay_if_due(
        self, model: keras.Model, snapshot: Snapshot, variables: Mapping[str, Any], *, is_last: bool = False
    ) -> Record | None:
        """Replays the captured batch if there is a reason to.

        Args:
            model: The model in training.
            snapshot: The newest snapshot.
            variables: The variables to measure, by path.
            is_last: Whether training ends: then zeros that were replayed in the first half are replayed again.

        Returns:
            The keys of a record: `replay` and the float32 gradients as `reference`, or `replay_error`.
        """
        if self._capture is None or not variables or self._has_failed:
            return None
        has_overflowed = self._has_more_overflows(snapshot)
        has_failed_loss = snapshot.nonfinite_loss_count > self._for_overflows.nonfinite_losses
        is_due = has_failed_loss if self._is_forward_only else has_overflowed or self._has_more_zeros(snapshot, is_last)
        if not is_due:
            return None
        captured = self._capture.read()
        if captured is None:
            return None
        replays = self._for_overflows if has_overflowed else self._for_zeros
        replays.count += 1
        replays.step = snapshot.step
        replays.nonfinite_losses, replays.overflows = snapshot.nonfinite_loss_count, snapshot.overflow_count
        if snapshot.sample and snapshot.sample.histogram.is_finite:
            self._for_zeros.zero_share = max(self._for_zeros.zero_share, snapshot.sample.histogram.zero_fraction)
        if self._capture.unrestorable:
            return self._failure(model, f"a replay would change {self._capture.unrestorable}")
        try:
            scale = captured.loss_scale if has_overflowed else snapshot.loss_scale
            result, reference = replay(
                model,
                captured.batch,
                variables,
                step=snapshot.step,
                loss_scale=scale,
                batch_size=captured.batch_size,
                failed=("loss" if has_failed_loss else "gradients") if has_overflowed else None,
                is_forward_only=self._is_forward_only,
                restored=self._capture.variables,
                seconds=_MOST_SECONDS,
            )
            to_line({"replay": result})  # raises for what a log cannot hold
        except Exception as error:  # the user's code may fail outside its training step, or memory may be too small
            is_late = isinstance(error, TimeoutError)
            reason = f"{type(error).__name__}: {user_messages.one_line(error)}"
            return self._failure(model, f"it takes longer than {_MOST_SECONDS:g} s" if is_late else reason)
        return {"replay": result} | ({"reference": reference} if reference else {})

    def _failure(self, model: keras.Model, reason: str) -> Record:
        """Ends the replays of this training. Returns the keys of a record."""
        self._has_failed = True
        logger.info("kmp could not replay a batch of %r: %s", model.name, reason)
        return {"replay_error": reason[:_LONGEST_ERROR]}

    def _has_more_overflows(self, snapshot: Snapshot) -> bool:
        """Whether a loss was not finite, or gradients overflowed in a row or often, since the last replay."""
        done = self._for_overflows
        first_losses, first_overflows = self._first
        nonfinite_losses = snapshot.nonfinite_loss_count - first_losses
        overflows = snapshot.overflow_count - first_overflows
        if not done.are_left:
            return False
        if nonfinite_losses > 2 * (done.nonfinite_losses - first_losses):
            return True
        count = overflows - nonfinite_losses
        is_new = count > 0 and overflows > 2 * (done.overflows - first_overflows)
        return is_new and (snapshot.overflows_in_a_row >= _OVERFLOWS_IN_A_ROW or count >= _MANY_OVERFLOWS)

    def _has_more_zeros(self, snapshot: Snapshot, is_last: bool) -> bool:
        """Whether there are zeros that were not replayed: more of them, or others, because training changes them."""
        done, sample = self._for_zeros, snapshot.sample
        if sample is None or not sample.histogram.is_finite or not done.are_left:
            return False
        share = sample.histogram.zero_fraction
        are_all_zero = np.any(sample.zeros == sample.elements)
        is_suspicious = share > _MANY_ZEROS or bool(are_all_zero)
        is_old = is_last and 2 * done.step < snapshot.step
        return is_suspicious and (is_old or share >= done.zero_share + _MORE_ZEROS)
