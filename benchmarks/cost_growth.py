"""How each cost grows with the number of variables and of replicas.

A ratio is the cost per variable (or per replica) relative to that of the smallest number: 1 or less is at most linear
growth, and more than 1 is faster growth.
"""

import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import tensorflow as tf

from kmp.advice import advise
from kmp.bench.optimizer_step import BARE, MODES, OURS, make_step, many_small
from kmp.bench.sampling_cost import SampledTraining, Training, record_of, start_training
from kmp.bench.timing import Measurement, alternate, comparison, measure_alternately, seconds_per_call
from kmp.records import FILE_NAME, SCHEMA, GradientSample, load_run, to_line

PER_VARIABLE, PER_REPLICA = "growth, ratio of the cost per variable", "growth, ratio of the cost per replica"
MOST_UNDER_XLA = 500  # compiling more takes minutes
REPLICATED = 50  # variables
SAMPLES = 20  # in a log
_INTERVAL = 250  # steps between two samples
_VARIANTS = (BARE, OURS)
_SETTINGS = {"rule": "DynamicScale", "compute_dtypes": ["float16"]}
_HEADER = to_line({"schema": SCHEMA, "kind": "header", "settings": _SETTINGS})
_Item = TypeVar("_Item")


def measure_variables(counts: Sequence[int], repeats: int, turns: int) -> Iterator[list[Measurement]]:
    """Measures what training with some numbers of variables costs, and yields each comparison when it is done.

    The first call is measured once: with thousands of variables it takes minutes.

    Args:
        counts: Numbers of variables, the smallest first. XLA compiles at most `MOST_UNDER_XLA`.
        repeats: Rounds of steps.
        turns: Rounds of loading and analyzing a log.
    """
    for mode in MODES:
        measured = [count for count in counts if mode == "graph" or count <= MOST_UNDER_XLA]
        yield from _bare_steps(measured, mode, repeats)
        trainings = _trainings(measured, mode)
        yield _per_variable("first call, kmp", mode, {count: [own.first_call] for count, own in trainings.items()})
        sampled = {count: SampledTraining(own) for count, own in trainings.items()}
        steps = {count: own.step for count, own in trainings.items()}
        yield _per_variable("Adam step, kmp", mode, _alternate(steps, seconds_per_call, repeats))
        yield _per_variable("sample", mode, _alternate(sampled, _added_by_sample, repeats))
        if mode == "graph":
            yield from _logs(sampled, turns)


def _bare_steps(counts: Sequence[int], mode: str, repeats: int) -> Iterator[list[Measurement]]:
    make_step(BARE, "Adam", many_small(2), mode)()  # excludes what happens once per process
    steps = {count: make_step(BARE, "Adam", many_small(count), mode) for count in counts}
    yield _per_variable("first call, bare", mode, {count: [seconds_per_call(step)] for count, step in steps.items()})
    yield _per_variable("Adam step, bare", mode, _alternate(steps, seconds_per_call, repeats))


def _trainings(counts: Sequence[int], mode: str) -> dict[int, Training]:
    start_training(many_small(2), mode, True)  # excludes what happens once per process
    return {count: start_training(many_small(count), mode, True) for count in counts}


def _logs(trainings: Mapping[int, SampledTraining], turns: int) -> Iterator[list[Measurement]]:
    with tempfile.TemporaryDirectory() as folder:
        logs = {count: Path(folder, str(count)) for count in trainings}
        sizes = {count: [_write_log(logs[count], training)] for count, training in trainings.items()}
        yield _per_variable("sample in the log", "", sizes, "B")
        yield _per_variable(f"load_run, {SAMPLES} samples", "", _alternate(logs, _seconds_to_load, turns))
        yield _per_variable(f"advise, {SAMPLES} samples", "", _alternate(logs, _seconds_to_advise, turns))


def _alternate(items: Mapping[int, _Item], clock: Callable[[_Item], float], repeats: int) -> dict[int, list[float]]:
    return alternate({count: functools.partial(clock, item) for count, item in items.items()}, repeats)


def _added_by_sample(training: SampledTraining) -> float:
    """Returns the seconds that sampling a step, and reading the sample into a line of the log, add to the step."""
    without = seconds_per_call(training.step)
    return seconds_per_call(training.sampled_step) - without + seconds_per_call(training.record)


