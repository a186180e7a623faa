"""Decides when to replay a batch that the training saw."""

import functools
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import keras

from kmp import guarding
from kmp.callbacks.training_records import Record
from kmp.diagnosis import thresholds
from kmp.optimizer import LossScaleOptimizer
from kmp.records import Snapshot, check_record
from kmp.replay import (
    MOST_EXAMPLES,
    BatchCapture,
    CapturedBatch,
    Failure,
    Passes,
    StepContext,
    TrainStep,
    failing_part,
    is_ragged,
    replay,
)
from kmp.utils import user_messages

logger = logging.getLogger("kmp")

_OVERFLOWS_IN_A_ROW = 3
_MANY_OVERFLOWS = 8
_MOST_REPLAYS = 3  # of one training, because of overflows
_MOST_STUCK_REPLAYS = 3  # of one training
_COMPARED_AGAIN = 4  # at this multiple of the last step that was compared
_MOST_SECONDS = 8.0  # of one replay, or more in a long training
# of the time of a training, for one replay, and for all together beside the first and the last
_SHARE = 0.02


class BatchReplayer:
    """Replays a batch at the first step, each time the steps are four times as many, in the middle and at the end.

    And when many gradients are zero or steps are skipped. Captures the batch of the first step, of
    the step after a replay, and of each skipped step. Where a `train_step` of the user's own cannot
    be replayed, it replays the forward pass alone.

    Args:
        model: A model with a guard and one replica. The capture is added to its training step.
        optimizer: The model's optimizer.

    Attributes:
        is_new: Whether the capture is new, so that the step must be traced again.
    """

    def __init__(self, model: keras.Model, optimizer: LossScaleOptimizer) -> None:
        guard = guarding.guarded_step_of(model)
        assert guard is not None
        is_custom = not guarding.has_keras_step(model)
        run = guard.own_step or functools.partial(type(model).train_step, model)
        self._model = model
        # A step that runs eagerly runs its Python code each time, which may count the calls.
        self._step = TrainStep(
            None if is_custom and model.run_eagerly else run,
            guarding.all_optimizers_of(model),
            is_custom,
        )
        self.is_new = guard.capture is None or guard.capture.optimizer is not optimizer
        if self.is_new:
            guard.capture = BatchCapture(model, optimizer, is_custom)
        self._capture: BatchCapture = guard.capture

    def begin(self, snapshot: Snapshot, planned_steps: int) -> None:
        """Begins a training of a number of steps, 0 if that is not known: captures its first batch."""
        self._middle = snapshot.step + planned_steps // 2
        self._first = self._seen = (
            snapshot  # at the beginning, and at the last replay because of overflows
        )
        self._overflow_replays = self._stuck_replays = 0
        self._zero_share, self._last_step = 0.0, 0  # of the last replay without an overflow
        self._has_failed = False
        self._largest_norms: dict[str, float] = {}  # of the gradients of each layer, in float32
        self._began, self._seconds, self._examples = time.monotonic(), 0.0, MOST_EXAMPLES
        self.end()
        self._request(snapshot)

    def end(self) -> None:
        """Frees the captured batch."""
        self._replayed: CapturedBatch | None = None  # in the last replay
        self._capture.forget()

    def replay_if_due(
        self, snapshot: Snapshot, variables: Mapping[str, Any], *, is_last: bool
    ) -> Record | None:
        """Replays the captured batch if there is a reason to, or if training ends.

        Returns:
            The keys of a record: `replay` and the float32 gradients of the `variables` as
            `reference`, or `replay_error`.
        """
        if not variables or self._has_failed:
            return None
        has_overflowed = self._has_more_overflows(snapshot)
        has_failed_loss = snapshot.nonfinite_loss_count > self._seen.nonfinite_loss_count
        is_due = has_overflowed or self._is_comparison_due(snapshot, is_last)
        if not is_due and snapshot.overflow_count > self._overflows_at_request:
            self._request(
                snapshot
            )  # the batch of a skipped step has taken the place of another one
        captured = self._capture.read() if is_due else None
        if captured is None or not (
            is_last or has_overflowed or self._seconds <= _MOST_SECONDS + self._share
        ):
            return None
        if not has_overflowed and captured.was_skipped:
            self._request(snapshot)
            return None  # the batch of a skipped step is no sample of the data
        self._zero_share = max(self._zero_share, _zero_share(snapshot))
        if has_overflowed:
            self._overflow_replays += 1
            self._seen = snapshot
            failed: Failure = "loss" if has_failed_loss else "gradients"
            return self._replay(captured, variables, snapshot, captured.loss_scale, failed)
        self._last_step = snapshot.step
        began = time.monotonic()
        found = self._replay(captured, variables, snapshot, snapshot.loss_scale, None)
        self._seconds += time.monotonic() - began
        return found

    def replay_stuck(self, snapshot: Snapshot, variables: Mapping[str, Any]) -> Record | None:
        """Replays the last captured batch of a training that is stuck, as `replay_if_due`, unless it was replayed."""
        captured = self._capture.read() if variables and not self._has_failed else None
        if captured is None or self._stuck_replays >= _MOST_STUCK_REPLAYS:
            return None
        if self._replayed and captured.step == self._replayed.step:
            return None
        self._stuck_replays += 1
        failed: Failure = "loss" if snapshot.nonfinite_losses_in_a_row else "gradients"
        return self._replay(captured, variables, snapshot, captured.loss_scale, failed)

    def replay_again(
        self, snapshot: Snapshot, variables: Mapping[str, Any], usable_scale: float | None
    ) -> Record:
        """Replays the batch of the last replay once more, after a change of the model, at a loss scale that fits."""
        if self._replayed is None:
            return {"replay_error": "the batch was not kept"}
        if self._capture.is_of_loop:
            return {"replay_error": "the functions of a custom training loop are not traced again"}
        scale = min(snapshot.loss_scale, usable_scale or snapshot.loss_scale)
        before = self._step, self._has_failed
        found = self._replay(self._replayed, variables, snapshot, scale, None)
        if "replay_error" in found:  # of the change
            self._step, self._has_failed = before
        return found

    def _replay(
        self,
        captured: CapturedBatch,
        variables: Mapping[str, Any],
        snapshot: Snapshot,
        loss_scale: float,
        failed: Failure | None,
    ) -> Record:
        """Replays a batch, and captures the next one. Returns the keys of a record.

        A replay that fails is the last of this training.
        """
        capture = self._capture
        self._request(snapshot)
        if capture.unrestorable:
            return self._give_up(f"a replay would change {capture.unrestorable}")
        began, most = time.monotonic(), max(_MOST_SECONDS, self._share)
        parts = captured.parts(self._examples)
        step = replace(self._step, run=None) if capture.is_of_loop else self._step
        passes = Passes(
            self._model,
            parts[0],
            step,
            variables,
            restored=capture.variables,
            deadline=began + most / 2,
        )
        try:
            if failed and len(parts) > 1:
                passes = replace(
                    passes,
                    data=failing_part(passes, parts, failed, loss_scale, captured.batch_size),
                )
            self._replayed = CapturedBatch(passes.data, *captured[1:])
            context = StepContext(
                snapshot.step, loss_scale, captured.batch_size, failed, self._largest_norms
            )
            found, reference = replay(replace(passes, deadline=began + most), context)
            check_record({"replay": found})
        except TimeoutError:
            self._examples = max(2, passes.examples // 4)  # the next replay may take less
            self._has_failed = is_ragged(passes.data)  # such a batch has no parts
            return {
                "replay_error": (
                    f"TimeoutError: {passes.examples} examples take longer than {most:.0f} s"
                )
            }
        # the user's code may fail outside its training step, or memory may be too small
        except Exception as error:
            if self._step.is_custom and self._step.run:
                self._step = replace(self._step, run=None)
                return self._replay(captured, variables, snapshot, loss_scale, failed)
            return self._give_up(f"{type(error).__name__}: {user_messages.one_line(error)}")
        if time.monotonic() - began > most:  # the search may have ended early
            self._examples = max(2, passes.examples // 4)
        for each in found.gradient_errors:
            self._largest_norms[each.layer] = max(each.norm, each.largest_norm)
        return {"replay": found} | ({"reference": reference} if reference else {})

    def _give_up(self, reason: str) -> Record:
        """Ends the replays of this training. Returns the keys of a record."""
        self._has_failed = True
        logger.info("kmp could not replay a batch of %r: %s", self._model.name, reason)
        return {"replay_error": reason}

    @property
    def _share(self) -> float:
        """The seconds that replays may take of this training."""
        return _SHARE * (time.monotonic() - self._began)

    def _request(self, snapshot: Snapshot) -> None:
        """Captures the batch of the next step."""
        self._overflows_at_request = snapshot.overflow_count
        self._capture.request()

    def _has_more_overflows(self, snapshot: Snapshot) -> bool:
        """Whether a loss was not finite, or gradients overflowed in a row or often, since the last replay."""
        first, seen = self._first, self._seen
        losses = snapshot.nonfinite_loss_count - first.nonfinite_loss_count
        overflows = snapshot.overflow_count - first.overflow_count
        if self._overflow_replays >= _MOST_REPLAYS:
            return False
        if losses > 2 * (seen.nonfinite_loss_count - first.nonfinite_loss_count):
            return True
        count = overflows - losses
        is_new = count > 0 and overflows > 2 * (seen.overflow_count - first.overflow_count)
        is_often = snapshot.overflows_in_a_row >= _OVERFLOWS_IN_A_ROW or count >= _MANY_OVERFLOWS
        is_often |= snapshot.overflows_at_min_scale > seen.overflows_at_min_scale
        return is_new and is_often and self._step.run is not None

    def _is_comparison_due(self, snapshot: Snapshot, is_last: bool) -> bool:
        """Whether to compare the precisions: at a few points of a training, and where many more gradients are zero."""
        if snapshot.overflows_in_a_row or snapshot.step == self._last_step:
            return False
        if is_last or snapshot.step >= _COMPARED_AGAIN * self._last_step:
            return True
        if self._last_step < self._middle <= snapshot.step:
            return True
        share = _zero_share(snapshot)
        return (
            share > thresholds.MANY_ZEROS and share >= self._zero_share + thresholds.MANY_ZEROS
        )  # so it is at most nine times


def _zero_share(snapshot: Snapshot) -> float:
    """Returns the share of the sampled elements that are zero; 0 without a finite sample."""
    histogram = snapshot.sample.histogram if snapshot.sample else None
    return histogram.zero_fraction if histogram and histogram.total and histogram.is_finite else 0.0
