"""When the batches of a training are replayed."""

import math

import keras

from kmp.callbacks.replay_time import ReplayTime
from kmp.diagnosis import soundness, thresholds
from kmp.records import Replay, Snapshot
from kmp.replay import MOST_EXAMPLES, CapturedBatch
from kmp.utils.float_formats import FLOAT16, FloatFormat

# A training that begins at the default scale skips up to six steps until the scale suits it.
_OVERFLOWS_IN_A_ROW = 7
_MANY_OVERFLOWS = 8
# Of the sampled elements that are zero, since the last comparison; so this is at most nine times.
_MORE_ZEROS = 0.1
_MOST_REPLAYS = 3  # of one training, because of overflows
_MOST_STUCK_REPLAYS = 3  # of one training
# At these multiples of the last step that was compared.
_COMPARED_AGAIN = 4
_COMPARED_AT_END = 1.5  # of a training that continues another one
# Examples of a comparison that would take much of the time of a training.
_FEW_EXAMPLES, _FEWEST_EXAMPLES = 8, 2
# Of the examples of a training with more than so many numbers in them, the most to compare.
_COMPARED_SHARE, _MANY_NUMBERS = 16, 2**18
# After a harmful comparison, until there are enough for a proof: in multiples of the last step, and
# at least so many steps later.
_COMPARED_SOON, _SOONEST = 1.25, 16


