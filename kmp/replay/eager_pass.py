"""Eager forward and backward passes over a batch, which change nothing of the model."""

import contextlib
import inspect
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kmp.backend import ResourceVariable, keras_internals, state_restored, sublayers, watching_operations
from kmp.gradients import gradient_statistics
from kmp.records import BinCounts, GradientSample
from kmp.replay.layer_marks import LayerMarks
from kmp.replay.nonfinite_operations import NonfiniteOperations
from kmp.utils import DTYPES_16_BIT, FLOAT32


class PassResult(NamedTuple):
    """The result of `run_pass`.

    Attributes:
        loss: The loss, not multiplied by `factor`.
        outputs: The outputs of the model.
        gradients: The gradient of each variable, a tensor, `tf.IndexedSlices` or `None`.
        marks: The layers of the pass and the gradients of their outputs.
        nonfinite: The operations that returned NaN or Inf, if they were watched.
        factor: What the gradients are multiplied by.
        is_random: Whether the forward pass drew random numbers that differ between passes or dtypes.
    """

    loss: float
    outputs: Any
    gradients: list[Any]
    marks: LayerMarks
    nonfinite: NonfiniteOperations
    factor: float
    is_random: bool

    @property
    def is_finite(self) -> bool:
        """Whether the loss and all gradients are finite."""
        return bool(np.isfinite(self.loss)) and all(np.isfinite(array).all() for array in self.arrays())

    def arrays(self) -> Iterator[np.ndarray]:
        """Returns the gradients that are not `None` as float32 arrays; see `as_array`."""
        return (as_array(gradient) for gradient in self.gradients if gradient is not None)

    def sample(self, names: Iterable[str], step: int, loss_scale: float = 1.0) -> GradientSample:
        """Returns the statistics of the gradients, without those of updates."""
        names = tuple(names)
        statistics = gradient_statistics(self.gradients)
        return GradientSample(
            step,
            loss_scale,
            names,
            BinCounts.of(statistics.counts.numpy()),
            amax=statistics.amax.numpy().astype(np.float64),
            norm=np.sqrt(statistics.square_sum.numpy()),
        )


