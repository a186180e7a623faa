"""How does each cost grow with the number of variables, and of replicas?

    python benchmarks/cost_growth.py [--quick] [--json FILE]

A ratio is the cost per variable (or per replica) relative to that of the smallest number: 1 or less is at most linear
growth. The first call is measured once, because it takes minutes with thousands of variables. XLA compiles at most
500 variables. Replicas are virtual ones on the CPU, each number in a new process.
"""

import functools
import tempfile
from dataclasses import replace
from pathlib import Path

import tensorflow as tf
from measuring import SampledStep, Step, main, modes_of, record_of, shapes_of

from kmp import advise, load_run
from kmp.bench.measurement import alternate, comparison, in_new_process, seconds_per_call
from kmp.bench.models import BARE, OURS
from kmp.records import FILE_NAME, SCHEMA, to_line

MOST_UNDER_XLA = 500
REPLICATED = 50  # variables
SAMPLES, INTERVAL = 20, 250  # in a log, and steps between two


def measure(is_quick):
    """Yields each cost for the numbers of variables, then the step for the numbers of replicas."""
    rounds = 2 if is_quick else 25
    for mode in modes_of(is_quick):
        counts = [
            n for n in ((10, 40) if is_quick else (50, 500, 2000, 5000)) if mode == "graph" or n <= MOST_UNDER_XLA
        ]
        yield from costs_of_variables(counts, mode, rounds)
    replicas = (1, 2) if is_quick else (1, 2, 4)
    processes = [in_new_process(seconds_of_replicas, number, rounds) for number in replicas]
    for variant in (BARE, OURS):
        values = {number: own[variant] for number, own in zip(replicas, processes, strict=True)}
        yield per_unit("replica", f"Adam step, {variant}", "graph", values)


def costs_of_variables(counts, mode, rounds):
    """Yields what training with some numbers of variables costs: steps, samples and, in graph mode, logs."""
    for step in (Step(BARE, shapes_of("2 small"), mode), SampledStep(shapes_of("2 small"), mode)):
        step()  # excludes what happens once per process
    for name, make in (("bare", functools.partial(Step, BARE)), ("kmp", SampledStep)):
        steps = {count: make(shapes_of(f"{count} small"), mode) for count in counts}
        yield per_unit("variable", f"first call, {name}", mode, {n: [step.seconds()] for n, step in steps.items()})
        seconds = alternate({count: step.seconds for count, step in steps.items()}, rounds)
        yield per_unit("variable", f"Adam step, {name}", mode, seconds)
    samples = alternate({count: functools.partial(added_by_sample, step) for count, step in steps.items()}, rounds)
    yield per_unit("variable", "sample", mode, samples)
    if mode != "graph":
        return
    with tempfile.TemporaryDirectory() as folder:
        logs = {count: Path(folder, str(count)) for count in counts}
        sizes = {count: [write_log(logs[count], step)] for count, step in steps.items()}
        yield per_unit("variable", "sample in the log", "", sizes, "B")
        for name, function in (("load_run", load_run), ("advise", lambda log: advise(load_run(log)))):
            seconds = alternate({n: functools.partial(seconds_of, function, log) for n, log in logs.items()}, rounds)
            yield per_unit("variable", f"{name}, {SAMPLES} samples", "", seconds)


def per_unit(unit, case, mode, values, value_unit="s"):
    """Returns a comparison whose ratios are those of the costs per variable, or per replica."""
    named = {f"{number:,} {unit}{'s' * (number > 1)}": own for number, own in values.items()}
    smallest = next(iter(values))
    results = []
    for number, result in zip(values, comparison(f"growth per {unit}", case, mode, named, value_unit), strict=True):
        spread = result.ratio_range and tuple(ratio * smallest / number for ratio in result.ratio_range)
        ratio = None if result.ratio is None else result.ratio * smallest / number
        results.append(replace(result, ratio=ratio, ratio_range=spread))
    return results


def added_by_sample(step):
    """Returns the seconds that sampling a step, and reading the sample into a line of the log, add to the step."""
    without = step.seconds()
    return seconds_per_call(step.sampled) - without + seconds_per_call(step.record)


def seconds_of(function, argument):
    """Returns the seconds of a call."""
    return seconds_per_call(lambda: function(argument))


def write_log(folder, step):
    """Writes the log of a run whose samples are the last one of the step; returns the bytes of a sample in it."""
    step.arm()
    step.sampled()
    with_update = step.measure_update()
    names = tuple(f"dense_{n // 2}/{'bias' if n % 2 else 'kernel'}" for n in range(len(with_update)))
    plain, with_update = (replace(sample, names=names) for sample in (step.last_sample(), with_update))
    settings = {"rule": "DynamicScale", "compute_dtypes": ["float16"]}
    lines, size = [to_line({"schema": SCHEMA, "kind": "header", "settings": settings})], 0
    for number in range(SAMPLES):
        at = INTERVAL * (number + 1)
        overflows = {"overflow_count": 1, "overflow_rate": 1 / at, "overflows_in_a_row": 0}
        by_variable = {"overflows_by_variable": dict.fromkeys(names, 1), "overflow_origins_by_variable": {names[-1]: 1}}
        lines.append(to_line({"step": at, "loss_scale": plain.loss_scale, "clean_steps": at - 1}))
        lines.append(to_line({"step": at} | overflows | by_variable))
        sample = plain if number % step.owner.updates_every else with_update
        lines.append(record_of(replace(sample, step=at)))
        size += len(lines[-1])
    folder.mkdir()
    (folder / FILE_NAME).write_text("".join(lines))
    return size / SAMPLES


def seconds_of_replicas(replicas, rounds):
    """Returns the seconds of a step of each variant in each round, in a new process: the devices have not started."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(replicas)])

    def run(function, gradients):
        # Keras adds gradients up on the devices that they were computed on. Arguments are on none.
        return strategy.run(lambda *own: function(*map(tf.identity, own)), gradients)

    with strategy.scope():
        shapes = shapes_of(f"{REPLICATED} small")
        steps = {variant: Step(variant, shapes, "graph", run=run) for variant in (BARE, OURS)}
        return alternate({variant: step.seconds for variant, step in steps.items()}, rounds)


if __name__ == "__main__":
    main(measure, __doc__)
