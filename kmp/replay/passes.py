"""Passes over a batch by the graph of a training step, which change nothing of the training."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kmp.backend.keras_internals import layers_by_path, sublayers
from kmp.backend.step_graph import StepGraph
from kmp.backend.step_places import LayerCall
from kmp.backend.tensorflow_internals import without_tensor_float_32
from kmp.gradients.gradient_sampler import paths_of
from kmp.gradients.tensor_statistics import gradient_statistics, merged_sample
from kmp.gradients.unscaling import multiply_gradients
from kmp.optimizer import LossScaleOptimizer
from kmp.records import GradientSample
from kmp.records.replay import LossyOperation
from kmp.replay.arrays import array_of
from kmp.replay.layer_results import LayerMeasure, LayerResults
from kmp.replay.new_errors import NewErrors
from kmp.replay.nonfinite_operations import NonfiniteOperations
from kmp.replay.operation_watch import OperationWatch
from kmp.replay.step_program import ProgramView, StepProgram, StepPrograms, step_program
from kmp.utils.float_formats import FLOAT32


class PassResult(NamedTuple):
    """The result of a pass.

    Attributes:
        loss: The loss, not multiplied by `factor`; the sum of all that the training step scales. If
            it is not known, as in a forward pass, it is NaN if an output is not finite, else 0.
        knows_loss: Whether the training step scales a loss.
        gradients: The gradient of each variable by path, a tensor, `tf.IndexedSlices` or `None`.
        marks: The layers of the pass and the gradients of their outputs.
        nonfinite: The operations that returned NaN or Inf, if they were watched.
        lossy: The operations for whose finite results 16 bits are too few, if they were watched.
        factor: What the gradients are multiplied by.
        states: What the pass would assign to the float weights that are not trainable, by path.
    """

    loss: float
    knows_loss: bool
    gradients: dict[str, Any]
    marks: LayerResults
    nonfinite: NonfiniteOperations
    lossy: list[LossyOperation]
    factor: float
    states: dict[str, np.ndarray]

    @property
    def is_finite(self) -> bool:
        """Whether the loss and all gradients are finite."""
        if not math.isfinite(self.loss):
            return False
        known = (gradient for gradient in self.gradients.values() if gradient is not None)
        return all(np.isfinite(as_array(gradient)).all() for gradient in known)

    def sample(self, step: int) -> GradientSample:
        """Returns the statistics of gradients, without a loss scale and updates."""
        statistics = gradient_statistics(list(self.gradients.values()))
        return merged_sample(step, 1.0, tuple(self.gradients), [statistics])


@dataclass(frozen=True)
class Passes:
    """Forward and backward passes of a training step over one batch.

    Args:
        model: The model.
        data: The batch, as the step gets it.
        graph: The graph of the step.
        variables: The variables of the gradients by path, of `model.trainable_variables`.
        watched: The optimizer whose losses and gradients count, where each has its own, as in a
            GAN; `None` for all.
        kind: Whose training step it is: that of Keras, a `train_step` of the user's own, or that of
            a training loop.
        has_backward: Whether a pass has losses and gradients in addition to outputs.
        factor: What the loss is multiplied by before the backward pass in the precision of the
            model.
        restored: The variables of `BatchCapture.variables`.
        deadline: The time of `time.monotonic` after which a pass raises a `TimeoutError`.
        states: The values of weights that are not trainable, by path, where a pass begins with
            other ones.
        operations: The layers and operations to mark, by path; by default the model and all its
            layers.
        keeps_all_values: Whether the outputs of layers have all values, not samples.
        float32_operations: Layers, with their sublayers, and operations of the graph that compute
            in float32 in all passes.
        beside: The layers beside the model that the step calls, as in the loss.
        as_trained: Whether the passes run as the training does: optimized by TensorFlow, and
            compiled by XLA if that compiles the step. Only the outputs of the model leave them
            then, or of all layers where a pass is watched: more changes what XLA fuses.
        constants: Values for passes in float32 in place of constants in 16 bits, by the name of the
            operation in the graph.
        programs: Those that were made of the graph with these constants.
    """

    model: keras.Model
    data: Any
    graph: StepGraph
    variables: Mapping[str, Any]
    watched: LossScaleOptimizer | None = None
    kind: Literal["keras", "user", "loop"] = "keras"
    has_backward: bool = True
    factor: float = 1.0
    restored: Sequence[Any] = ()
    deadline: float = math.inf
    states: Mapping[str, np.ndarray] = field(default_factory=dict)
    operations: Mapping[str, keras.Operation] | None = None
    keeps_all_values: bool = False
    float32_operations: Sequence[keras.Operation] = ()
    beside: Sequence[keras.Layer] = ()
    as_trained: bool = False
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    programs: StepPrograms = field(default_factory=StepPrograms)

    @property
    def batch(self) -> tuple[Any, ...]:
        """The parts of the batch: `(x,)`, `(x, y)` or `(x, y, sample_weight)`."""
        return self.data if isinstance(self.data, tuple) else (self.data,)

    @property
    def examples(self) -> int:
        """The number of examples in the batch."""
        values = (each for each in keras.tree.flatten(self.data) if each is not None)
        return len(next(values))

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers whose losses and gradients count."""
        if self.watched is not None:
            return [self.watched]
        of_losses = [each.optimizer for each in self.graph.losses]
        return [*of_losses, *(each.optimizer for each in self.graph.applied)]

    @property
    def is_of_keras(self) -> bool:
        """Whether the passes are those of the training step of Keras, with its loss."""
        return self.kind == "keras" and self.has_backward

    def in_float32(
        self, *, factor: float = 1.0, watch: bool = False, measure: bool = False
    ) -> PassResult:
        """Runs a pass in float32.

        Args:
            factor: What to multiply the loss by.
            watch: Whether to look for the operations that return NaN or Inf.
            measure: Whether to run each layer in its own precision too: see
                `LayerResults.new_errors`.
        """
        return self._run(_Format(FLOAT32.name), factor, watch=watch, measure=measure)

    def in_own_precision(
        self,
        float32_operations: Sequence[keras.Operation] = (),
        *,
        factor: float | None = None,
        watch: bool = False,
        reference: PassResult | None = None,
    ) -> PassResult:
        """Runs a pass in the precision of the model.

        Args:
            float32_operations: What computes in float32 in it, in addition to those of the passes.
            factor: What to multiply the loss by instead of `self.factor`.
            watch: As in `in_float32`.
            reference: A pass in float32 to compare the outputs of the layers with: see
                `LayerResults.errors`.
        """
        chosen: set[int] = set()
        handles: set[int] = set()
        for operation in (*self.float32_operations, *float32_operations):
            inner = [operation]
            if isinstance(operation, keras.Layer):
                inner = list(sublayers(operation))
                states = operation.non_trainable_variables
                handles.update(id(each.value.handle) for each in states)
            chosen.update(map(id, inner))
        only = frozenset(call for call in self.graph.calls if call.layer in chosen)
        number_format = _Format(None)
        if chosen:
            number_format = _Format(FLOAT32.name, only, frozenset(handles))
        factor = self.factor if factor is None else factor
        return self._run(number_format, factor, watch=watch, reference=reference)

    def in_format(
        self,
        name: str,
        *,
        factor: float = 1.0,
        watch: bool = False,
        reference: PassResult | None = None,
    ) -> PassResult:
        """Runs a pass in which what computes in 16 bits computes in one of the two formats.

        Args:
            name: `"float16"` or `"bfloat16"`.
            factor: What to multiply the loss by.
            watch: As in `in_float32`.
            reference: As in `in_own_precision`.
        """
        return self._run(_Format(name), factor, watch=watch, reference=reference)

    def _run(
        self,
        number_format: "_Format",
        factor: float,
        *,
        watch: bool = False,
        measure: bool = False,
        reference: PassResult | None = None,
    ) -> PassResult:
        if time.monotonic() > self.deadline:
            raise TimeoutError("the replay of a batch takes too long")
        began = time.monotonic()
        if not self.graph.takes_scale:
            factor = 1.0  # the step has no place for it

        # A program that is traced or compiled for one size gets a batch of that size.
        data, rows = self.data, self.graph.rows
        if rows is None and self.as_trained and self.graph.is_compiled:
            rows = self.programs.rows = max(self.programs.rows, self.examples)
        if rows not in (None, self.examples):
            data = tiled(data, rows)

        # A search makes many programs, and runs each once; the others are kept.
        key = number_format, watch, measure, self.as_trained, self.has_backward
        known = self.programs.made.get(key)
        program, measures = known or self._new_program(number_format, watch=watch, measure=measure)
        if number_format.only is None:
            self.programs.made[key] = program, measures
        states = float_states(self.model)
        initial = {id(states[path].value.handle): each for path, each in self.states.items()}
        with without_tensor_float_32():
            result = program(data, factor, initial)
        if known is None and self.as_trained:
            self.programs.seconds += time.monotonic() - began

        # What the program returns becomes the result of the pass.
        of_layers, of_operations, of_errors = result.measured
        marks = measures.layers.read(of_layers)
        if measures.new_errors:
            measures.new_errors.read(of_errors, marks)
        if reference is not None:
            marks.compare(reference.marks.outputs)
        losses = [
            float(tf.reduce_mean(loss))
            for loss, of_step in zip(result.losses, self.graph.losses, strict=False)
            if of_step.optimizer in self.optimizers
        ]
        outputs_are_finite = not marks.nonfinite.keys() & marks.outermost.keys()
        nonfinite, lossy = NonfiniteOperations(), list[LossyOperation]()
        if measures.operations:

            def values_of(tensors: list[tf.Tensor]) -> Any:
                with_values = step_program(
                    self.graph,
                    *number_format,
                    tensors=tensors,
                    measure=lambda view: [view.find(each) for each in tensors],
                    has_backward=False,
                    constants=self.constants,
                )
                with without_tensor_float_32():
                    return with_values(data, factor, initial).measured

            nonfinite, lossy = measures.operations.read(of_operations, values_of)
        assigned = {path: program.assigned(variable) for path, variable in states.items()}
        return PassResult(
            loss=sum(losses) if losses else 0.0 if outputs_are_finite else math.nan,
            knows_loss=bool(losses),
            gradients=self._gradients(result.applied, factor),
            marks=marks,
            nonfinite=nonfinite,
            lossy=lossy,
            factor=factor,
            states={
                path: array_of(value).astype(np.float64)
                for path, value in assigned.items()
                if value is not None
            },
        )

    def _new_program(
        self, number_format: "_Format", *, watch: bool, measure: bool
    ) -> tuple[StepProgram, "_Measures"]:
        measures = _Measures(self, watch=watch, measure=measure)
        program = step_program(
            self.graph,
            *number_format,
            tensors=measures.layers.tensors,
            measure=measures.add,
            states={id(each.value.handle) for each in float_states(self.model).values()},
            has_backward=self.has_backward,
            as_trained=self.as_trained,
            constants=self.constants,
        )
        return program, measures

    def _gradients(self, found: Sequence[dict[int, Any]], factor: float) -> dict[str, Any]:
        """Returns the gradients by path, multiplied by the factor where the step has divided."""
        if not self.has_backward:
            return {}
        received: dict[int, Any] = {}
        for gradients, applied in zip(found, self.graph.applied, strict=True):
            if applied.optimizer not in self.optimizers:
                continue
            values = list(gradients.values())
            if applied.are_unscaled:
                values = multiply_gradients(values, factor)
            received |= zip(gradients, values, strict=True)
        return {path: received.get(id(variable)) for path, variable in self.variables.items()}


