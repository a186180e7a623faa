"""Marks the layers of a model in an eager pass: where its operations belong."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Set
from types import MappingProxyType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmp.backend import keras_internals
from kmp.backend.keras_internals import is_keras_class, is_passthrough, sublayers
from kmp.backend.tensorflow_internals import RandomNumbers
from kmp.backend.thread_overrides import own_method
from kmp.backend.undo import Undos
from kmp.records.replay import LOSS_FUNCTION
from kmp.replay.arrays import array_of
from kmp.replay.new_errors import LayerCall, NewErrors
from kmp.replay.output_errors import (
    LARGEST_ERROR,
    Outputs,
    is_eager_float,
    largest_error,
    relative_error,
    samples_of,
)
from kmp.utils.float_formats import DTYPES_16_BIT

__all__ = ["LARGEST_ERROR", "LayerMarks", "relative_error"]


class LayerMarks:
    """Follows an eager forward and backward pass through the layers of a model.

    Each layer's outputs pass through an identity whose gradient function notes that the backward
    pass has reached the layer. An operation of a functional graph, such as that of
    `keras.ops.exp(x)`, is marked as a layer is.

    Args:
        reference: The outputs of a pass in float32, to compare with: `outputs` of its marks.
        own_policies: The policies that a pass in float32 replaces, by the `id` of the layer. If
            given, each layer also runs with its own policy on its float32 inputs.
        keeps_all_values: Whether `outputs` has all values, not samples.

    Attributes:
        layer: The path of the layer whose operations run now, or `LOSS_FUNCTION` after the forward
            pass of the model.
        called: The paths of the layers that returned, in this order, each once.
        nonfinite: The paths of the layers with NaN or Inf in an output, in the order of `called`.
        activation_gradients: The largest magnitude of the gradient of each layer's outputs; inf or
            NaN if one is not finite. In the order of the backward pass.
        in_16_bits: The paths of the layers with an output in 16 bits.
        computing_in_16_bits: The paths of the layers that compute in 16 bits by their policy.
        random_numbers: Those that the pass draws.
        outputs: Samples of the outputs of each layer's calls, by path, in the order of `called`.
        errors: The largest relative error of each layer's outputs, by path, against `reference`:
            see `relative_error`.
        outermost: The paths of the layers that a training step itself calls: the model, or several.
    """

    def __init__(
        self,
        reference: Mapping[str, Outputs] | None = None,
        own_policies: Mapping[int, keras.DTypePolicy] | None = None,
        *,
        keeps_all_values: bool = False,
    ) -> None:
        self.layer = LOSS_FUNCTION
        self.called: dict[str, None] = {}
        self.nonfinite: dict[str, None] = {}
        self.activation_gradients: dict[str, float] = {}
        self.in_16_bits: set[str] = set()
        self.computing_in_16_bits: set[str] = set()
        self.random_numbers = RandomNumbers()
        self.outputs: dict[str, Outputs] = {}
        self.errors: dict[str, float] = {}
        self.outermost: dict[str, None] = {}
        self._beside: Set[str] = frozenset()
        self._reference = reference or {}
        self._new_errors = NewErrors(own_policies or {})
        self._measures = own_policies is not None
        self._keeps_all_values = keeps_all_values

    @contextlib.contextmanager
    def on(
        self,
        operations: Mapping[str, keras.Operation],
        has_dropout: bool = True,
        beside: Mapping[str, keras.Operation] = MappingProxyType({}),
    ) -> Iterator[None]:
        """Marks layers and operations while the context is open.

        Args:
            operations: The layers of a model, with the model itself, and the operations of its
                graph, by path.
            has_dropout: Whether layers that draw random numbers do so. Their numbers differ by
                dtype.
            beside: Layers beside the model, as in the loss, whose outputs are not the model's.
        """
        self._beside = beside.keys() - operations.keys()
        with Undos() as undos, undos.first_attempt():
            for path, operation in {**beside, **operations}.items():
                is_quantized = getattr(operation, "quantization_mode", None)
                name = "quantized_call" if is_quantized else "call"
                marking = functools.partial(self._marking, path, operation, has_dropout)
                undos.enter(own_method(operation, name, marking))
            yield

    @property
    def new_errors(self) -> dict[str, float]:
        """The part of `errors` that a layer adds, by path: its error on inputs of float32."""
        return self._new_errors.by_layer

    @property
    def input_errors(self) -> dict[str, float]:
        """Of a harmful new error, what is left if only the layer's inputs are rounded, by path."""
        return self._new_errors.of_rounded_inputs

    @property
    def is_measuring(self) -> bool:
        """Whether a layer runs only to measure its new error."""
        return self._new_errors.is_measuring

    @property
    def output_error(self) -> float:
        """The largest relative error of the model's outputs."""
        return max((self.errors.get(path, 0.0) for path in self.outermost), default=0.0)

    def error_of(self, outputs: Any) -> float:
        """Returns the largest relative error of other outputs of the model against those here."""
        exact = [value for path in self.outermost for value in self.outputs[path]]
        return largest_error(samples_of(outputs), exact)

    def position(self) -> str:
        """Returns the layer whose operations run now."""
        return self.layer

    def move_to(self, layer: str) -> None:
        """Sets the layer whose operations run now."""
        self.layer = layer

    def _marking(
        self, path: str, operation: keras.Operation, has_dropout: bool, call: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Returns the call of a layer or operation with its marks."""
        is_random = _is_random(operation)
        is_quiet = is_random and not has_dropout
        is_measured = self._measures and _has_new_errors(operation) and (is_quiet or not is_random)

        @functools.wraps(call)
        def marked_call(*args: Any, **kwargs: Any) -> Any:
            if is_quiet and "training" in kwargs:
                kwargs["training"] = False
            if self.is_measuring:
                return call(*args, **kwargs)
            begin = self.random_numbers.position
            with self._inside(path, operation):
                outputs = call(*args, **kwargs)
                values = samples_of(outputs, all_values=self._keeps_all_values)
                self._compare(path, values)
                if is_measured:
                    own_call = LayerCall(operation, args, kwargs, begin)
                    self._new_errors.measure(path, own_call, values, self.random_numbers)
                marked = functools.partial(self._marked, path=path)
                return keras.tree.map_structure(marked, outputs)

        return marked_call

    @contextlib.contextmanager
    def _inside(self, path: str, operation: keras.Operation) -> Iterator[None]:
        """Marks the call of a layer or operation."""
        outer = self.layer
        self.layer = path
        if outer == LOSS_FUNCTION and path not in self._beside:
            self.outermost[path] = None
        if getattr(operation, "compute_dtype", None) in DTYPES_16_BIT:
            self.computing_in_16_bits.add(path)
        try:
            yield
        finally:
            self.layer = outer
            self.called[path] = None

    def _compare(self, path: str, values: Outputs) -> None:
        """Keeps the outputs of a call, and compares them with those of the reference."""
        calls = self.outputs.setdefault(path, [])
        exact = self._reference.get(path, [])[len(calls) :]
        calls += values
        if values and exact:
            error = largest_error(values, exact)
            self.errors[path] = max(error, self.errors.get(path, 0.0))

    def _marked(self, output: Any, path: str) -> Any:
        """Returns an output with the mark of its layer."""
        if not is_eager_float(output):
            return output  # a layer may have a `tf.function` of its own

        @tf.custom_gradient
        def identity(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
            return tf.identity(tensor), functools.partial(self._reached, path)

        if not np.isfinite(array_of(output)).all():  # `numpy` would copy it
            self.nonfinite[path] = None
        if output.dtype.name in DTYPES_16_BIT:
            self.in_16_bits.add(path)
        marked = identity(output)
        for name, value in keras_internals.attached_to(output).items():
            setattr(marked, name, self._marked(value, path))
        return marked

    def _reached(self, path: str, gradient: tf.Tensor) -> tf.Tensor:
        """Notes that the backward pass has reached a layer."""
        self.layer = path
        dense = tf.convert_to_tensor(gradient)  # the gradient of `tf.gather` has slices
        values = array_of(dense).astype(np.float32, copy=False)
        # Without an array of magnitudes. The maximum of an array and NaN is NaN.
        before = self.activation_gradients.get(path, 0.0)
        highest = np.max(values, initial=before)
        lowest = np.min(values, initial=-before)
        self.activation_gradients[path] = float(np.maximum(highest, -lowest))
        return gradient


def _is_random(operation: keras.Operation) -> bool:
    """Whether a layer of Keras draws random numbers in training, such as those with dropout."""
    if not isinstance(operation, keras.Layer) or isinstance(operation, keras.Model):
        return False
    if not is_keras_class(type(operation)):
        return False
    return any(hasattr(inner, "seed_generator") for inner in sublayers(operation))


def _has_new_errors(operation: keras.Operation) -> bool:
    """Whether it is a layer that computes something itself, in a precision of its own."""
    return isinstance(operation, keras.Layer) and not is_passthrough(operation)