def _seconds_to_load(log: Path) -> float:
    return seconds_per_call(lambda: load_run(log))


def _seconds_to_advise(log: Path) -> float:
    run = load_run(log)
    return seconds_per_call(lambda: advise(run))


def _write_log(folder: Path, training: SampledTraining) -> float:
    """Writes the log of a run and returns the bytes of a sample in it."""
    training.sampled_step()
    plain, with_update = _in_layers(training.last_sample()), _in_layers(training.measure_update())
    counters, records = [], []
    for number in range(SAMPLES):
        sample, step = plain if number % training.updates_every else with_update, _INTERVAL * (number + 1)
        counters.append(_counters(sample, step))
        records.append(record_of(replace(sample, step=step)))
    folder.mkdir()
    (folder / FILE_NAME).write_text("".join([_HEADER, *itertools.chain(*zip(counters, records, strict=True))]))
    return sum(map(len, records)) / SAMPLES


def _in_layers(sample: GradientSample) -> GradientSample:
    """Returns the sample with the variables named as the kernel and bias of each layer."""
    return replace(sample, names=tuple(f"dense_{n // 2}/{'bias' if n % 2 else 'kernel'}" for n in range(len(sample))))


def _counters(sample: GradientSample, step: int) -> str:
    """Returns the lines of the loss scale and of the overflows before a sample: one overflow, of all variables."""
    scale = {"step": step, "loss_scale": sample.loss_scale, "clean_steps": step - 1}
    overflows = {"step": step, "overflow_count": 1, "overflow_rate": 1 / step, "overflows_in_a_row": 0}
    by_variable = {"overflows_by_variable": dict.fromkeys(sample.names, 1)}
    return to_line(scale) + to_line(overflows | by_variable | {"overflow_origins_by_variable": {sample.names[-1]: 1}})


def measure_replicas(
    replicas: Sequence[int], repeats: int, run_in_subprocess: Callable[[str], Any]
) -> Iterator[list[Measurement]]:
    """Measures an Adam step of `REPLICATED` variables on virtual CPU replicas, each number in a new process.

    Args:
        replicas: Numbers of replicas, the smallest first.
        repeats: Rounds of steps.
        run_in_subprocess: Evaluates an expression in a new process and returns its value.
    """
    seconds = {number: run_in_subprocess(f"growth.replica_seconds({number}, {repeats})") for number in replicas}
    for variant in _VARIANTS:
        values = {f"{number} replica{'s' * (number > 1)}": seconds[number][variant] for number in replicas}
        results = comparison(PER_REPLICA, f"Adam step, {variant}", "graph", values)
        yield _per_unit(results, replicas)


def replica_seconds(replicas: int, repeats: int) -> dict[str, list[float]]:
    """Returns the seconds of a step for each variant and round. Call it before TensorFlow has started its devices."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(replicas)])

    def run(function: Callable[..., Any], gradients: tuple[Any, ...]) -> Any:
        # Keras adds gradients up on the devices that they were computed on. Arguments are on none.
        return strategy.run(lambda *own: function(*map(tf.identity, own)), gradients)

    with strategy.scope():
        steps = {name: make_step(name, "Adam", many_small(REPLICATED), "graph", run) for name in _VARIANTS}
        return measure_alternately(steps, repeats)


def _per_variable(case: str, mode: str, values: Mapping[int, Sequence[float]], unit: str = "s") -> list[Measurement]:
    named = {f"{count:,} variables": own for count, own in values.items()}
    return _per_unit(comparison(PER_VARIABLE, case, mode, named, unit), list(values))


def _per_unit(results: Sequence[Measurement], numbers: Sequence[int]) -> list[Measurement]:
    """Returns results whose ratio to the first is that of the costs per variable, or per replica.

    Args:
        results: Results whose ratio is that of the whole costs.
        numbers: The number of variables or replicas of each result.
    """
    return [_scaled(result, numbers[0] / number) for result, number in zip(results, numbers, strict=True)]


def _scaled(result: Measurement, factor: float) -> Measurement:
    ratio = None if result.ratio is None else result.ratio * factor
    spread = result.ratio_range and (result.ratio_range[0] * factor, result.ratio_range[1] * factor)
    return replace(result, ratio=ratio, ratio_range=spread)
