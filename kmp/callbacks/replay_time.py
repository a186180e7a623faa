"""The time that the replays of a training may take."""

import contextlib
import time
from collections.abc import Iterator

_MOST_SECONDS = 8.0  # of one replay, or more in a long training
_SHARE = 0.02  # of the time of a training, for one replay
_LONG = 0.4  # times `_MOST_SECONDS`
# The time of comparisons while all agree, beside the first and the last one.
_FREE_SECONDS = 0.25
_FREE_SHARE = 0.01  # of the time of a training, in addition
_MIDDLE_SHARE = 0.05  # the same with the one in the middle, which may lead to a repair


class _Spent:
    """The seconds that replays of one kind have taken.

    Attributes:
        seconds: Of all.
        last: Of the last one, without what is not repeated.
        once: Of this one so far, what is not repeated.
    """

    def __init__(self) -> None:
        self.seconds = self.last = self.once = 0.0

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measures a replay."""
        began, self.once = time.monotonic(), 0.0
        try:
            yield
        finally:
            self.last = time.monotonic() - began - self.once
            self.seconds += self.last

    @property
    def with_another(self) -> float:
        """The seconds after one more replay like the last one."""
        return self.seconds + self.last


class ReplayTime:
    """The time that the replays of a training have taken, and may take.

    Attributes:
        of_comparisons: Of replays of batches that were trained.
        of_overflows: Of replays of batches of skipped steps.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.of_comparisons = _Spent()
        self.of_overflows = _Spent()

    @property
    def most_seconds(self) -> float:
        """The seconds that one replay may take."""
        return max(_MOST_SECONDS, _SHARE * self._elapsed)

    @staticmethod
    def is_long(seconds: float) -> bool:
        """Whether a replay takes so long that the next ones have to take less."""
        return seconds > _LONG * _MOST_SECONDS

    def allows_overflow(self) -> bool:
        """Whether there is time for another replay of a skipped step."""
        return self.of_overflows.with_another <= 2 * self.most_seconds

    def allows_comparison(self, has_differed: bool, is_in_the_middle: bool) -> bool:
        """Whether there is time for another comparison, beside the first and the last one.

        Args:
            has_differed: Whether a comparison has shown that the precisions differ.
            is_in_the_middle: Whether the training has come to its middle.
        """
        if has_differed:
            return self.of_comparisons.seconds <= _MOST_SECONDS + _SHARE * self._elapsed
        share = _MIDDLE_SHARE if is_in_the_middle else _FREE_SHARE
        return self.of_comparisons.with_another <= self._free(share)

    def allows_as_much(self, has_differed: bool) -> bool:
        """Whether a comparison like the last one takes a small part of the training until now.

        Args:
            has_differed: As in `allows_comparison`.
        """
        return has_differed or self.of_comparisons.last <= self._free(_FREE_SHARE)

    def _free(self, share: float) -> float:
        return _FREE_SECONDS + share * self._elapsed

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began
