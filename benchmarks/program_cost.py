"""What does a pass over a batch cost, beside the first step of a training?

    python benchmarks/program_cost.py [MODEL ...] [--xla] [--batch N]

A comparison makes two programs of a training, one in each precision, that run operation by
operation; where these show harm, two that are optimized and compiled as the training is. Later ones
run them again. Seconds of processor time, for both precisions together.
"""

import argparse
import time
from dataclasses import replace

from measuring import tf  # sets what TensorFlow reads when it is imported
from rich.console import Console
from rich.table import Table
from step_models import MODELS, step_model

import kmp
from kmp.guarding.guarded_step import guarded_step_of
from kmp.replay import Passes

COLUMNS = ("first step", "passes", "again", "as trained", "again")


def costs(name, batch, jit_compile):
    """Returns the seconds of `COLUMNS` for one of `MODELS`."""
    with kmp.enable():
        model, labels, loss = step_model(name)
        model.compile("adam", loss, jit_compile=jit_compile)
    tensors = [_numbers((batch, *each.shape[1:]), each.dtype) for each in model.inputs]
    data = (
        tensors[0] if len(tensors) == 1 else tensors,
        _numbers((batch, *labels.shape), labels.dtype),
    )
    spent = [_seconds(lambda: model.fit(*data, batch_size=batch, verbose=0))]
    variables = {variable.path: variable for variable in model.trainable_variables}
    passes = Passes(model, data, guarded_step_of(model).graphs[None][0], variables)
    as_trained = replace(passes, as_trained=True)
    for computing in (passes, passes, as_trained, as_trained):
        spent.append(_seconds(computing.in_float32) + _seconds(computing.in_own_precision))
    return spent


def _numbers(shape, dtype):
    if tf.as_dtype(dtype).is_integer:
        return tf.random.uniform(shape, 0, 2, dtype)
    return tf.random.normal(shape, dtype=dtype)


def _seconds(run):
    began = time.process_time()
    run()
    return time.process_time() - began


def main(arguments=None):
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--xla", action="store_true", help="compile the training with XLA")
    parser.add_argument("--batch", type=int, default=2)
    chosen = parser.parse_args(arguments)
    table = Table("model", *COLUMNS)
    for name in chosen.models or ["small"]:
        row = costs(name, chosen.batch, chosen.xla)
        table.add_row(name, *(f"{each:.1f} s" for each in row))
    Console().print(table)


if __name__ == "__main__":
    main()
