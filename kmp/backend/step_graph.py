"""What a training step is in the graph that is traced of it: layers, losses and gradients.

A recording adds no operation to the graph.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kmp.backend import xla
from kmp.backend.step_places import LayerCall, Places
from kmp.utils.context_values import context_value
from kmp.utils.float_formats import DTYPES_16_BIT


class ReadScale(NamedTuple):
    """The loss scale of an optimizer, as the step reads it."""

    optimizer: keras.optimizers.Optimizer
    scale: tf.Tensor


class ScaledLoss(NamedTuple):
    """A loss that an optimizer scales, before that."""

    optimizer: keras.optimizers.Optimizer
    loss: tf.Tensor


class AppliedGradients(NamedTuple):
    """The gradients that `apply` of an optimizer got, with their variables.

    Attributes:
        are_unscaled: Whether they are divided by the loss scale.
    """

    optimizer: keras.optimizers.Optimizer
    gradients: list[Any]
    variables: list[Any]
    are_unscaled: bool


@dataclass
class StepGraph:
    """A training step in a graph.

    Attributes:
        graph: The graph, or the function, that has the step.
        data: The batch: a structure of tensors of the graph.
        is_compiled: Whether XLA compiles it.
        calls: The calls of layers, in the order in which they returned.
        losses: The losses.
        scales: The loss scales that the step has read.
        applied: The gradients.
        position: How many operations the graph had when gradients were applied last.
        end: How many it had when the step ended.
        only_gradients: Whether the step ends with its gradients, which no optimizer applies.
        constants: The values from which constants in 16 bits were made, by the name of the
            operation; not of those that had 16 bits before.
        functions: What is recorded of the functions that the step calls, and of its branches, by
            the `id` of their graph.
        has_all: Whether no loss or gradient was of another graph.
    """

    graph: Any
    data: Any
    is_compiled: bool = False
    calls: list[LayerCall] = field(default_factory=list)
    losses: list[ScaledLoss] = field(default_factory=list)
    scales: list[ReadScale] = field(default_factory=list)
    applied: list[AppliedGradients] = field(default_factory=list)
    position: int = 0
    end: int | None = None
    only_gradients: bool = False
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    functions: dict[int, "StepGraph"] = field(default_factory=dict)
    has_all: bool = True

    @property
    def is_complete(self) -> bool:
        """Whether all losses and gradients are of this graph, and none of a function in it."""
        return self.has_all and all(each.is_complete for each in self.functions.values())

    @property
    def with_gradients(self) -> "StepGraph | None":
        """The step, or a function of it in which its gradients are computed and applied.

        A `train_step` that is a `tf.function` is such a function. If there are no gradients, it is
        the step, or `None` if that calls no layers.
        """
        found = (each for each in (self, *self.functions.values()) if each.applied)
        return next(found, self if self.calls else None)

    def in_function(self, graph: Any) -> "StepGraph":
        """Returns what is recorded of a function or branch that the step calls."""
        if id(graph) not in self.functions:
            data = keras.tree.flatten(self.data)
            captured = {id(inner) for _, inner in graph.captures}
            given: Any = [each for each in graph.inputs if id(each) not in captured]
            if len(given) == len(data):
                given = keras.tree.pack_sequence_as(self.data, given)
            # TensorFlow keeps its trace for the training: it does not end with its gradients.
            self.functions[id(graph)] = StepGraph(graph, given, self.is_compiled)
        return self.functions[id(graph)]

    @cached_property
    def places(self) -> Places:
        """Where in the model the operations are."""
        return Places(self.graph, self.calls)

    @property
    def seeds(self) -> list[tf.Tensor]:
        """The ones with which the backward passes of the losses begin, if the step reads no scale.

        A multiple of them is a loss scale.
        """
        found = [] if self._scales_loss else self.places.seeds
        return found if len(found) == len(self.losses) else []

    @property
    def _scales_loss(self) -> bool:
        return any(each.optimizer.rule.scales_loss for each in self.scales)

    @property
    def takes_scale(self) -> bool:
        """Whether gradients of the step can be multiplied by a loss scale."""
        return self._scales_loss or bool(self.seeds)

    @property
    def rows(self) -> int | None:
        """The number of examples in a batch, if the step is traced for that one."""
        tensors = [each for each in tf.nest.flatten(self.data) if each is not None]
        return tensors[0].shape[0] if tensors and tensors[0].shape.rank else None

    def takes(self, data: Any) -> bool:
        """Whether a batch has the structure, the dtypes and shapes of those of the step.

        The number of rows may be another one.
        """
        try:
            tf.nest.assert_same_structure(self.data, data, check_types=False)
        except (TypeError, ValueError):
            return False
        pairs = zip(tf.nest.flatten(self.data), tf.nest.flatten(data), strict=True)
        return all(_fits(own, other) for own, other in pairs)

    def computing_gradients_of(
        self, optimizers: Collection[keras.optimizers.Optimizer]
    ) -> set[str]:
        """Returns the names of the operations that compute the gradients of these optimizers."""
        gradients = [each.gradients for each in self.applied if each.optimizer in optimizers]
        parts = tf.nest.flatten(gradients, expand_composites=True)
        waiting = [each.op for each in parts if self.has(each)]
        found: set[str] = set()
        while waiting:
            operation = waiting.pop()
            if operation.name not in found:
                found.add(operation.name)
                waiting += [each.op for each in operation.inputs]
        return found

    def has(self, value: Any) -> bool:
        """Whether a value is a tensor of the graph, not of a branch, a loop or a function in it."""
        return tf.is_symbolic_tensor(value) and value.graph is self.graph

    def add_call(self, layer: keras.Operation, begin: int, outputs: Any) -> None:
        """Records a call of a layer.

        Args:
            layer: The layer.
            begin: How many operations the graph had before.
            outputs: What the call returned.
        """
        tensors = [each for each in keras.tree.flatten(outputs) if self.has(each)]
        path = getattr(layer, "path", None) or layer.name
        operations = slice(begin, self.graph.version)
        dtype = getattr(layer, "compute_dtype", "")
        self.calls.append(
            LayerCall(id(layer), path, layer.name, dtype, operations, outputs, tensors)
        )

    def add_scale(self, optimizer: keras.optimizers.Optimizer, scale: Any) -> None:
        """Records a loss scale that the step reads."""
        if self.has(scale):
            self.scales.append(ReadScale(optimizer, scale))

    def add_loss(self, optimizer: keras.optimizers.Optimizer, loss: Any) -> None:
        """Records a loss that is scaled."""
        if self.has(loss):
            self.losses.append(ScaledLoss(optimizer, loss))
        elif tf.is_symbolic_tensor(loss):
            self.has_all = False

    def add_gradients(self, applied: AppliedGradients) -> None:
        """Records gradients."""
        parts = tf.nest.flatten(applied.gradients, expand_composites=True)
        if all(map(self.has, filter(tf.is_symbolic_tensor, parts))):
            self.applied.append(applied)
            self.position = self.graph.version
        else:
            self.has_all = False


def _fits(own: Any, other: Any) -> bool:
    """Whether a part of a batch has the dtype and the shape of another one, but for the rows."""
    if own is None or other is None:
        return own is other
    shape = tf.TensorShape(other.shape)[1:]
    return own.dtype == other.dtype and bool(own.shape[1:].is_compatible_with(shape))


# The recording of the step that this thread traces.
_current: ContextVar[StepGraph | None] = ContextVar("_current", default=None)


def recorded_graph() -> StepGraph | None:
    """Returns what records the step that this thread traces now, if any does."""
    step = _current.get()
    if step is None or tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    return step if graph is step.graph else step.in_function(graph)


@contextlib.contextmanager
def recording(data: Any, *, only_gradients: bool = False) -> Iterator[StepGraph | None]:
    """Records the step that is traced in the context; `None` in eager mode.

    Args:
        data: The batch that the step gets.
        only_gradients: As in `StepGraph`.
    """
    if tf.executing_eagerly():
        yield None
        return
    graph = tf.compat.v1.get_default_graph()
    step = StepGraph(graph, data, xla.is_tracing(), only_gradients=only_gradients)
    with context_value(_current, step):
        yield step
        step.end = graph.version


def inputs_of(graph: Any) -> list[tf.Tensor]:
    """Returns the tensors that a function gets as arguments, and those that iterators return."""
    captured = {inner.name for _, inner in getattr(graph, "captures", ())}
    given = [each for each in getattr(graph, "inputs", ()) if each.name not in captured]
    for operation in graph.get_operations():
        if operation.type in ("IteratorGetNext", "IteratorGetNextSync", "OptionalGetValue"):
            given += operation.outputs
    return [each for each in given if each.dtype not in (tf.resource, tf.variant)]


def constant_patch(original: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Patches what adds a constant to a graph, to keep what 16 bits lose of its value."""

    @wraps(original)
    def _create_graph_constant(value: Any, dtype: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
        constant = original(value, dtype, *args, **kwargs)
        step = recorded_graph() if constant.dtype.name in DTYPES_16_BIT else None
        if step is not None and step.has(constant):
            exact = np.asarray(value)
            if exact.dtype.kind in "biuf" and exact.dtype.name not in DTYPES_16_BIT:
                step.constants[constant.op.name] = exact
        return constant

    return _create_graph_constant
