"""How many operations do loss scaling and callbacks add to a training step in graph mode?

    python benchmarks/step_operations.py [--quick] [--json FILE]

On a GPU, each operation that computes is a kernel launch, so their number is what a small step
costs. Bookkeeping operations are counted in the optimized graph, also in branches that are not
taken.
"""

from collections import Counter
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from measuring import WITH_CALLBACKS, main
from operation_trace import executed_operations, optimized_graphs

from kmp import callbacks, layers
from kmp_bench.measurement import MeasurementError, comparison
from kmp_bench.models import BARE, KERAS, OURS, Task, compiled_model

VARIANTS = (BARE, KERAS, OURS, WITH_CALLBACKS)
BOOKKEEPING = ("ReadVariableOp", "Identity", "IdentityN", "Switch", "Merge", "If", "StatelessIf")
CALLS = ATTEMPTS = 10


class Shape(NamedTuple):
    """The layers of a model, with two variables in each.

    `Dense` layers, a last one included, and `BatchNormalization`.
    """

    dense: int
    norms: int


SHAPES = SMALL, MORE_NORMS, MORE_DENSE = Shape(5, 4), Shape(5, 8), Shape(9, 4)


def measure(is_quick):
    """Yields the operations of each variant, then what each adds to the bare step."""
    variants = VARIANTS[::3] if is_quick else VARIANTS
    counts = {
        variant: {shape: operations(variant, shape) for shape in SHAPES} for variant in variants
    }
    for shape in SHAPES:
        case = f"{shape.dense} Dense, {shape.norms} BatchNormalization"
        for index, name in enumerate(("computing", "bookkeeping")):
            values = {variant: [own[shape][index]] for variant, own in counts.items()}
            yield comparison(f"{name} operations of a step", case, "graph", values, "operations")
    for index, case in enumerate(
        ("in every model", "for each BatchNormalization", "for each other variable")
    ):
        values = {variant: [added(own, counts[BARE])[index]] for variant, own in counts.items()}
        yield comparison("computing operations added", case, "graph", values, "operations")


def added(counts, bare):
    """Returns what a variant adds to the computing operations of the bare step.

    It is computed from the counts of `SHAPES`.

    Returns:
        The number in every model, for each `BatchNormalization` with its two variables, and for
        each other variable.
    """
    above = {shape: counts[shape][0] - bare[shape][0] for shape in SHAPES}
    per_norm = (above[MORE_NORMS] - above[SMALL]) / (MORE_NORMS.norms - SMALL.norms)
    per_variable = (above[MORE_DENSE] - above[SMALL]) / (2 * (MORE_DENSE.dense - SMALL.dense))
    return (
        above[SMALL] - SMALL.norms * per_norm - 2 * SMALL.dense * per_variable,
        per_norm,
        per_variable,
    )


def operations(variant, shape):
    """Returns the numbers of computing and of bookkeeping operations in a step without a sample.

    Raises:
        MeasurementError: If steps in a row differ in what they run.
    """
    batch, width = 32, 8
    x = np.random.default_rng(0).normal(size=(batch, width)).astype("float32")

    def build():
        dense = [keras.layers.Dense(width, activation="relu") for _ in range(shape.dense - 1)]
        norms = [keras.layers.BatchNormalization() for _ in range(shape.norms)]
        return keras.Sequential(
            [keras.Input((width,)), *dense, *norms, keras.layers.Dense(10), layers.Softmax()]
        )

    task = Task(build, x, np.arange(batch) % 10, "images/s", batch)
    model = compiled_model(task, "float32", OURS if variant == WITH_CALLBACKS else variant, "graph")
    with optimized_graphs() as graphs:
        extra = callbacks.defaults() if variant == WITH_CALLBACKS else []
        model.fit(task.x, task.y, batch_size=batch, verbose=0, callbacks=extra)
    graph = max((Counter(node.op for node in graph.node) for graph in graphs), key=Counter.total)
    iterator = iter(tf.data.Dataset.from_tensors((task.x, task.y)).repeat())
    model.train_function(iterator)
    for _ in range(ATTEMPTS):
        first, *others = executed_operations(lambda: model.train_function(iterator), CALLS)
        if len(others) == CALLS - 1 and all(other == first for other in others):
            return first.total() - sum(first[name] for name in BOOKKEEPING), sum(
                graph[name] for name in BOOKKEEPING
            )
    raise MeasurementError(
        f"In {ATTEMPTS} attempts, {CALLS} steps in a row did not run the same operations."
    )


if __name__ == "__main__":
    tf.config.set_visible_devices([], "GPU")  # the operations that the CPU runs are counted
    main(measure, __doc__)
