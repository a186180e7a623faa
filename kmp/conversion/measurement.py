"""Statistics of the outputs of layers and operations on one batch, and the range of 16 bits."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from kmp.replay import Passes, PassResult, inference
from kmp.utils import user_messages
from kmp.utils.float_formats import FloatFormat


class ActivationStatistics:
    """Statistics over all float outputs of one layer or operation, from all its calls on one batch.

    Args:
        values: The outputs as float32 arrays.

    Attributes:
        amax: Float, the largest magnitude of the finite elements.
        is_finite: Whether no element is NaN or Inf.
    """

    def __init__(self, values: list[np.ndarray]) -> None:
        self.values = values
        self._magnitudes = np.abs(np.concatenate([value.ravel() for value in values]))
        self._finite = np.isfinite(self._magnitudes)
        self.amax = float(self._magnitudes[self._finite].max(initial=0.0))
        self.is_finite = bool(self._finite.all())

    def overflow_share(self, number_format: FloatFormat) -> float:
        """Returns the share of elements that exceed the range of a format, or are NaN or Inf."""
        overflowing = ~self._finite | (self._magnitudes > number_format.max)
        return float(overflowing.sum() / max(self._magnitudes.size, 1))

    def underflow_share(self, number_format: FloatFormat) -> float:
        """Returns the share of nonzero elements that a format flushes to zero."""
        largest_flushed = 2.0**number_format.flush_exponent
        flushed = (self._magnitudes > 0) & (self._magnitudes <= largest_flushed)
        return float(flushed.sum() / max(self._magnitudes.size, 1))

    def relative_error(self, reference: "ActivationStatistics") -> float:
        """Returns the L2 norm of the difference divided by that of the reference.

        NaN if the shapes differ.
        """
        shapes = [value.shape for value in self.values]
        if shapes != [value.shape for value in reference.values]:
            return float("nan")
        pairs = zip(self.values, reference.values, strict=True)
        squared_error = sum(_squared_norm(value - exact) for value, exact in pairs)
        squared_norm = sum(map(_squared_norm, reference.values))
        if not squared_norm:
            return float(squared_error > 0)
        return float(np.sqrt(squared_error / squared_norm))


Statistics = dict[str, ActivationStatistics]  # by the path of a layer or operation


def _squared_norm(values: np.ndarray) -> float:
    return float(np.sum(np.square(values, dtype=np.float64)))


class InferencePasses:
    """Eager passes of a model over a batch, in inference mode, which change nothing of the model.

    They are those of a replay: the random numbers of both precisions are the same, products of
    float32 do not use TF32, and a `tf.function` in a layer hides nothing.

    Args:
        model: The model.
        operations: The layers and operations to measure, by path.
        batch: An input of the model.
    """

    def __init__(
        self, model: keras.Model, operations: Mapping[str, keras.Operation], batch: Any
    ) -> None:
        self._model = model
        self._passes = Passes(
            model,
            batch,
            inference(model),
            variables={},
            operations={**operations, "": model},
            keeps_all_values=True,
        )

    def in_float32(self) -> Statistics:
        """Returns the statistics in float32: see `in_own_precision`."""
        with self._errors_of_batch():
            return _statistics_of(self._passes.in_float32())

    def in_own_precision(self) -> Statistics:
        """Returns the statistics in the precision of the model.

        They are those of `operations` by path, and of the model as `""`, in the order in which the
        calls finished.
        """
        with self._errors_of_batch():
            return _statistics_of(self._passes.in_own_precision())

    @contextlib.contextmanager
    def _errors_of_batch(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Keras and TensorFlow raise many classes, with long messages
            model = f"{type(self._model).__name__} {self._model.name!r}"
            raise ValueError(
                f"`batch` does not fit {model} (pass only the model's inputs, no targets):"
                f" {user_messages.one_line(error)}"
            ) from error


def _statistics_of(result: PassResult) -> Statistics:
    outputs = result.marks.outputs
    return {path: ActivationStatistics(values) for path, values in outputs.items() if values}
