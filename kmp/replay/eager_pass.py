"""Eager training steps over a batch, which change nothing of the model."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kmp.backend import (
    ResourceVariable,
    Undos,
    after_each_gradient,
    dtype_policies_replaced,
    equal_random_numbers,
    functions_run_eagerly,
    keras_internals,
    layers_in_16_bits,
    own_method,
    state_restored,
    sublayers,
    variable_dtype_replaced,
    watching_operations,
    without_tensor_float_32,
)
from kmp.gradients import gradient_statistics, multiply_gradients, paths_of
from kmp.optimizer import LossScaleOptimizer
from kmp.records import GradientSample
from kmp.replay.layer_marks import LayerMarks
from kmp.replay.nonfinite_operations import NonfiniteOperations
from kmp.utils import DTYPES_16_BIT, FLOAT32


class PassResult(NamedTuple):
    """The result of a pass.

    Attributes:
        loss: The loss, not multiplied by `factor`; the sum of all that the training step scales. Of
            a forward pass, NaN if an output is not finite, else 0.
        gradients: The gradient of each variable by path, a tensor, `tf.IndexedSlices` or `None`.
        marks: The layers of the pass and the gradients of their outputs.
        nonfinite: The operations that returned NaN or Inf, if they were watched.
        factor: What the gradients are multiplied by.
        is_random: Whether the forward pass drew random numbers that differ between passes or
            dtypes.
        states: What the pass would assign to the float weights that are not trainable, by path.
    """

    loss: float
    gradients: dict[str, Any]
    marks: LayerMarks
    nonfinite: NonfiniteOperations
    factor: float
    is_random: bool
    states: dict[str, np.ndarray]

    @property
    def is_finite(self) -> bool:
        """Whether the loss and all gradients are finite."""
        gradients = (
            as_array(gradient) for gradient in self.gradients.values() if gradient is not None
        )
        return bool(np.isfinite(self.loss)) and all(np.isfinite(array).all() for array in gradients)

    def sample(self, step: int) -> GradientSample:
        """Returns the statistics of gradients without a loss scale, and without those of updates."""
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
            forward pass alone.
        optimizers: The optimizers whose updates it computes.
        is_custom: Whether it is one of the user's own.
    """

    run: Callable[[Any], Any] | None
    optimizers: Sequence[keras.optimizers.Optimizer]
    is_custom: bool = False

    @property
    def is_of_keras(self) -> bool:
        """Whether it is that of Keras."""
        return self.run is not None and not self.is_custom


