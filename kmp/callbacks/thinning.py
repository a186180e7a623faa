"""Bounds what is stored of a long run: the more there is, the fewer of the values that are due are stored."""

from collections.abc import Mapping
from typing import Any

from kmp.records import SAMPLE_KEYS, compact

COUNTS_KEYS = ("overflows_by_variable", "overflow_origins_by_variable")

_MOST_DOUBLINGS = 40
_COUNT_SIZE = 10


class Thinning:
    """Stores all values that are due until these fill a budget, then every second one until these fill it, and so on.

    So the size grows with the logarithm of the number of values. The size alone determines the stride: a resumed run
    needs no other state.

    Args:
        budget: Bytes after which the stride doubles.
    """

    def __init__(self, budget: int) -> None:
        self.size = 0  # bytes stored so far
        self._budget = budget
        self._values_due = 0

    @property
    def stride(self) -> int:
        """How many values are due for each that is stored; a power of two."""
        return int(2 ** min(self.size // self._budget, _MOST_DOUBLINGS))

    def stores_next(self) -> bool:
        """Counts a value that is due. Returns whether it is stored."""
        self._values_due += 1
        return (self._values_due - 1) % self.stride == 0


def sample_size(record: Mapping[str, Any]) -> int:
    """Returns the bytes of a record's samples in a log, without their names."""
    return sum(_text_size(compact(record[key])) for key in SAMPLE_KEYS if key in record)


def counts_size(record: Mapping[str, Any]) -> int:
    """Returns about the number of bytes of a record's counts by variable."""
    return sum(len(path) + _COUNT_SIZE for key in COUNTS_KEYS for path in record.get(key, ()))


def _text_size(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_text_size, value.values()))
    return len(value) if isinstance(value, str) else 0
