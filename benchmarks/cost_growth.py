"""How do the costs of a step and of a sample grow with the number of variables, and of replicas?

    python benchmarks/cost_growth.py [--quick] [--json FILE]

A cost is per variable (or per replica), and a ratio is to that of the smallest number: 1 or less is
at most linear growth. The first call is measured once, because it takes minutes with thousands of
variables. XLA compiles at most 500 variables. Replicas are virtual ones on the CPU, each number in
a new process.
"""

import functools

import tensorflow as tf
from measuring import SampledStep, Step, main, modes_of, per_unit, shapes_of

from kmp_bench.measurement import alternate, in_new_process, seconds_per_call
from kmp_bench.models import BARE, OURS

MOST_UNDER_XLA = 500
REPLICATED = 50  # variables


def measure(is_quick):
    """Yields each cost for the numbers of variables, then the step for the numbers of replicas."""
    rounds = 2 if is_quick else 25
    for mode in modes_of(is_quick):
        counts = (10, 40) if is_quick else (50, 500, 2000, 5000)
        if mode == "XLA":
            counts = [count for count in counts if count <= MOST_UNDER_XLA]
        yield from costs_of_variables(counts, mode, rounds)
    replicas = (2,) if is_quick else (1, 2, 4)
    processes = [in_new_process(seconds_of_replicas, number, rounds) for number in replicas]
    for variant in (BARE, OURS):
        values = {number: own[variant] for number, own in zip(replicas, processes, strict=True)}
        yield per_unit("replica", f"Adam step, {variant}", "graph", values)


def costs_of_variables(counts, mode, rounds):
    """Yields what training with some numbers of variables costs: first calls, steps and samples."""
    for step in (Step(BARE, shapes_of("2 small"), mode), SampledStep(shapes_of("2 small"), mode)):
        step()  # excludes what happens once per process
    for name, make in (("bare", functools.partial(Step, BARE)), ("kmp", SampledStep)):
        steps = {count: make(shapes_of(f"{count} small"), mode) for count in counts}
        yield per_unit(
            "variable",
            f"first call, {name}",
            mode,
            {n: [step.seconds()] for n, step in steps.items()},
        )
        seconds = alternate({count: step.seconds for count, step in steps.items()}, rounds)
        yield per_unit("variable", f"Adam step, {name}", mode, seconds)
    samples = alternate(
        {count: functools.partial(added_by_sample, step) for count, step in steps.items()}, rounds
    )
    yield per_unit("variable", "sample", mode, samples)


def added_by_sample(step):
    """Returns the seconds that a sample adds to a step, read and written into the log."""
    without = step.seconds()
    return seconds_per_call(step.sampled) - without + seconds_per_call(step.record)


def seconds_of_replicas(replicas, rounds):
    """Returns the seconds of a step of each variant in each round.

    Call it in a new process, in which the devices have not started.
    """
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * replicas
    )
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
