"""Activation statistics of a model's layers and operations on one batch, compared with float16's range."""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from kmp.backend import instance_attribute, state_restored
from kmp.conversion.model_parts import Part, parts_of
from kmp.utils import FLOAT16, user_messages


@dataclass(frozen=True)
class ActivationStatistics:
    """Statistics over all float outputs of one layer or operation, from all its calls on one batch.

    Args:
        amax: Float, the largest magnitude of the finite elements.
        overflow_share: Float, the share of elements that exceed 65504 or are NaN or Inf.
        underflow_share: Float, the share of nonzero elements that float16 flushes to zero.
        is_finite: Whether no element is NaN or Inf.
        values: The outputs as float32 arrays.
    """

    amax: float
    overflow_share: float
    underflow_share: float
    is_finite: bool
    values: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, values: tuple[np.ndarray, ...]) -> "ActivationStatistics":
        """Returns the statistics of float32 arrays."""
        magnitudes = np.abs(np.concatenate([value.ravel() for value in values]))
        finite = np.isfinite(magnitudes)
        flushed = (magnitudes > 0) & (magnitudes <= 2.0**FLOAT16.flush_exponent)
        count = max(magnitudes.size, 1)
        return cls(
            float(magnitudes[finite].max(initial=0.0)),
            float((~finite | (magnitudes > FLOAT16.max)).sum() / count),
            float(flushed.sum() / count),
            bool(finite.all()),
            values,
        )

    def relative_error(self, reference: "ActivationStatistics") -> float:
        """Returns the L2 norm of the difference from a reference, divided by the reference's norm.

        NaN if the shapes differ.
        """
        if [value.shape for value in self.values] != [value.shape for value in reference.values]:
            return float("nan")
        squared_error = sum(_square_sum(a - b) for a, b in zip(self.values, reference.values, strict=True))
        squared_norm = sum(map(_square_sum, reference.values))
        return float(np.sqrt(squared_error / squared_norm)) if squared_norm else float(squared_error > 0)


def measure_activations(model: keras.Model, batch: Any) -> tuple[Any, dict[str, ActivationStatistics]]:
    """Runs a model eagerly on a batch, in inference mode, and measures the output of each layer and operation.

    `state_restored` restores the model's state afterwards.

    Args:
        model: A built model.
        batch: The input that the model is called with.

    Returns:
        The model's outputs, and a dict that maps paths to statistics in the order in which the calls finished.

    Raises:
        ValueError: If the batch does not fit the model.
    """
    recorded: dict[str, list[np.ndarray]] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(state_restored(model))
        for part in parts_of(model):
            stack.enter_context(_recording(part, recorded))
        with user_messages.naming_argument(
            "batch", f"{type(model).__name__} {model.name!r} (pass only the model's inputs, no targets)"
        ):
            outputs = model(batch, training=False)
    return outputs, {path: ActivationStatistics.of(tuple(values)) for path, values in recorded.items() if values}


def by_original_path(
    statistics: Mapping[str, ActivationStatistics], original: keras.Model, converted: keras.Model
) -> dict[str, ActivationStatistics]:
    """Replaces the paths of a converted model by those of the original, where sublayers may have other names."""
    original_paths = {
        after.path: before.path for before, after in zip(parts_of(original), parts_of(converted), strict=True)
    }
    return {original_paths[path]: value for path, value in statistics.items()}


@contextlib.contextmanager
def _recording(part: Part, recorded: dict[str, list[np.ndarray]]) -> Iterator[None]:
    original_call = part.operation.call

    @functools.wraps(original_call)
    def recording_call(*args: Any, **kwargs: Any) -> Any:
        outputs = original_call(*args, **kwargs)
        values = recorded.setdefault(part.path, [])
        values += [
            np.asarray(ops.cast(output, "float32")) for output in keras.tree.flatten(outputs) if _is_eager_float(output)
        ]
        return outputs

    with instance_attribute(part.operation, "call", recording_call):
        yield


def _is_eager_float(value: Any) -> bool:
    return ops.is_tensor(value) and keras.backend.is_float_dtype(value.dtype) and hasattr(value, "numpy")


def _square_sum(values: np.ndarray) -> float:
    return float(np.sum(np.square(values, dtype=np.float64)))
