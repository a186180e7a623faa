"""Eager training steps over a batch, or its inference, which change nothing of the model."""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kmp.backend import keras_internals
from kmp.backend.keras_internals import layers_by_path
from kmp.backend.state_rollback import ResourceVariable, state_restored
from kmp.backend.tensorflow_internals import (
    after_each_gradient,
    equal_random_numbers,
    functions_run_eagerly,
    without_tensor_float_32,
)
from kmp.backend.undo import Context, Undos
from kmp.gradients.gradient_sampler import paths_of
from kmp.gradients.tensor_statistics import gradient_statistics
from kmp.layers.layer_calls import creating_float32
from kmp.optimizer import LossScaleOptimizer
from kmp.records import GradientSample
from kmp.records.replay import LossyOperation
from kmp.replay.arrays import array_of
from kmp.replay.instruments import (
    OperationWatch,
    ReceivedGradients,
    StepIsDone,
    computing_in,
    weights_unchanged,
)
from kmp.replay.layer_marks import LayerMarks
from kmp.replay.nonfinite_operations import NonfiniteOperations
from kmp.utils.float_formats import FLOAT32


class PassResult(NamedTuple):
    """The result of a pass.

    Attributes:
        loss: The loss, not multiplied by `factor`; the sum of all that the training step scales. If
            that is not known, as of a forward pass, NaN if an output is not finite, else 0. NaN of
            a step without a loss.
        knows_loss: Whether the training step scales a loss.
        gradients: The gradient of each variable by path, a tensor, `tf.IndexedSlices` or `None`.
        marks: The layers of the pass and the gradients of their outputs.
        nonfinite: The operations that returned NaN or Inf, if they were watched.
        lossy: The operations for whose finite results 16 bits are too few, if they were watched.
        factor: What the gradients are multiplied by.
        is_random: Whether the forward pass drew random numbers that differ between passes or
            dtypes.
        states: What the pass would assign to the float weights that are not trainable, by path.
        reads_scale: Whether the training step itself has read the loss scale.
    """

    loss: float
    knows_loss: bool
    gradients: dict[str, Any]
    marks: LayerMarks
    nonfinite: NonfiniteOperations
    lossy: list[LossyOperation]
    factor: float
    is_random: bool
    states: dict[str, np.ndarray]
    reads_scale: bool = False

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
        return GradientSample(
            step,
            1.0,
            tuple(self.gradients),
            statistics.counts.numpy(),
            amax=statistics.amax.numpy().astype(np.float64),
            norm=np.sqrt(statistics.square_sum.numpy()),
        )


@dataclass(frozen=True)
class TrainStep:
    """The training step of a model.

    Attributes:
        run: The step: Keras' own or that of the user, without what kmp adds to it. `None` for the
            forward pass of a training step alone. Or the inference, which has no loss.
        optimizers: The optimizers whose updates it computes.
        kind: `"keras"`, `"user"` for one of the user's own, or `"loop"` for that of a training loop
            with the gradients of the outputs in place of the loss: see `loop_step`.
        watched: The optimizer whose losses are passed backward, where each has its own, as in a
            GAN; `None` for all.
    """

    run: Callable[[Any], Any] | None
    optimizers: Sequence[keras.optimizers.Optimizer]
    kind: Literal["keras", "user", "loop"] = "keras"
    watched: LossScaleOptimizer | None = None

    @property
    def is_custom(self) -> bool:
        """Whether it is one of the user's own."""
        return self.kind == "user"

    @property
    def is_of_keras(self) -> bool:
        """Whether it is that of Keras, and runs."""
        return self.run is not None and self.kind == "keras"

    @property
    def is_of_loop(self) -> bool:
        """Whether it is that of a training loop."""
        return self.kind == "loop"

    @property
    def scales_loss(self) -> bool:
        """Whether an optimizer needs a scaled loss: not at a scale of 1, as in bfloat16."""
        optimizers = [each for each in self.optimizers if isinstance(each, LossScaleOptimizer)]
        return not optimizers or any(each.rule.scales_loss for each in optimizers)

    @property
    def is_of_user(self) -> bool:
        """Whether it is one of the user's own, and runs."""
        return self.run is not None and self.is_custom


