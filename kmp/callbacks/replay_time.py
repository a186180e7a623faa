"""The time that the replays of a training may take."""

import contextlib
import time
from collections.abc import Iterator

_MOST_SECONDS = 8.0  # of one replay, or more in a long training
_SHARE = 0.02  # of the time of a training, for one replay
_LONG = 0.4  # times `_MOST_SECONDS`
# The time of comparisons while all agree, beside the first, the middle and the last one.
_FREE_SECONDS = 0.7
_FREE_SHARE = 0.01  # of the time of a training, in addition


class _Spent:
    """The seconds that replays of one kind have taken: all, and the last one."""

    def __init__(self) -> None:
        self.seconds = self._last = 0.0

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measures a replay."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._last = time.monotonic() - began
            self.seconds += self._last

    @property
    def with_another(self) -> float:
        """The seconds after one more replay like the last one."""
        return self.seconds + self._last


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

    def allows_comparison(self, has_differed: bool) -> bool:
        """Whether there is time for another comparison that nothing else asks for.

        Args:
            has_differed: Whether a comparison has shown that the precisions differ.
        """
        if has_differed:
            return self.of_comparisons.seconds <= _MOST_SECONDS + _SHARE * self._elapsed
        free = _FREE_SECONDS + _FREE_SHARE * self._elapsed
        return self.of_comparisons.with_another <= free

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began
