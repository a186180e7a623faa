"""Measuring: ways to do the same thing take turns, so that a busy machine slows all of them alike.

What needs a process of its own does not take turns: memory, and large networks.
"""

import statistics as averages
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class MeasurementError(RuntimeError):
    """Something could not be measured."""


@dataclass(frozen=True)
class Measured:
    """One figure of a benchmark.

    Args:
        section: What was measured, such as `"optimizer step"`.
        case: What it was measured on.
        mode: `"graph"` or `"XLA"`.
        way: Which of the ways that took turns.
        value: The median.
        unit: `"s"`, `"B"`, or what there is more of in a second: `"images/s"`, `"tokens/s"`.
        ratio: The median ratio to the first of the ways, taken turn by turn; `None` for the first itself, and where
            that is 0, as memory is that does not rise above what the process once held.
    """

    section: str
    case: str
    mode: str
    way: str
    value: float
    unit: str
    ratio: float | None


def seconds_of(function: Callable[[], Any], calls: int = 1) -> float:
    """Returns how long a call takes, on average of so many."""
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - begin) / calls


def take_turns(
    ways: Mapping[str, Callable[[], Any]], repeats: int, clock: Callable[[Callable[[], Any]], float] = seconds_of
) -> dict[str, list[float]]:
    """Returns the seconds of each way in each turn.

    Args:
        ways: What to measure, by name.
        repeats: How many turns each way gets, after one that does not count.
        clock: Takes a way, returns its seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            taken = clock(way)
            if turn:
                seconds[name].append(taken)
    return seconds


def compared(
    section: str, case: str, mode: str, found: Mapping[str, Sequence[float]], unit: str = "s"
) -> list[Measured]:
    """Returns medians, and ratios to the first way.

    Args:
        section: As in `Measured`.
        case: As in `Measured`.
        mode: As in `Measured`.
        found: Figures of each way, turn by turn; the first way is what the others are compared with.
        unit: As in `Measured`.
    """
    first = next(iter(found.values()))
    return [
        Measured(
            section, case, mode, way, averages.median(values), unit, None if values is first else _ratio(values, first)
        )
        for way, values in found.items()
    ]


def _ratio(values: Sequence[float], first: Sequence[float]) -> float | None:
    if not all(first):
        return None
    return averages.median(value / reference for value, reference in zip(values, first, strict=True))


def forget_peak() -> None:
    """Has `peak_memory` start from what is held now, on a GPU; what a process held on the host cannot be forgotten."""
    import tensorflow as tf

    if tf.config.list_physical_devices("GPU"):
        tf.config.experimental.reset_memory_stats("GPU:0")


def peak_memory() -> int:
    """Returns the bytes of memory that this process has held at most; on a GPU, those of the first GPU.

    Linux' own count of a process tells it from the one that started it, which `ru_maxrss` does not.
    """
    import tensorflow as tf

    if tf.config.list_physical_devices("GPU"):
        return int(tf.config.experimental.get_memory_info("GPU:0")["peak"])
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
