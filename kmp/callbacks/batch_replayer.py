"""Decides when to replay a batch that the training saw."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from kmp.optimizer import LossScaleOptimizer
from kmp.policy import guarded_training
from kmp.records import ZERO_BIN, GradientSample, Replay, Snapshot
from kmp.replay import BatchCapture, replay
from kmp.utils import user_messages

logger = logging.getLogger("kmp")

_MANY_ZEROS = 0.1
_MORE_ZEROS = 0.1
_OVERFLOWS_IN_A_ROW = 3
_MANY_OVERFLOWS = 8
_MOST_REPLAYS = 3  # for each reason


@dataclass
class _Replayed:
    """What the replays so far were about."""

    zero_share: float = -_MORE_ZEROS
    nonfinite_losses: int = 0
    overflows: int = 0
    captured_step: int = 0
    count: int = 0


class BatchReplayer:
    """Replays a batch when many gradients are zero, or steps are skipped.

    Captures the batch of the first step, and of each skipped step. Only for the training step of Keras, on one replica.
    """

    def __init__(self) -> None:
        self._capture: BatchCapture | None = None
        self._replayed = _Replayed()

    def install(self, model: keras.Model, optimizer: LossScaleOptimizer) -> bool:
        """Adds the capture to the model's training step. Returns whether the step must be traced again."""
        self._capture = None
        if not guarded_training.has_keras_step(model) or model.distribute_strategy.num_replicas_in_sync > 1:
            return False
        probes = guarded_training.probes_of(model)
        own = [probe for probe in probes if isinstance(probe, BatchCapture) and probe.optimizer is optimizer]
        self._capture = own[0] if own else BatchCapture(optimizer)
        if not own:
            probes.append(self._capture)
        return not own

    def begin(self) -> None:
        """Begins a training: captures its first batch."""
        self._replayed = _Replayed()
        if self._capture:
            self._capture.forget()
            self._capture.request()

    def end(self) -> None:
        """Frees the captured batch."""
        if self._capture:
            self._capture.forget()

    def replay_if_due(
        self, model: keras.Model, snapshot: Snapshot, variables: Mapping[str, Any]
    ) -> tuple[Replay, GradientSample | None] | None:
        """Replays the captured batch if there is a reason to, and returns the result with the float32 gradients."""
        done = self._replayed
        if self._capture is None or not variables or done.count == _MOST_REPLAYS:
            return None
        has_overflowed = self._has_more_overflows(snapshot)
        if not has_overflowed and not self._has_more_zeros(snapshot.sample):
            return None
        captured = self._capture.read()
        if captured is None:
            return None
        done.count += 1
        done.captured_step = captured.step
        done.nonfinite_losses, done.overflows = snapshot.nonfinite_loss_count, snapshot.overflow_count
        if snapshot.sample and snapshot.sample.histogram.is_finite:
            done.zero_share = max(done.zero_share, snapshot.sample.histogram.zero_fraction)
        try:
            scale = captured.loss_scale if has_overflowed else snapshot.loss_scale
            size = captured.batch_size
            return replay(model, captured.batch, variables, loss_scale=scale, batch_size=size, step=snapshot.step)
        except Exception as error:  # the user's code may fail outside its training step, or memory may be too small
            done.count = _MOST_REPLAYS
            logger.info("kmp could not replay a batch of %r: %s", model.name, user_messages.one_line(error))
            return None

    def _has_more_overflows(self, snapshot: Snapshot) -> bool:
        """Whether a loss was not finite, or gradients overflowed in a row or often, since the last replay."""
        done = self._replayed
        if snapshot.nonfinite_loss_count > 2 * done.nonfinite_losses:
            return True
        count = snapshot.overflow_count - snapshot.nonfinite_loss_count
        is_new = count > 0 and snapshot.overflow_count > 2 * done.overflows
        return is_new and (snapshot.overflows_in_a_row >= _OVERFLOWS_IN_A_ROW or count >= _MANY_OVERFLOWS)

    def _has_more_zeros(self, sample: GradientSample | None) -> bool:
        if sample is None or not sample.histogram.is_finite:
            return False
        share = sample.histogram.zero_fraction
        are_all_zero = np.any(sample.counts[:, ZERO_BIN] == sample.counts.sum(1))
        is_suspicious = share > _MANY_ZEROS or bool(are_all_zero)
        return is_suspicious and share >= self._replayed.zero_share + _MORE_ZEROS
