"""What does sampling gradients cost?

    python benchmarks/sampling_cost.py [--quick] [--json FILE]

The statistics on the device, relative to `tf.summary.histogram`, and what sampling adds to the
first call and, on average at its default interval, to a step of Adam.
"""

import statistics
import tempfile

import tensorflow as tf
from measuring import SampledStep, Step, main, modes_of, shapes_of

from kmp.callbacks.sample_schedule import UPDATES_EVERY
from kmp.gradients.tensor_statistics import gradient_statistics
from kmp_bench.measurement import alternate, comparison, seconds_per_call
from kmp_bench.models import OURS

TENSORS = 4


def measure(is_quick):
    """Yields the statistics, the first call and the step in each mode."""
    modes = modes_of(is_quick)
    yield from histograms(modes, side=512 if is_quick else 2048, rounds=5 if is_quick else 25)
    name = "8 of 512x512" if is_quick else "ResNet-50"
    for mode in modes:
        for step in (Step(OURS, [(2,)], mode), SampledStep([(2,)], mode)):
            step()  # excludes what happens once per process
        pairs = []
        for _ in range(1 if is_quick else 5):
            plain, sampled = Step(OURS, shapes_of(name), mode), SampledStep(shapes_of(name), mode)
            pairs.append((plain.seconds(), sampled.seconds()))
        first_calls = dict(
            zip(("not sampled", "sampled"), map(list, zip(*pairs, strict=True)), strict=True)
        )
        yield comparison("sampling: first call", f"Adam, {name}", mode, first_calls)
        steps = steps_of(plain, sampled, 5 if is_quick else 25)
        yield comparison("sampling: step, on average", f"Adam, {name}", mode, steps)


def histograms(modes, side, rounds):
    """Yields the seconds of the statistics of gradients in each mode."""
    gradients = [
        tf.random.normal((side, side)) * 10.0 ** tf.random.uniform((side, side), -8, 0)
        for _ in range(TENSORS)
    ]
    writer = tf.summary.create_file_writer(tempfile.mkdtemp())

    def summarize():
        with writer.as_default(step=0):
            for gradient in gradients:
                tf.summary.histogram("gradient", gradient)

    for mode, jit_compile in modes.items():
        count = tf.function(lambda: gradient_statistics(gradients).counts, jit_compile=jit_compile)
        every = tf.function(lambda: tuple(gradient_statistics(gradients)), jit_compile=jit_compile)
        functions = {
            "tf.summary.histogram": summarize,
            "histogram": lambda count=count: count().numpy(),
            "with amax and norm": lambda every=every: tf.nest.map_structure(
                lambda tensor: tensor.numpy(), every()
            ),
        }
        timed = {name: lambda own=own: seconds_per_call(own) for name, own in functions.items()}
        yield comparison(
            "sampling: statistics", f"{TENSORS} of {side}x{side}", mode, alternate(timed, rounds)
        )
    writer.close()


def steps_of(plain, sampled, rounds):
    """Returns the seconds of a step, without sampling and with it.

    The median without, and that plus what sampling adds on average.
    """

    def update():
        sampled.arm()
        return sampled.measure_update()

    parts = {
        "step": plain,
        "between": sampled,
        "sample": sampled.sampled,
        "read": sampled.record,
        "update": update,
    }
    timed = {name: lambda own=own: seconds_per_call(own) for name, own in parts.items()}
    median = {
        name: statistics.median(seconds) for name, seconds in alternate(timed, rounds).items()
    }
    added = median["sample"] - median["between"] + median["read"] + median["update"] / UPDATES_EVERY
    return {
        "not sampled": [median["step"]],
        "sampled": [median["step"] + added / sampled.owner.every_n_steps],
    }


if __name__ == "__main__":
    main(measure, __doc__)
