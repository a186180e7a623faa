"""Time and memory measurements. The variants of a comparison run alternately, so that other load slows all of them.

Memory and large networks are measured in a separate process for each variant, one after another.
"""

import functools
import statistics as averages
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

_Name = TypeVar("_Name")
_Result = TypeVar("_Result")
Range = tuple[float, float]


class MeasurementError(RuntimeError):
    """A measurement failed."""


@dataclass(frozen=True)
class Measurement:
    """One result of a benchmark.

    Args:
        section: What was measured, such as `"optimizer step"`.
        case: The model or variables that it was measured on.
        mode: `"graph"` or `"XLA"`; empty for what runs outside TensorFlow.
        variant: Which of the compared variants.
        value: The median over the rounds, or over the processes.
        unit: `"s"`, `"B"`, or a rate: `"images/s"`, `"tokens/s"`.
        ratio: The median over the rounds of the ratio to the first variant. `None` for the first variant itself, and
            where a value of the first variant is 0: memory is, if the process has held more before.
        value_range: The smallest and the largest value. `None` if there is only one.
        ratio_range: The smallest and the largest ratio. `None` if there is at most one.
    """

    section: str
    case: str
    mode: str
    variant: str
    value: float
    unit: str
    ratio: float | None
    value_range: Range | None = None
    ratio_range: Range | None = None


def seconds_per_call(function: Callable[[], Any], calls: int = 1) -> float:
    """Returns the mean seconds of a call."""
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - begin) / calls


def alternate(functions: Mapping[_Name, Callable[[], _Result]], repeats: int) -> dict[_Name, list[_Result]]:
    """Returns what each function returned in each round. A round calls every function once.

    Args:
        functions: The functions, by the name of the variant.
        repeats: Number of rounds, without the warm-up round.
    """
    rounds = [{name: function() for name, function in functions.items()} for _ in range(repeats + 1)][1:]
    return {name: [results[name] for results in rounds] for name in functions}


def measure_alternately(
    variants: Mapping[str, Callable[[], Any]],
    repeats: int,
    clock: Callable[[Callable[[], Any]], float] = seconds_per_call,
) -> dict[str, list[float]]:
    """Returns the seconds of each variant in each round.

    Args:
        variants: The functions to measure, by name.
        repeats: As in `alternate`.
        clock: Runs one of the functions and returns its seconds.
    """
    return alternate({name: functools.partial(clock, function) for name, function in variants.items()}, repeats)


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
        _median(section, case, mode, variant, own, unit, [] if own is first else _ratios(own, first))
        for variant, own in values.items()
    ]


def over_processes(processes: Sequence[Sequence[Measurement]]) -> list[Measurement]:
    """Returns the medians and ranges, over several processes, of the results that each measured of one comparison."""
    return [_over_processes(same) for same in zip(*processes, strict=True)]


def _over_processes(same: Sequence[Measurement]) -> Measurement:
    one = same[0]
    ratios = [result.ratio for result in same if result.ratio is not None]
    return _median(one.section, one.case, one.mode, one.variant, [result.value for result in same], one.unit, ratios)


def _median(
    section: str, case: str, mode: str, variant: str, values: Sequence[float], unit: str, ratios: Sequence[float]
) -> Measurement:
    ratio = averages.median(ratios) if ratios else None
    value = averages.median(values)
    return Measurement(section, case, mode, variant, value, unit, ratio, _range(values), _range(ratios))


def _ratios(values: Sequence[float], first: Sequence[float]) -> list[float]:
    if not all(first):
        return []
    return [value / reference for value, reference in zip(values, first, strict=True)]


def _range(values: Sequence[float]) -> Range | None:
    return (min(values), max(values)) if len(values) > 1 else None


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