@dataclass(frozen=True)
class Passes:
    """Eager training steps over one batch, until the optimizers get the gradients. The model does not change.

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

    @property
    def batch(self) -> tuple[Any, ...]:
        """The parts of the batch: `(x,)`, `(x, y)` or `(x, y, sample_weight)`."""
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
        with _computing_in_float32([self.model]) as own_policies:

            def own_precision(layer: keras.Layer) -> contextlib.AbstractContextManager[None]:
                replaced = (
                    (each, own_policies[id(each)])
                    for each in sublayers(layer)
                    if id(each) in own_policies
                )
                return dtype_policies_replaced(replaced)

            return self._run(
                LayerMarks(own_precision=own_precision if measure else None), factor, watch
            )

    def in_own_precision(
        self,
        float32_layers: Sequence[keras.Layer] = (),
        *,
        factor: float | None = None,
        watch: bool = False,
        reference: PassResult | None = None,
    ) -> PassResult:
        """Runs a pass in the precision of the model.

        Args:
            float32_layers: Layers that compute in float32 in it, with their sublayers.
            factor: What to multiply the loss by instead of `self.factor`.
            watch: As in `in_float32`.
            reference: A pass in float32 to compare the outputs of the layers with: see
                `LayerMarks.errors`.
        """
        with _computing_in_float32(float32_layers):
            marks = LayerMarks(None if reference is None else reference.marks.outputs)
            return self._run(marks, self.factor if factor is None else factor, watch)

    def compiled_outputs(self) -> Any:
        """Returns the outputs in the precision of the model, compiled as the training step is.

        XLA computes what it fuses in float32 on some devices, so they may be finite where those of
        an eager pass are not, and wrong all the same: a sum that overflows at the end of a fusion,
        and then divides.
        """
        model = self.model
        with state_restored(model, self.restored), LayerMarks().on(model, self.has_dropout):
            forward = tf.function(
                lambda x: call_in_training(model, x),
                autograph=False,
                jit_compile=bool(model.jit_compile),
            )
            # Not a call of the `tf.function`: TensorFlow would warn about frequent tracing.
            return forward.get_concrete_function(self.batch[0])(self.batch[0])

    def _run(self, marks: LayerMarks, factor: float, watch: bool) -> PassResult:
        found, received = NonfiniteOperations(marks), _Received(self.step, factor)
        random_operations: list[str] = []

        def observe(operation: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            if time.monotonic() > self.deadline:
                raise TimeoutError("the replay of a batch takes too long")
            if received.is_done:
                return
            found.is_backward = received.is_backward
            if not found.is_backward and _varies_by_pass(operation, outputs):
                random_operations.append(operation)
            if watch and not marks.is_measuring:
                found.observe(operation, inputs, outputs)

        model = self.model
        is_checked = self.step.is_custom and self.step.run is not None
        unchanged = _weights_unchanged(model) if is_checked else contextlib.nullcontext()
        with unchanged, Undos() as stack, stack:
            marks.random_numbers = stack.enter(equal_random_numbers())
            scope = stack.enter(state_restored(model, self.restored))
            variables = float_states(model)
            for path, variable in variables.items():
                if path in self.states:
                    scope.add_update((variable, tf.constant(self.states[path], variable.dtype)))
            stack.enter(without_tensor_float_32())
            # A function that is traced here would be used in the training.
            stack.enter(functions_run_eagerly())
            stack.enter(marks.on(model, self.has_dropout))
            for optimizer in self.step.optimizers:
                received.replace_methods(optimizer, stack)
            # The backward pass ends in the first layers; what follows it belongs to none.
            stack.enter(
                after_each_gradient(lambda: marks.layer, functools.partial(setattr, marks, "layer"))
            )
            stack.enter(watching_operations(observe))
            if self.step.run is None:
                call_in_training(model, self.batch[0])
                received.losses.append(math.nan if model.name in marks.nonfinite else 0.0)
            else:
                try:
                    self.step.run(self.data)
                except _StepIsDone:
                    pass
                except Exception:  # in what a step of the user's own does after its updates
                    if not received.is_done:
                        raise
            assigned = [(path, scope.get_current_value(each)) for path, each in variables.items()]
        if received.gradients and not received.losses:
            raise RuntimeError("the training step does not pass its loss to scale_loss")
        states = {
            path: np.asarray(value).astype(np.float64)
            for path, value in assigned
            if value is not None
        }
        measured = self.variables if self.step.run else {}  # a forward pass has no gradients
        gradients = {
            path: received.gradients.get(id(variable)) for path, variable in measured.items()
        }
        loss = sum(received.losses) if received.losses else math.nan
        return PassResult(loss, gradients, marks, found, factor, bool(random_operations), states)


def float_states(model: keras.Model) -> dict[str, keras.Variable]:
    """Returns the float weights that are not trainable, such as moving averages, by path as in `paths_of`."""
    states = [
        each for each in model.non_trainable_variables if keras.backend.is_float_dtype(each.dtype)
    ]
    return dict(zip(paths_of(states), states, strict=True))


@contextlib.contextmanager
def _weights_unchanged(model: keras.Model) -> Iterator[None]:
    """Restores weights that the user's code changes, past what kmp replaces, and raises an error then."""
    before = [(variable, tf.identity(variable.value)) for variable in model.variables]
    try:
        yield
    finally:
        changed = [
            pair for pair in before if not np.array_equal(pair[0].value, pair[1], equal_nan=True)
        ]
        for variable, value in changed:
            variable.assign(value)
    if changed:
        raise RuntimeError("the training step changes weights in a way that kmp does not know")


class _StepIsDone(BaseException):
    """Ends a training step of Keras. One of the user's own runs to its end, which may undo what it did before."""