@dataclass(frozen=True)
class Passes:
    """Forward and backward passes over one batch with the compiled loss. The model does not change.

    Args:
        model: A compiled and built model.
        batch: `(x, y)` or `(x, y, sample_weight)`.
        variables: The variables of the gradients, of `model.trainable_variables`.
        factor: What the loss is multiplied by before the backward pass in the precision of the model.
        is_forward_only: Whether to run only the forward pass; then the loss is NaN if an output is not finite, else 0.
        has_dropout: Whether layers of Keras draw random numbers, as in training.
        restored: TensorFlow's variables that a training step assigns.
        deadline: The time of `time.monotonic` after which a pass raises a `TimeoutError`.
    """

    model: keras.Model
    batch: Sequence[Any]
    variables: Sequence[Any]
    factor: float = 1.0
    is_forward_only: bool = False
    has_dropout: bool = True
    restored: Sequence[ResourceVariable] = ()
    deadline: float = math.inf

    def in_float32(self, *, watch: bool = False, measure: bool = False) -> PassResult:
        """Runs a pass in float32.

        Args:
            watch: Whether to look for the operations that return NaN or Inf, which takes a few times as long.
            measure: Whether to run each layer in its own precision too: see `LayerMarks.new_errors`.
        """
        with _computing_in_float32([self.model]) as own_policies:

            @contextlib.contextmanager
            def own_precision(layer: keras.Layer) -> Iterator[None]:
                with contextlib.ExitStack() as stack:
                    for inner in sublayers(layer):
                        policy = own_policies.get(id(inner))
                        if policy is not None:
                            stack.enter_context(keras_internals.dtype_policy_replaced(inner, policy))
                    yield

            return self._run(LayerMarks(own_precision=own_precision if measure else None), 1.0, watch)

    def in_own_precision(
        self,
        float32_layers: Iterable[keras.Layer] = (),
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
            reference: A pass in float32 to compare the outputs of the layers with: see `LayerMarks.errors`.
        """
        with _computing_in_float32(float32_layers):
            marks = LayerMarks(None if reference is None else reference.marks.outputs)
            return self._run(marks, self.factor if factor is None else factor, watch)

    def compiled_outputs(self) -> Any:
        """Returns the outputs in the precision of the model, compiled as the training step is.

        XLA computes what it fuses in float32 on some devices, so they may be finite where those of an eager pass are
        not, and wrong all the same: a sum that overflows at the end of a fusion, and then divides.
        """
        model = self.model
        with state_restored(model, self.restored), LayerMarks().on(model, self.has_dropout):
            forward = tf.function(
                lambda x: call_in_training(model, x), autograph=False, jit_compile=bool(model.jit_compile)
            )
            # Not a call of the `tf.function`: TensorFlow would warn about frequent tracing.
            return forward.get_concrete_function(self.batch[0])(self.batch[0])

    def _run(self, marks: LayerMarks, factor: float, watch: bool) -> PassResult:
        found = NonfiniteOperations(marks)
        operations: set[str] = set()

        def observe(operation: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            if time.monotonic() > self.deadline:
                raise TimeoutError("the replay of a batch takes too long")
            if not found.is_backward:
                operations.add(operation)
            if watch and not marks.is_measuring:
                found.observe(operation, inputs, outputs)

        model = self.model
        with contextlib.ExitStack() as stack:
            tensors = stack.enter_context(state_restored(model, self.restored))
            tensor_of = {id(each): tensor for each, tensor in zip(model.trainable_variables, tensors, strict=True)}
            of_gradients = [tensor_of.get(id(each), getattr(each, "value", each)) for each in self.variables]
            stack.enter_context(tensor_float_32(False))
            stack.enter_context(marks.on(model, self.has_dropout))
            stack.enter_context(watching_operations(observe))
            if self.is_forward_only:
                outputs = call_in_training(model, self.batch[0])
                floats = [each for each in keras.tree.flatten(outputs) if keras.backend.is_float_dtype(each.dtype)]
                is_finite = all(np.isfinite(each).all() for each in floats)
                loss = 0.0 if is_finite else math.nan
                return PassResult(loss, outputs, [], marks, found, factor, any(map(_varies_by_pass, operations)))
            with tf.GradientTape() as tape:
                tape.watch(of_gradients)
                marks.without_tape = tape.stop_recording
                outputs, loss = forward_pass(model, self.batch)
                scaled = tf.cast(loss, tf.float32) * factor
            found.is_backward = True
            gradients = tape.gradient(scaled, of_gradients)
        is_random = any(map(_varies_by_pass, operations))
        return PassResult(float(loss), outputs, gradients, marks, found, factor, is_random)


@contextlib.contextmanager
def tensor_float_32(is_allowed: bool) -> Iterator[None]:
    """Allows or disables TF32, a GPU's default for float32, which rounds the operands of products to 11 bits."""
    was_allowed = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(is_allowed)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(was_allowed)


def _varies_by_pass(operation: str) -> bool:
    """Whether an operation draws other numbers in each pass, or in each dtype. Keras' normal numbers are the same."""
    if operation.startswith("StatelessRandom"):
        return "Normal" not in operation and "Get" not in operation
    return operation.startswith(("Random", "Stateful")) and operation != "StatefulPartitionedCall"


def call_in_training(model: keras.Model, x: Any) -> Any:
    """Returns the outputs of a model, called as Keras' `train_step` does."""
    return model(x, training=True) if keras_internals.takes_training(model) else model(x)


def forward_pass(model: keras.Model, batch: Sequence[Any]) -> tuple[Any, Any]:
    """Returns the outputs of a compiled model, and its loss."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(tuple(batch))
    outputs = call_in_training(model, x)
    takes_training = "training" in inspect.signature(model.compute_loss).parameters  # since Keras 3.5
    training = {"training": True} if takes_training else {}
    return outputs, model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=sample_weight, **training)


def as_array(gradient: Any) -> np.ndarray:
    """Returns a gradient as a float32 array; of an embedding, only the rows that the batch has, in their order."""
    if isinstance(gradient, tf.IndexedSlices):
        rows, row_of = tf.unique(tf.reshape(gradient.indices, [-1]))
        values = tf.cast(gradient.values, tf.float32)
        gradient = tf.math.unsorted_segment_sum(values, row_of, tf.size(rows))
    return np.asarray(gradient).astype(np.float32)


class _ComputeInFloat32(keras.DTypePolicy):
    """Computes in float32 with variables of any dtype, which Keras casts if the two differ."""

    def __init__(self, variable_dtype: str) -> None:
        super().__init__(FLOAT32.name)
        self._own_variable_dtype = variable_dtype

    @property
    def variable_dtype(self) -> str:
        return self._own_variable_dtype


@contextlib.contextmanager
def _computing_in_float32(layers: Iterable[keras.Layer]) -> Iterator[dict[int, keras.DTypePolicy]]:
    """Makes layers and their sublayers compute in float32. Yields the replaced policies, by the `id` of the layer."""
    every = {id(inner): inner for layer in layers for inner in sublayers(layer)}
    replaced = {key: layer.dtype_policy for key, layer in every.items() if layer.compute_dtype in DTYPES_16_BIT}
    with contextlib.ExitStack() as stack:
        for key in replaced:
            policy = _ComputeInFloat32(every[key].variable_dtype)
            stack.enter_context(keras_internals.dtype_policy_replaced(every[key], policy))
        yield replaced
