"""Marks the layers of a model in an eager pass: where its operations belong, and what float16 changes in each."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmp.backend import (
    RandomNumbers,
    Undos,
    is_keras_class,
    is_passthrough,
    keras_internals,
    layers_by_path,
    own_method,
    sublayers,
    without_tapes,
)
from kmp.records import HARMFUL_OUTPUT_ERROR, LOSS_FUNCTION
from kmp.utils import DTYPES_16_BIT

_MOST_VALUES = 2**16  # of an output, for the relative error
LARGEST_ERROR = 1e6  # also stands for NaN and Inf

Outputs = list[np.ndarray]


class LayerMarks:
    """Follows an eager forward and backward pass through the layers of a model.

    Each layer's outputs pass through an identity whose gradient function notes that the backward
    pass has reached the layer.

    Args:
        reference: The outputs of a pass in float32, to compare with: `outputs` of its marks.
        own_precision: Makes a layer compute in its own precision, in a pass in float32. If given,
            each layer also runs so on its float32 inputs.

    Attributes:
        layer: The path of the layer whose operations run now, or `LOSS_FUNCTION` after the forward
            pass of the model.
        called: The paths of the layers that returned, in this order, each once.
        nonfinite: The paths of the layers with NaN or Inf in an output, in the order of `called`.
        activation_gradients: The largest magnitude of the gradient of each layer's outputs; inf or
            NaN if one is not finite. In the order of the backward pass.
        in_16_bits: The paths of the layers with an output in 16 bits.
        computing_in_16_bits: The paths of the layers that compute in 16 bits by their policy.
        outputs: Samples of the outputs of each layer's calls, by path.
        errors: The largest relative error of each layer's outputs, by path, against `reference`:
            see `relative_error`.
        new_errors: The part of it that a layer adds, by path: its relative error on inputs of
            float32.
        input_errors: Of a harmful one of these, what is left if only the layer's inputs are
            rounded, by path.
        is_measuring: Whether a layer runs only to measure that.
        outermost: The paths of the layers that a training step itself calls: the model, or several.
    """

    def __init__(
        self,
        reference: Mapping[str, Outputs] | None = None,
        own_precision: (
            Callable[[keras.Layer], contextlib.AbstractContextManager[Any]] | None
        ) = None,
    ) -> None:
        self.layer = LOSS_FUNCTION
        self.called: dict[str, None] = {}
        self.nonfinite: dict[str, None] = {}
        self.activation_gradients: dict[str, float] = {}
        self.in_16_bits: set[str] = set()
        self.computing_in_16_bits: set[str] = set()
        self.random_numbers = RandomNumbers()  # that the pass draws
        self.outputs: dict[str, Outputs] = {}
        self.errors: dict[str, float] = {}
        self.new_errors: dict[str, float] = {}
        self.input_errors: dict[str, float] = {}
        self.is_measuring = False
        self.outermost: dict[str, None] = {}
        self._reference, self._own_precision = reference or {}, own_precision

    @contextlib.contextmanager
    def on(self, model: keras.Model, has_dropout: bool = True) -> Iterator[None]:
        """Marks the layers of a model while the context is open.

        Args:
            model: The model.
            has_dropout: Whether layers that draw random numbers do so. Their numbers differ by
                dtype.
        """
        with Undos() as stack, stack:
            for path, layer in {model.name: model, **layers_by_path(model)}.items():
                is_random = _is_random(layer)
                marking = functools.partial(
                    self._marking, path, layer, is_random, is_random and not has_dropout
                )
                stack.enter(own_method(layer, "call", marking))
            yield

    @property
    def output_error(self) -> float:
        """The largest relative error of the model's outputs."""
        return max((self.errors.get(path, 0.0) for path in self.outermost), default=0.0)

    def error_of(self, outputs: Any) -> float:
        """Returns the largest relative error of other outputs of the model against those of this pass."""
        exact = [value for path in self.outermost for value in self.outputs[path]]
        return max(map(relative_error, _samples(outputs), exact), default=0.0)

    def _marking(
        self,
        path: str,
        layer: keras.Layer,
        is_random: bool,
        is_quiet: bool,
        call: Callable[..., Any],
    ) -> Callable[..., Any]:
        is_measured = (is_quiet or not is_random) and not is_passthrough(layer)

        @functools.wraps(call)
        def marked_call(*args: Any, **kwargs: Any) -> Any:
            if is_quiet and "training" in kwargs:
                kwargs["training"] = False
            if self.is_measuring:
                return call(*args, **kwargs)
            outer, self.layer = self.layer, path
            if outer == LOSS_FUNCTION:
                self.outermost[path] = None
            if layer.compute_dtype in DTYPES_16_BIT:
                self.computing_in_16_bits.add(path)
            begin = self.random_numbers.position
            try:
                outputs = call(*args, **kwargs)
                values = _samples(outputs)
                self._compare(path, values)
                if self._own_precision and is_measured:
                    self._measure_new_error(path, layer, values, begin, args, kwargs)
                return keras.tree.map_structure(lambda output: self._marked(output, path), outputs)
            finally:
                self.layer = outer
                self.called[path] = None

        return marked_call

    def _compare(self, path: str, values: Outputs) -> None:
        calls = self.outputs.setdefault(path, [])
        before = self._reference.get(path, [])[len(calls) :]
        calls += values
        for value, exact in zip(values, before, strict=False):
            self.errors[path] = max(relative_error(value, exact), self.errors.get(path, 0.0))

    def _measure_new_error(
        self,
        path: str,
        layer: keras.Layer,
        exact: Outputs,
        begin: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        assert self._own_precision is not None
        end = self.random_numbers.position

        def error_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
            self.random_numbers.position = begin
            # A scope of its own drops the losses that the layer adds, and what it assigns.
            with without_tapes(), keras.StatelessScope(collect_losses=True):
                values = _samples(layer(*args, **kwargs))
            return max(
                (relative_error(value, other) for value, other in zip(values, exact, strict=False)),
                default=0.0,
            )

        # The user's code may keep a tensor in an attribute, such as a part of the loss.
        attributes = [(inner, dict(vars(inner))) for inner in sublayers(layer)]
        self.is_measuring = True
        try:
            with self._own_precision(layer):
                error, dtype = error_of(args, kwargs), layer.compute_dtype
            self.new_errors[path] = max(error, self.new_errors.get(path, 0.0))
            if error > HARMFUL_OUTPUT_ERROR:
                error = error_of(*_rounded((args, kwargs), dtype))
                self.input_errors[path] = max(error, self.input_errors.get(path, 0.0))
        except TimeoutError:
            raise
        except Exception:  # of the user's code, on inputs of float32
            return
        finally:
            self.is_measuring, self.random_numbers.position = False, end
            for inner, before in attributes:
                vars(inner).update(before)

    def _marked(self, output: Any, path: str) -> Any:
        if not is_eager_float(output):
            return output  # a layer may have a `tf.function` of its own

        @tf.custom_gradient
        def identity(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
            return tf.identity(tensor), functools.partial(self._reached, path)

        if not np.isfinite(np.asarray(output)).all():  # `numpy` would copy it
            self.nonfinite[path] = None
        if output.dtype.name in DTYPES_16_BIT:
            self.in_16_bits.add(path)
        marked = identity(output)
        for name, value in keras_internals.attached_to(output).items():
            setattr(marked, name, self._marked(value, path))
        return marked

    def _reached(self, path: str, gradient: tf.Tensor) -> tf.Tensor:
        self.layer = path
        values = np.asarray(tf.convert_to_tensor(gradient)).astype(
            np.float32, copy=False
        )  # `tf.gather` has slices
        # Without an array of magnitudes. The maximum of an array and NaN is NaN.
        before = self.activation_gradients.get(path, 0.0)
        largest = np.maximum(np.max(values, initial=before), -np.min(values, initial=-before))
        self.activation_gradients[path] = float(largest)
        return gradient


def relative_error(values: np.ndarray, exact: np.ndarray) -> float:
    """Returns the L2 norm of the difference from float32 outputs, relative to how these differ between examples.

    Relative to the norm of the outputs if all examples have the same. At most 1e6, also for NaN and
    Inf.

    Args:
        values: Array of shape `(examples, ...)`.
        exact: Array of that shape, of float32.
    """
    if values.shape != exact.shape or not exact.size:
        return 0.0
    exact = exact.astype(np.float64)
    with np.errstate(invalid="ignore"):  # Inf - Inf
        difference = float(np.linalg.norm(values - exact))
        varying = float(np.linalg.norm(exact - exact.mean(axis=0)))
        norm = float(np.linalg.norm(exact))
    # Constants have no variation but that of rounding.
    scale = varying if varying > 1e-6 * norm else norm
    if not difference <= LARGEST_ERROR * scale:  # or NaN
        return LARGEST_ERROR if difference else 0.0
    return difference / scale if scale else 0.0


def _rounded(values: Any, dtype: str) -> Any:
    """Returns a structure with its eager floats rounded to a dtype."""

    def rounded(value: Any) -> Any:
        if not is_eager_float(value):
            return value
        result = tf.cast(tf.cast(value, dtype), value.dtype)
        for name, attached in keras_internals.attached_to(value).items():
            setattr(result, name, attached)
        return result

    return keras.tree.map_structure(rounded, values)


def _samples(outputs: Any) -> Outputs:
    """Returns the floats of a layer's outputs as float32 arrays of shape `(examples, values)`, of large ones a part."""
    arrays = [
        np.asarray(output) for output in keras.tree.flatten(outputs) if is_eager_float(output)
    ]
    flat = [
        array.reshape(len(array) if array.ndim else 1, math.prod(array.shape[1:]))
        for array in arrays
    ]
    strides = [max(1, array.size // _MOST_VALUES) for array in flat]
    return [
        array[:, ::stride].astype(np.float32) for array, stride in zip(flat, strides, strict=True)
    ]


def is_eager_float(value: Any) -> bool:
    """Whether a value is a float tensor that has a value."""
    return (
        isinstance(value, tf.Tensor)
        and not tf.is_symbolic_tensor(value)
        and value.dtype.is_floating
    )


def _is_random(layer: keras.Layer) -> bool:
    """Whether a layer of Keras draws random numbers in training, such as those with dropout."""
    if not is_keras_class(type(layer)) or isinstance(layer, keras.Model):
        return False
    return any(hasattr(inner, "seed_generator") for inner in sublayers(layer))