class _Received:
    """What the optimizers of a training step receive in place of a loss scale and updates.

    Attributes:
        is_done: Whether all optimizers that scale the loss have their gradients.
        is_backward: Whether a loss was scaled since the last `apply`: another network may follow.
        losses: The losses before.
        gradients: The gradients by the `id` of the variable, multiplied by the factor of the pass.
    """

    def __init__(self, step: TrainStep, factor: float) -> None:
        self._step, self._factor = step, factor
        self._waiting = {
            id(each) for each in step.optimizers if isinstance(each, LossScaleOptimizer)
        }
        self.is_done = self.is_backward = False
        self.losses: list[float] = []
        self.gradients: dict[int, Any] = {}

    def replace_methods(self, optimizer: keras.optimizers.Optimizer, stack: Undos) -> None:
        """Replaces the methods of an optimizer until the stack is closed."""
        is_scaling, are_unscaled = isinstance(optimizer, LossScaleOptimizer), False

        def scale_loss(loss: Any) -> Any:
            nonlocal are_unscaled
            are_unscaled, self.is_backward = False, True
            loss = tf.convert_to_tensor(loss)
            loss = tf.cast(loss, keras.backend.result_type(loss.dtype.name, FLOAT32.name))
            self.losses.append(float(np.mean(loss.numpy())))
            return loss * tf.cast(self._factor, loss.dtype)

        def unscale(grads: Sequence[Any]) -> list[Any]:
            nonlocal are_unscaled
            are_unscaled = True
            return multiply_gradients(list(grads), 1.0 / self._factor)

        def apply(
            grads: Sequence[Any], trainable_variables: Any = None, *, unscaled: bool | None = None
        ) -> None:
            nonlocal are_unscaled
            if self.is_done:
                return
            if not is_scaling or (are_unscaled if unscaled is None else unscaled):
                grads = multiply_gradients(list(grads), self._factor)
            are_unscaled = self.is_backward = False
            variables = trainable_variables
            if variables is None:
                variables = keras_internals.variables_to_train(optimizer)
            self.gradients |= dict(zip(map(id, variables), grads, strict=True))
            self._waiting.discard(id(optimizer))
            self.is_done = not self._waiting
            if self.is_done and not self._step.is_custom:
                raise _StepIsDone

        stack.enter(own_method(optimizer, "apply", lambda _: apply))
        if isinstance(optimizer, LossScaleOptimizer):
            stack.enter(own_method(optimizer, "scale_loss", lambda _: scale_loss))
            stack.enter(own_method(optimizer, "unscale", lambda _: unscale))
            self.replace_methods(optimizer.inner_optimizer, stack)


@contextlib.contextmanager
def tensor_float_32(is_allowed: bool) -> Iterator[None]:
    """Allows or disables TF32, a GPU's default for float32, which rounds the operands of products to 11 bits."""
    was_allowed = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(is_allowed)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(was_allowed)


def _varies_by_pass(operation: str, outputs: Sequence[Any]) -> bool:
    """Whether an operation draws other numbers in each pass, or in each dtype. Keras' normal numbers are the same."""
    if operation.startswith("StatelessRandom"):
        is_in_16_bits = any(output.dtype.name in DTYPES_16_BIT for output in outputs)
        return is_in_16_bits and "Normal" not in operation and "Get" not in operation
    return operation.startswith(("Random", "Stateful")) and operation != "StatefulPartitionedCall"


def call_in_training(model: keras.Model, x: Any) -> Any:
    """Returns the outputs of a model, called as Keras' `train_step` does."""
    return model(x, training=True) if keras_internals.takes_training(model) else model(x)


def as_array(gradient: Any, rows: np.ndarray | None = None, dtype: Any = np.float32) -> np.ndarray:
    """Returns a gradient as an array; of an embedding, these rows, by default those of the batch in ascending order."""
    if isinstance(gradient, tf.IndexedSlices):
        indices = np.ravel(gradient.indices)
        rows = np.unique(indices) if rows is None else rows
        values = tf.cast(gradient.values, dtype)
        gradient = tf.math.unsorted_segment_sum(values, np.searchsorted(rows, indices), len(rows))
    return np.asarray(gradient).astype(dtype, copy=False)


class _ComputeInFloat32(keras.DTypePolicy):
    """Computes a layer in float32 with variables of any dtype, which Keras casts if the two differ."""

    def __init__(self, layer: keras.Layer) -> None:
        super().__init__(FLOAT32.name)
        # 16 bits if any variable has them: code of the user's may create one in that dtype.
        dtypes = (each.dtype for each in layer.variables if each.dtype in DTYPES_16_BIT)
        self._own_variable_dtype = next(dtypes, layer.variable_dtype)

    @property
    def variable_dtype(self) -> str:
        return self._own_variable_dtype


@contextlib.contextmanager
def _computing_in_float32(layers: Sequence[keras.Layer]) -> Iterator[dict[int, keras.DTypePolicy]]:
    """Makes layers and their sublayers compute in float32. Yields the replaced policies, by the `id` of the layer."""
    found = layers_in_16_bits(layers)
    replaced = {id(layer): layer.dtype_policy for layer in found}
    with Undos() as stack, stack:
        policies = [(layer, _ComputeInFloat32(layer)) for layer in found]
        stack.enter(dtype_policies_replaced(policies))
        for inner in (inner for layer in layers for inner in sublayers(layer)):
            for state in keras_internals.declared_not_trainable(inner):
                if (
                    state.dtype in DTYPES_16_BIT
                ):  # of float32 layers too: what the pass assigns is not rounded
                    stack.enter(variable_dtype_replaced(state, FLOAT32.name))
        yield replaced