class ReplaySchedule:
    """Decides when to replay a batch, and how much of it.

    At the first step and at the end, and when steps are skipped or, in float16, many gradients are
    zero. In the middle, and each time the steps are four times as many, if that takes a small share
    of the time of the training or the precisions have differed; sooner where layers cure a
    difference, so that a repair comes while there is still something to train. A comparison that
    would take much of a short training has fewer examples.

    Args:
        first: The state of the optimizer at the beginning.
        scales_loss: Whether a loss scale adapts, so that a few steps are skipped on purpose.

    Attributes:
        time: The time that replays have taken, and may take.
    """

    def __init__(self, first: Snapshot, *, scales_loss: bool) -> None:
        self.time = ReplayTime()
        self._scales_loss = scales_loss
        self._planned_steps, self._middle, self._continues = 0, first.step, False
        # At the beginning, and at the last replay because of overflows.
        self._first = self._seen = first
        self._overflow_replays = self._stuck_replays = 0
        self._zero_share, self._last_step = 0.0, 0  # of the last replay without an overflow
        self._has_differed = False  # in a comparison
        self._curable_in_a_row = 0  # the last comparisons that layers in float32 would cure
        self._format_comparisons = 0  # with the other 16-bit format

    def plan(self, step: int, planned_steps: int, *, continues: bool) -> None:
        """Plans a training, or another part of one.

        Args:
            step: The step at which it begins.
            planned_steps: The number of steps; 0 if that is not known.
            continues: Whether it is another part.
        """
        self._planned_steps, self._middle = planned_steps, step + planned_steps // 2
        self._continues = continues

    def is_overflow_due(self, snapshot: Snapshot, *, has_gradients: bool) -> bool:
        """Whether losses or gradients were not finite, in a row or often, since the last replay.

        Args:
            snapshot: The state of the optimizer.
            has_gradients: Whether a replay has gradients.
        """
        first, seen = self._first, self._seen
        losses = snapshot.nonfinite_loss_count - first.nonfinite_loss_count
        overflows = snapshot.overflow_count - first.overflow_count
        if self._overflow_replays >= _MOST_REPLAYS or not self.time.allows_overflow():
            return False
        if losses > 2 * (seen.nonfinite_loss_count - first.nonfinite_loss_count):
            return True
        count = overflows - losses
        is_new = count > 0 and overflows > 2 * (seen.overflow_count - first.overflow_count)
        is_often = snapshot.overflows_in_a_row >= _OVERFLOWS_IN_A_ROW or count >= _MANY_OVERFLOWS
        is_often |= snapshot.overflows_at_min_scale > seen.overflows_at_min_scale
        return has_gradients and is_new and (is_often or not self._scales_loss)

    def has_new_losses(self, snapshot: Snapshot) -> bool:
        """Whether losses were not finite since the last replay because of overflows."""
        return snapshot.nonfinite_loss_count > self._seen.nonfinite_loss_count

    def note_overflow(self, snapshot: Snapshot) -> None:
        """Notes a replay because of overflows."""
        self._overflow_replays += 1
        self._seen = snapshot

    def is_comparison_due(
        self, snapshot: Snapshot, number_format: FloatFormat, *, is_last: bool
    ) -> bool:
        """Whether to compare the precisions.

        Args:
            snapshot: The state of the optimizer.
            number_format: The number format that limits the model.
            is_last: Whether the training ends.
        """
        if snapshot.overflows_in_a_row or snapshot.step == self._last_step:
            return False
        if not self._last_step or (is_last and not self._continues):
            return True
        is_in_the_middle = self._last_step < self._middle <= snapshot.step
        is_in_the_middle &= not self._continues
        is_later = snapshot.step >= min(_COMPARED_AGAIN * self._last_step, self.next_proof)
        is_at_end = is_last and snapshot.step >= _COMPARED_AT_END * self._last_step
        is_wanted = is_later or is_at_end or is_in_the_middle
        if is_wanted and self.time.allows_comparison(self._has_differed, is_in_the_middle):
            return True
        share = _zero_share_of(snapshot, number_format)
        return share > _MORE_ZEROS and share >= self._zero_share + _MORE_ZEROS

    def is_format_due(self, snapshot: Snapshot, *, is_last: bool) -> bool:
        """Whether a replay passes its batch in the other 16-bit format too.

        In the first replay, and in one of the second half of the training if there is time; at its
        end if the number of steps is not known.
        """
        if not self._format_comparisons:
            return True
        is_in_second_half = self._first.step < self._middle <= snapshot.step
        is_wanted = self._format_comparisons == 1 and (is_in_second_half or is_last)
        return is_wanted and self.time.allows_as_much(self._has_differed)

    def note_format(self) -> None:
        """Notes a pass in the other 16-bit format."""
        self._format_comparisons += 1

    def note_zeros(self, snapshot: Snapshot, number_format: FloatFormat) -> None:
        """Notes how many gradients are zero, before a replay."""
        self._zero_share = max(self._zero_share, _zero_share_of(snapshot, number_format))

    def note_comparison(self, replay: Replay | None, number_format: FloatFormat) -> None:
        """Notes what a comparison has shown; `None` if it failed."""
        if replay is None:
            return
        is_harmful = soundness.is_harmful(replay, number_format)
        self._has_differed |= is_harmful
        is_curable = is_harmful and bool(replay.float32_layers)
        self._curable_in_a_row = self._curable_in_a_row + 1 if is_curable else 0

    def note_compared(self, step: int) -> None:
        """Notes the step of a comparison that no other attempt follows."""
        self._last_step = step

    @property
    def next_proof(self) -> float:
        """The step at which to compare again, because one more comparison may prove a cure.

        Inf if the last comparisons show nothing to prove, or are enough.
        """
        if not 0 < self._curable_in_a_row < thresholds.AGREEING_COMPARISONS:
            return math.inf
        return max(_COMPARED_SOON * self._last_step, self._last_step + _SOONEST)

    def takes_stuck(self) -> bool:
        """Whether to replay a batch of a training that is stuck once more, which it notes."""
        self._stuck_replays += 1
        return self._stuck_replays <= _MOST_STUCK_REPLAYS

    def most_examples(self, captured: CapturedBatch) -> int:
        """Returns of how many examples a comparison takes a small part of the training."""
        most = MOST_EXAMPLES
        if not self.time.allows_as_much(self._has_differed):
            most = _FEW_EXAMPLES
        # Of large examples, such as images for segmentation, the first comparison already takes as
        # long as several steps.
        tensors = keras.tree.flatten(captured.data)
        numbers = sum(math.prod(tensor.shape[1:]) for tensor in tensors)
        if self._planned_steps and not self._has_differed:
            of_training = self._planned_steps * captured.batch_size // _COMPARED_SHARE
            most = min(most, max(_FEWEST_EXAMPLES, _MANY_NUMBERS // max(1, numbers), of_training))
        return most


def _zero_share_of(snapshot: Snapshot, number_format: FloatFormat) -> float:
    """Returns the share of the sampled elements that are zero, and may not be in float32.

    0 without a finite sample, and in the formats that have the range of float32.
    """
    if snapshot.sample is None or number_format is not FLOAT16:
        return 0.0
    histogram = snapshot.sample.histogram
    if not histogram.total or not histogram.is_finite:
        return 0.0
    return histogram.zero_fraction
