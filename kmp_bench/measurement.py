"""Time and memory measurements.

The variants of a comparison run alternately, so that other load slows all of them. Memory and
large networks are measured in a separate process for each variant, one after another.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tensorflow as tf

_Name = TypeVar("_Name")
_Result = TypeVar("_Result")
Range = tuple[float, float]

MODES = {"graph": False, "XLA": True}


class MeasurementError(RuntimeError):
    """Raised if a measurement fails.

    Example:
    >>> from kmp_bench import MeasurementError
    >>> issubclass(MeasurementError, RuntimeError)
    True
    """


def xla_error() -> str | None:
    """Returns why XLA cannot compile a function on this machine; `None` if it can."""
    try:
        compiled = tf.function(tf.exp, jit_compile=True, autograph=False)
        compiled(tf.ones(8)).numpy()  # a number would be a constant
    except (tf.errors.OpError, NotImplementedError) as reason:
        return str(reason)
    return None


@dataclass(frozen=True)
class Measurement:
    """One result of a benchmark.

    Args:
        section: What was measured, such as `"throughput"`.
        case: The model or variables that it was measured on.
        mode: One of `MODES`; empty for what runs outside TensorFlow.
        variant: Which of the compared variants.
        value: The median over the rounds.
        unit: `"s"`, `"B"`, `"operations"`, or a rate: `"images/s"`, `"tokens/s"`, `"GFLOP/s"`.
        ratio: The median over the rounds of the ratio to the first variant. `None` for the first
            variant itself, and where a value of the first variant is 0: memory is, if the process
            has held more before.
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


def comparison(
    section: str, case: str, mode: str, values: Mapping[str, Sequence[float]], unit: str = "s"
) -> list[Measurement]:
    """Returns the medians of each variant over the rounds, and the ratios to the first variant."""
    first = next(iter(values.values()))
    results = []
    for variant, own in values.items():
        ratios = []
        if own is not first and all(first):
            ratios = [value / base for value, base in zip(own, first, strict=True)]
        result = Measurement(
            section,
            case,
            mode,
            variant,
            value=statistics.median(own),
            unit=unit,
            ratio=statistics.median(ratios) if ratios else None,
            value_range=_spread(own),
            ratio_range=_spread(ratios),
        )
        results.append(result)
    return results


def _spread(numbers: Sequence[float]) -> Range | None:
    return (min(numbers), max(numbers)) if len(numbers) > 1 else None


def alternate(
    functions: Mapping[_Name, Callable[[], _Result]], rounds: int
) -> dict[_Name, list[_Result]]:
    """Calls every function once in each round, and returns what each returned.

    A warm-up round comes first, whose results are dropped.
    """
    results: dict[_Name, list[_Result]] = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            results[name].append(function())
    return {name: own[1:] for name, own in results.items()}


def seconds_per_call(function: Callable[[], Any], calls: int = 1) -> float:
    """Returns the mean seconds of a call."""
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - begin) / calls


def in_new_process(function: Callable[..., _Result], *args: Any) -> _Result:
    """Returns what a function of a module returns in a new process.

    Raises:
        MeasurementError: If it raises an error, or the process is killed, as it is if memory runs
            out.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *args).result()
        except BrokenProcessPool as error:
            raise MeasurementError(
                f"The process of {function.__name__}{args} was killed."
            ) from error
        except Exception as error:
            raise MeasurementError(
                f"{function.__name__}{args} failed: {type(error).__name__}: {error}"
            ) from error


def reset_peak_memory() -> None:
    """Resets the peak of GPU memory to what is in use now.

    The peak of host memory cannot be reset.
    """
    if tf.config.list_physical_devices("GPU"):
        tf.config.experimental.reset_memory_stats("GPU:0")


def memory_in_use() -> int | None:
    """Returns the bytes that are in use on the first GPU; `None` on a CPU."""
    if tf.config.list_physical_devices("GPU"):
        return int(tf.config.experimental.get_memory_info("GPU:0")["current"])
    return None


def peak_memory() -> int:
    """Returns the peak memory of this process in bytes: on the first GPU, or else on the host.

    It is `VmHWM` of `/proc/self/status`: `ru_maxrss` also covers the process that started this one.
    """
    if tf.config.list_physical_devices("GPU"):
        return int(tf.config.experimental.get_memory_info("GPU:0")["peak"])
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
