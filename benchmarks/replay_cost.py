"""What does it take to replay a batch, which the callbacks do at a few steps of each run?

    python benchmarks/replay_cost.py [--quick] [--json FILE]

Time of a replay of 32 examples in training steps of the same model, and peak memory of the process
with and without.
"""

import functools

from measuring import main

from kmp.callbacks.batch_replayer import CRITERIA
from kmp.guarding.guarded_step import guarded_step_of
from kmp.replay import Passes, StepContext, replay_batch
from kmp_bench.measurement import (
    alternate,
    comparison,
    in_new_process,
    peak_memory,
    seconds_per_call,
)
from kmp_bench.models import OURS, compiled_model, convolutional, mlp, timed_training, transformer

STEP, FINITE, OVERFLOWING = "training step", "replay", "replay of an overflow"
BOTH_FORMATS = "replay in float16 and bfloat16"
MODELS = {
    "MLP": (mlp, 512),
    "conv net": (convolutional, 32),
    "transformer block": (transformer, 128),
}
EXAMPLES = 32
LARGE = 1e4  # times the inputs, with which a product exceeds 65504


def measure(is_quick):
    """Yields time and peak memory for each model."""
    rounds = 1 if is_quick else 5
    for name in list(MODELS)[: 1 if is_quick else None]:
        task, model, batch = trained(name)
        variants = {
            STEP: timed_training(model, task, 10),
            FINITE: functools.partial(seconds_of_replay, model, batch),
            BOTH_FORMATS: functools.partial(seconds_of_replay, model, batch, compares_formats=True),
        }
        if batch[0].dtype.kind == "f":
            variants[OVERFLOWING] = functools.partial(
                seconds_of_replay, model, (batch[0] * LARGE, batch[1])
            )
        yield comparison("replay: time", name, "graph", alternate(variants, rounds))
        peaks = {variant: [in_new_process(memory_of, name, variant)] for variant in (STEP, FINITE)}
        yield comparison("replay: peak memory", name, "graph", peaks, "B")


def memory_of(name, variant):
    """Returns the bytes that training and a replay add to the peak memory.

    Call it in a new process.
    """
    before = peak_memory()
    _, model, batch = trained(name)
    if variant == FINITE:
        seconds_of_replay(model, batch)
    return peak_memory() - before


def trained(name):
    """Returns the task of a model, the model after a step, and a batch to replay."""
    make_task, width = MODELS[name]
    task = make_task(width)
    model = compiled_model(task, "mixed_float16", OURS, "graph")
    timed_training(model, task, 1)()
    return task, model, (task.x[:EXAMPLES], task.y[:EXAMPLES])


def seconds_of_replay(model, batch, *, compares_formats=False):
    """Returns the seconds of a replay."""
    variables = {variable.path: variable for variable in model.trainable_variables}
    passes = Passes(model, batch, guarded_step_of(model).graphs[None][0], variables)
    context = StepContext(1, 2.0**15, compares_formats=compares_formats)
    return seconds_per_call(lambda: replay_batch(passes, context, CRITERIA))


if __name__ == "__main__":
    main(measure, __doc__)
