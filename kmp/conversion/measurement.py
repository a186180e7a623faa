"""Statistics of the outputs of layers and operations on one batch, and the range of 16 bits."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from kmp.backend import keras_internals
from kmp.backend.layer_graph import values_of_inputs
from kmp.conversion.model_parts import parts_of
from kmp.numerics import Value, constant, union
from kmp.replay import Passes, PassResult, traced_step
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

    def relative_error(self, reference: "ActivationStatistics") -> float | None:
        """Returns the L2 norm of the difference divided by that of the reference.

        `None` if either has NaN or Inf, and NaN if the shapes differ. A replay judges by another
        error, which is relative to how outputs vary between examples.
        """
        if not self.is_finite or not reference.is_finite:
            return None
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


def statistics_of(result: PassResult) -> Statistics:
    """Returns the statistics of a pass with all values, in the order in which calls finished."""
    found = {}
    for path, outputs in result.marks.outputs.items():
        values = [each for each in outputs if np.issubdtype(each.dtype, np.floating)]
        if values:
            found[path] = ActivationStatistics(values)
    return found


@dataclass(frozen=True)
class Measurement:
    """What a float32 pass of a model over a batch shows.

    Args:
        passes: As `inference_passes` returns them.
        exact: The pass in float32.
        ranges: The range of the outputs of each layer and operation, and of the inputs, by `id`.
    """

    passes: Passes
    exact: PassResult
    ranges: Mapping[int, Value]


def measured_with(model: keras.Model, batch: Any) -> Measurement:
    """Returns what a float32 pass of a model over a batch shows.

    Raises:
        ValueError: If the batch does not fit the model.
    """
    operations = {part.path: part.operation for part in parts_of(model)}
    passes = inference_passes(model, operations, batch)
    exact = passes.in_float32()
    by_path, found = {**operations, "": model}, {}
    for path, statistics in statistics_of(exact).items():
        if statistics.is_finite:
            values = [constant(each) for each in statistics.values if each.size]
            found[id(by_path[path])] = union(values)
    inputs = keras_internals.graph_tensors(model, "inputs")
    given = values_of_inputs(model, batch) if inputs else []
    if len(inputs) == len(given):
        for tensor, value in zip(inputs, given, strict=True):
            array = np.asarray(value)
            is_float = keras.backend.is_float_dtype(tensor.dtype)
            if is_float and np.issubdtype(array.dtype, np.number):
                found[id(keras_internals.producer_of(tensor))] = constant(array)
    ranges = {key: value for key, value in found.items() if value.is_bounded}
    return Measurement(passes, exact, ranges)


def inference_passes(
    model: keras.Model, operations: Mapping[str, keras.Operation], batch: Any
) -> Passes:
    """Returns passes of a model over a batch, in inference mode.

    Args:
        model: The model, which has the path `""` in the marks of a pass.
        operations: The layers and operations to mark, by path.
        batch: An input of the model. If it does not fit, a `ValueError` is raised.
    """
    graph = traced_step(
        functools.partial(_outputs, model),
        batch,
        [model],
        operations=[each for each in operations.values() if not isinstance(each, keras.Layer)],
    )
    return Passes(
        model,
        batch,
        graph,
        variables={},
        has_backward=False,
        operations={**operations, "": model},
        keeps_all_values=True,
    )


def _outputs(model: keras.Model, batch: Any) -> Any:
    try:
        return model(batch, training=False)
    except Exception as error:  # Keras and TensorFlow raise many classes, with long messages
        subject = (
            f"{type(model).__name__} {model.name!r} (pass only the model's inputs, no targets)"
        )
        raise ValueError(
            f"`batch` does not fit {subject}: {user_messages.one_line(error)}"
        ) from error