@dataclass(frozen=True)
class Passes:
    """Eager training steps over one batch, until the optimizers get the gradients.

    The model does not change.

    Args:
        model: A compiled and built model.
        data: The batch, as `train_step` gets it.
        step: The training step.
        variables: The variables of the gradients by path, of `model.trainable_variables`.
        factor: What the loss is multiplied by before the backward pass in the precision of the
            model.
        has_dropout: Whether layers of Keras draw random numbers, as in training.
        restored: TensorFlow's variables that a training step assigns.
        deadline: The time of `time.monotonic` after which a pass raises a `TimeoutError`.
        states: The values of weights that are not trainable, by path, where a pass begins with
            other ones.
        operations: The layers and operations to mark, by path; by default the model and all its
            layers.
        keeps_all_values: As in `LayerMarks`.
        float32_operations: Layers, with their sublayers, and operations of the graph that compute
            in float32 in all passes.
        read_scale: What the training step reads as `loss_scale` of an optimizer; the factor of the
            pass if it is `None`.
        beside: The layers beside the model that the step calls, as in the loss.
    """

    model: keras.Model
    data: Any
    step: TrainStep
    variables: Mapping[str, Any]
    factor: float = 1.0
    has_dropout: bool = True
    restored: Sequence[ResourceVariable] = ()
    deadline: float = math.inf
    states: Mapping[str, np.ndarray] = field(default_factory=dict)
    operations: Mapping[str, keras.Operation] | None = None
    keeps_all_values: bool = False
    float32_operations: Sequence[keras.Operation] = ()
    read_scale: float | None = None
    beside: Sequence[keras.Layer] = ()

    @property
    def batch(self) -> tuple[Any, ...]:
        """The parts of the batch: `(x,)`, `(x, y)` or `(x, y, sample_weight)`."""
        if self.step.is_of_loop:
            return (self.data.x,)
        return self.data if isinstance(self.data, tuple) else (self.data,)

    @property
    def examples(self) -> int:
        """The number of examples in the batch."""
        return len(keras.tree.flatten(self.data)[0])

    def in_float32(
        self, *, factor: float = 1.0, watch: bool = False, measure: bool = False
    ) -> PassResult:
        """Runs a pass in float32.

        Args:
            factor: What to multiply the loss by.
            watch: Whether to look for the operations that return NaN or Inf, which takes a few
                times as long.
            measure: Whether to run each layer in its own precision too: see
                `LayerMarks.new_errors`.
        """
        layers = [self.model, *self.beside]
        with creating_float32(), computing_in(FLOAT32.name, layers) as own_policies:
            measured = own_policies if measure else None
            marks = LayerMarks(own_policies=measured, keeps_all_values=self.keeps_all_values)
            return self._run(marks, factor, watch)

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
                `LayerMarks.errors`.
        """
        with computing_in(FLOAT32.name, [*self.float32_operations, *float32_operations]):
            outputs = None if reference is None else reference.marks.outputs
            marks = LayerMarks(outputs, keeps_all_values=self.keeps_all_values)
            return self._run(marks, self.factor if factor is None else factor, watch)

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
        with computing_in(name, [self.model, *self.beside]):
            outputs = None if reference is None else reference.marks.outputs
            marks = LayerMarks(outputs, keeps_all_values=self.keeps_all_values)
            return self._run(marks, factor, watch)

    def compiled_outputs(self) -> Any:
        """Returns the outputs in the precision of the model, compiled as the training step is.

        XLA computes what it fuses in float32 on some devices, so they may be finite where those of
        an eager pass are not, and wrong all the same: a sum that overflows at the end of a fusion,
        and then divides.
        """
        model = self.model
        x = self.batch[0]
        with state_restored(model, self.restored), self._marked_by(LayerMarks()):
            forward = tf.function(
                functools.partial(call_in_training, model),
                autograph=False,
                jit_compile=bool(model.jit_compile),
            )
            # Not a call of the `tf.function`: TensorFlow would warn about frequent tracing.
            return forward.get_concrete_function(x)(x)

    def _run(self, marks: LayerMarks, factor: float, watch: bool) -> PassResult:
        model, step = self.model, self.step
        received = ReceivedGradients(
            step.optimizers,
            factor,
            read_scale=factor if self.read_scale is None else self.read_scale,
            ends_step=not step.is_custom,
            watched=step.watched,
        )
        operations = OperationWatch(marks, received, self.deadline, finds_nonfinite=watch)
        checked = weights_unchanged(model) if step.is_of_user else contextlib.nullcontext()
        with checked, Undos() as instruments, instruments.first_attempt():
            marks.random_numbers = instruments.enter(equal_random_numbers())
            scope = instruments.enter(state_restored(model, self.restored))
            instruments.enter(without_tensor_float_32())
            # A function that is traced here would be used in the training.
            instruments.enter(functions_run_eagerly())
            instruments.enter(self._marked_by(marks))
            instruments.enter(received.in_place_of_updates())
            # The backward pass ends in the first layers; what follows it belongs to none.
            instruments.enter(after_each_gradient(marks.position, marks.move_to))
            instruments.enter(operations.on())
            self._begin_with_states(scope)
            if step.run is None:
                call_in_training(model, self.batch[0])
            else:
                _run_step(step.run, self.data, received)
            states = _assigned_states(model, scope)

        if received.gradients and not received.losses and step.scales_loss:
            raise RuntimeError("the training step does not pass its loss to scale_loss")
        return PassResult(
            loss=self._loss_of(marks, received),
            knows_loss=bool(received.losses) and not step.is_of_loop,
            gradients=self._gradients_of(received),
            marks=marks,
            nonfinite=operations.nonfinite,
            lossy=operations.lossy.found,
            factor=factor,
            is_random=operations.is_random,
            states=states,
            reads_scale=received.has_read_scale,
        )

    def _marked_by(self, marks: LayerMarks) -> Context[None]:
        model, operations = self.model, self.operations
        if operations is None:
            operations = {model.name: model, **layers_by_path(model)}
        beside: dict[str, keras.Operation] = {}
        for layer in self.beside:
            beside |= {layer.name: layer, **layers_by_path(layer)}
        return marks.on(operations, self.has_dropout, beside)

    def _begin_with_states(self, scope: keras.StatelessScope) -> None:
        for path, variable in float_states(self.model).items():
            dtype = variable.dtype  # of a state in 16 bits, float32 where a pass is in float32
            if path in self.states:
                scope.add_update((variable, tf.constant(self.states[path], dtype)))
            elif variable.value.dtype != dtype:
                scope.add_update((variable, tf.cast(variable.value, dtype)))

    def _loss_of(self, marks: LayerMarks, received: ReceivedGradients) -> float:
        if received.losses:
            return sum(received.losses)
        if self.step.run is None or received.gradients:
            return math.nan if self.model.name in marks.nonfinite else 0.0
        return math.nan

    def _gradients_of(self, received: ReceivedGradients) -> dict[str, Any]:
        if self.step.run is None:
            return {}
        return {
            path: received.gradients.get(id(variable)) for path, variable in self.variables.items()
        }


def _run_step(run: Callable[[Any], Any], data: Any, received: ReceivedGradients) -> None:
    """Runs a training step until the optimizers have the gradients."""
    try:
        run(data)
    except StepIsDone:
        pass
    except Exception:  # in what a step of the user's own does after its updates
        if not received.is_done:
            raise


def _assigned_states(model: keras.Model, scope: keras.StatelessScope) -> dict[str, np.ndarray]:
    """Returns what a pass assigned to the float states of a model, by path."""
    assigned = {}
    for path, variable in float_states(model).items():
        value = scope.get_current_value(variable)
        if value is not None:
            assigned[path] = array_of(value).astype(np.float64)
    return assigned


def float_states(model: keras.Model) -> dict[str, keras.Variable]:
    """Returns the float weights that are not trainable, such as moving averages, by path."""
    states = [
        each for each in model.non_trainable_variables if keras.backend.is_float_dtype(each.dtype)
    ]
    return dict(zip(paths_of(states), states, strict=True))


def call_in_training(model: keras.Model, x: Any) -> Any:
    """Returns the outputs of a model, called as Keras' `train_step` does."""
    return model(x, training=True) if keras_internals.takes_training(model) else model(x)


def as_array(gradient: Any, rows: np.ndarray | None = None, dtype: Any = np.float32) -> np.ndarray:
    """Returns a gradient as an array.

    Of an embedding, these rows, by default those of the batch in ascending order.
    """
    if isinstance(gradient, tf.IndexedSlices):
        indices = np.ravel(gradient.indices)
        rows = np.unique(indices) if rows is None else rows
        values = tf.cast(gradient.values, dtype)
        gradient = tf.math.unsorted_segment_sum(values, np.searchsorted(rows, indices), len(rows))
    return array_of(gradient).astype(dtype, copy=False)