class _Format(NamedTuple):
    """What computes in which float format, as arguments of `step_program`."""

    dtype: str | None
    only: frozenset[LayerCall] | None = None
    variables: frozenset[int] = frozenset()


class _Measures:
    """What is measured in a program."""

    def __init__(self, passes: Passes, *, watch: bool, measure: bool) -> None:
        # The same for all programs, so that they sample the same values.
        passes.programs.examples = passes.programs.examples or passes.examples
        step, examples = passes.graph, passes.programs.examples

        layers: dict[str, keras.Operation] = {}
        for layer in (*passes.beside, passes.model):
            layers |= {layer.name: layer, **layers_by_path(layer)}
        operations = layers if passes.operations is None else passes.operations
        paths = {id(operation): path for path, operation in operations.items()}
        calls = [call for call in step.calls if call.layer in paths]
        if passes.as_trained and not watch:
            beside = {id(each) for layer in passes.beside for each in sublayers(layer)}
            calls = [call for call in step.places.outermost_calls if call.layer not in beside]
        computing_gradients = set[str]()
        if passes.has_backward and not passes.as_trained:
            computing_gradients = step.computing_gradients_of(passes.optimizers)
        self.layers = LayerMeasure(
            step,
            calls,
            paths,
            examples,
            keeps_all_values=passes.keeps_all_values or passes.as_trained,
            computing_gradients=computing_gradients,
        )

        self.operations: OperationWatch | None = None
        if watch and not passes.as_trained:
            self.operations = OperationWatch(step, self.layers.path_of, examples)
        self.new_errors: NewErrors | None = None
        if measure:
            self.new_errors = NewErrors(step, calls, self.layers.path_of, examples)

    def add(self, view: ProgramView) -> Any:
        """Adds the operations that measure to a program, and returns what it returns of them."""
        return (
            self.layers.add(view),
            self.operations.add(view) if self.operations else [],
            self.new_errors.add(view) if self.new_errors else [],
        )


def float_states(model: keras.Model) -> dict[str, keras.Variable]:
    """Returns the float weights that are not trainable, such as moving averages, by path."""
    states = [
        each for each in model.non_trainable_variables if keras.backend.is_float_dtype(each.dtype)
    ]
    return dict(zip(paths_of(states), states, strict=True))


def tiled(data: Any, size: int) -> Any:
    """Returns a batch of this size, with the examples of a smaller one again and again."""

    def tiled_tensor(tensor: Any) -> tf.Tensor:
        return tf.gather(tensor, tf.range(size) % tf.shape(tensor)[0])

    return keras.tree.map_structure(tiled_tensor, data)


def as_array(gradient: Any, rows: np.ndarray | None = None, dtype: Any = np.float32) -> np.ndarray:
    """Returns a gradient as an array.

    That of an embedding has these rows, by default those of the batch in ascending order.
    """
    if isinstance(gradient, tf.IndexedSlices):
        indices = np.ravel(gradient.indices)
        rows = np.unique(indices) if rows is None else rows
        values = tf.cast(gradient.values, dtype)
        gradient = tf.math.unsorted_segment_sum(values, np.searchsorted(rows, indices), len(rows))
    return array_of(gradient).astype(dtype, copy=False)
