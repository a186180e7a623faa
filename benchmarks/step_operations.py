"""What loss scaling and callbacks add to a training step in graph mode, in operations.

On a GPU, each operation that computes is a kernel launch, so the number of operations is what a small step costs.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kmp import callbacks, layers
from kmp.backend import operation_trace
from kmp.bench.optimizer_step import BARE, KERAS, OURS
from kmp.bench.small_models import WITH_CALLBACKS, Task, compiled_model
from kmp.bench.timing import Measurement, MeasurementError, comparison

VARIANTS = (BARE, KERAS, OURS, WITH_CALLBACKS)
BOOKKEEPING = ("ReadVariableOp", "Identity", "IdentityN", "Switch", "Merge", "If", "StatelessIf")
_CALLS = 10
_ATTEMPTS = 10


class Shape(NamedTuple):
    """The layers of the model whose steps are counted: `Dense` layers, a last one included, and `BatchNormalization`.

    Each layer has two trained variables.
    """

    dense: int
    norms: int


class Operations(NamedTuple):
    """The number of operations in a step.

    Attributes:
        computing: Those that run and are not in `BOOKKEEPING`.
        bookkeeping: Those in the optimized graph that are in `BOOKKEEPING`, also in branches that are not taken.
    """

    computing: int
    bookkeeping: int


class Added(NamedTuple):
    """What a variant adds to the computing operations of the bare step.

    Attributes:
        fixed: In every model.
        per_norm: For each `BatchNormalization`, with its two trained variables.
        per_variable: For each other trained variable.
    """

    fixed: float
    per_norm: float
    per_variable: float


SHAPES = SMALL, MORE_NORMS, MORE_DENSE = Shape(5, 4), Shape(5, 8), Shape(9, 4)


def measure() -> Iterator[list[Measurement]]:
    """Counts the operations of each variant, then derives what each adds to the computing ones."""
    counts: dict[str, dict[Shape, Operations]] = {variant: {} for variant in VARIANTS}
    for shape in SHAPES:
        for variant in VARIANTS:
            counts[variant][shape] = operations(variant, shape)
        case = f"{shape.dense} Dense, {shape.norms} BatchNormalization"
        for kind in Operations.__annotations__:
            values = {variant: [getattr(counts[variant][shape], kind)] for variant in VARIANTS}
            yield comparison(f"{kind} operations of a step", case, "graph", values, "operations")
    for part in Added.__annotations__:
        values = {variant: [getattr(added(counts[variant], counts[BARE]), part)] for variant in VARIANTS}
        yield comparison("computing operations added", part.replace("_", " "), "graph", values, "operations")


def added(counts: Mapping[Shape, Operations], bare: Mapping[Shape, Operations]) -> Added:
    """Returns what a variant adds to the bare step, from the counts of the models of `SHAPES`."""
    above = {shape: counts[shape].computing - bare[shape].computing for shape in SHAPES}
    per_norm = (above[MORE_NORMS] - above[SMALL]) / (MORE_NORMS.norms - SMALL.norms)
    per_variable = (above[MORE_DENSE] - above[SMALL]) / (2 * (MORE_DENSE.dense - SMALL.dense))
    return Added(above[SMALL] - SMALL.norms * per_norm - 2 * SMALL.dense * per_variable, per_norm, per_variable)


def operations(variant: str, shape: Shape) -> Operations:
    """Returns the operations of a training step, of which none is sampled.

    Args:
        variant: One of `VARIANTS`.
        shape: The layers of the model.

    Raises:
        MeasurementError: If the steps differ in what they run.
    """
    task = _task(shape)
    model = compiled_model(task, "float32", variant, "graph")
    with operation_trace.optimized_graphs() as graphs:
        extra_callbacks = callbacks.defaults() if variant == WITH_CALLBACKS else []
        model.fit(task.x, task.y, batch_size=len(task.x), verbose=0, callbacks=extra_callbacks)
    iterator = iter(tf.data.Dataset.from_tensors((task.x, task.y)).repeat())
    model.train_function(iterator)
    step = max((Counter(node.op for node in graph.node) for graph in graphs), key=Counter.total)
    return Operations(_computing(_executed(lambda: model.train_function(iterator))), _bookkeeping(step))


def _executed(step: Callable[[], Any]) -> Counter[str]:
    """Returns the operations of a step, if several steps in a row run the same."""
    for _ in range(_ATTEMPTS):
        first, *others = operation_trace.executed_operations(step, _CALLS)
        if len(others) == _CALLS - 1 and all(other == first for other in others):
            return first
    raise MeasurementError(f"In {_ATTEMPTS} attempts, {_CALLS} steps in a row did not run the same operations.")


def _computing(counts: Counter[str]) -> int:
    return counts.total() - _bookkeeping(counts)


def _bookkeeping(counts: Counter[str]) -> int:
    return sum(counts[kind] for kind in BOOKKEEPING)


def _task(shape: Shape) -> Task:
    batch, width = 32, 8
    x = np.random.default_rng(0).normal(size=(batch, width)).astype("float32")

    def build() -> keras.Model:
        dense: Sequence[keras.Layer] = [keras.layers.Dense(width, activation="relu") for _ in range(shape.dense - 1)]
        norms = [keras.layers.BatchNormalization() for _ in range(shape.norms)]
        return keras.Sequential([keras.Input((width,)), *dense, *norms, keras.layers.Dense(10), layers.Softmax()])

    return Task(build, x, np.arange(batch) % 10, "images/s", batch)
