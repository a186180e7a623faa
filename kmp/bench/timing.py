"""Time and memory measurements. The variants of a comparison run alternately, so that other load slows all of them.

Memory and large networks are measured in a separate process for each variant, one after another.
"""

import statistics as averages
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class MeasurementError(RuntimeError):
    """A measurement failed."""


@dataclass(frozen=True)
class Measurement:
    """One result of a benchmark.

    Args:
        section: What was measured, such as `"optimizer step"`.
        case: The model or variables that it was measured on.
        mode: `"graph"` or `"XLA"`.
        variant: Which of the compared variants.
        value: The median.
        unit: `"s"`, `"B"`, or a rate: `"images/s"`, `"tokens/s"`.
        ratio: The median over the rounds of the ratio to the first variant. `None` for the first variant itself, and
            where a value of the first variant is 0: memory is, if the process has held more before.
    """

    section: str
    case: str
    mode: str
    variant: str
    value: float
    unit: str
    ratio: float | None


def seconds_per_call(function: Callable[[], Any], calls: int = 1) -> float:
    """Returns the mean seconds of a call."""
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - begin) / calls


def measure_alternately(
    variants: Mapping[str, Callable[[], Any]],
    repeats: int,
    clock: Callable[[Callable[[], Any]], float] = seconds_per_call,
) -> dict[str, list[float]]:
    """Returns the seconds of each variant in each round. A round runs every variant once.

    Args:
        variants: The functions to measure, by name.
        repeats: Number of rounds, without the warm-up round.
        clock: Runs one of the functions and returns its seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(repeats + 1):
        for name, function in variants.items():
            elapsed = clock(function)
            if turn:
                seconds[name].append(elapsed)
    return seconds


def comparison(
    section: str, case: str, mode: str, values: Mapping[str, Sequence[float]], unit: str = "s"
) -> list[Measurement]:
    """Returns the medians, and the ratios to the first variant.

    Args:
        section: As in `Measurement`.
        case: As in `Measurement`.
        mode: As in `Measurement`.
        values: The values of each variant, one per round. The others are compared with the first variant.
        unit: As in `Measurement`.
    """
    first = next(iter(values.values()))
    return [
        Measurement(
            section, case, mode, variant, averages.median(own), unit, None if own is first else _ratio(own, first)
        )
        for variant, own in values.items()
    ]


def _ratio(values: Sequence[float], first: Sequence[float]) -> float | None:
    if not all(first):
        return None
    return averages.median(value / reference for value, reference in zip(values, first, strict=True))


def reset_peak_memory() -> None:
    """Resets the peak of GPU memory to what is in use now. The peak of host memory cannot be reset."""
    import tensorflow as tf

    if tf.config.list_physical_devices("GPU"):
        tf.config.experimental.reset_memory_stats("GPU:0")


def peak_memory() -> int:
    """Returns the peak memory of this process in bytes: on the first GPU, or on the host if there is none.

    On Linux it is `VmHWM` of `/proc/self/status`: `ru_maxrss` also covers the process that started this one.
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
