"""What the parts of a model put out for one batch, and how far float16 is from float32 there."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
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
    """What one part put out, of all its float outputs and all its calls in one batch.

    Args:
        amax: Float, the largest magnitude of the finite elements.
        beyond: Float, the share of elements beyond 65504, inf and nan included.
        below: Float, the share of elements that are not zero, and zero in float16.
        is_finite: Whether no element is inf or nan.
        values: Float32 arrays, the outputs.
    """

    amax: float
    beyond: float
    below: float
    is_finite: bool
    values: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, values: tuple[np.ndarray, ...]) -> "ActivationStatistics":
        """Looks at float32 arrays."""
        sizes = np.abs(np.concatenate([value.ravel() for value in values]))
        finite = np.isfinite(sizes)
        small = (sizes > 0) & (sizes <= 2.0**FLOAT16.flush_exponent)
        count = max(sizes.size, 1)
        return cls(
            float(sizes[finite].max(initial=0.0)),
            float((~finite | (sizes > FLOAT16.max)).sum() / count),
            float(small.sum() / count),
            bool(finite.all()),
            values,
        )

    def drift(self, reference: "ActivationStatistics") -> float:
        """Returns how far it is from a reference: the norm of the difference over the reference's norm."""
        if [value.shape for value in self.values] != [value.shape for value in reference.values]:
            return float("nan")
        difference = sum(_square_sum(a - b) for a, b in zip(self.values, reference.values, strict=True))
        size = sum(map(_square_sum, reference.values))
        return float(np.sqrt(difference / size)) if size else float(difference > 0)


def measure_activations(model: keras.Model, batch: Any) -> tuple[Any, dict[str, ActivationStatistics]]:
    """Runs a model on a batch, eagerly and as for inference, and looks at what each part puts out.

    The model is as before then, in all that `unchanged` puts back.

    Args:
        model: A model that is built.
        batch: What the model is called with.

    Returns:
        Its outputs, and by path what the parts put out, in the order in which they came to an end.

    Raises:
        ValueError: If the batch does not fit the model.
    """
    noted: dict[str, list[np.ndarray]] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(state_restored(model))
        for part in parts_of(model):
            stack.enter_context(_noting(part, noted.setdefault))
        with user_messages.naming_argument(
            "batch", f"{type(model).__name__} {model.name!r}, which is called with it (no targets)"
        ):
            outputs = model(batch, training=False)
    return outputs, {path: ActivationStatistics.of(tuple(values)) for path, values in noted.items() if values}


def by_old_path(
    seen: Mapping[str, ActivationStatistics], old: keras.Model, new: keras.Model
) -> dict[str, ActivationStatistics]:
    """Names what was seen of a new model by the paths of the old one, where layers named what they made otherwise."""
    old_path = {after.path: before.path for before, after in zip(parts_of(old), parts_of(new), strict=True)}
    return {old_path[path]: one for path, one in seen.items()}


@contextlib.contextmanager
def _noting(part: Part, list_at: Callable[[str, list[np.ndarray]], list[np.ndarray]]) -> Iterator[None]:
    call = part.operation.call

    @functools.wraps(call)
    def noted(*args: Any, **kwargs: Any) -> Any:
        outputs = call(*args, **kwargs)
        values = list_at(part.path, [])
        values += [np.asarray(ops.cast(one, "float32")) for one in keras.tree.flatten(outputs) if _is_float(one)]
        return outputs

    with instance_attribute(part.operation, "call", noted):
        yield


def _is_float(value: Any) -> bool:
    return ops.is_tensor(value) and keras.backend.is_float_dtype(value.dtype) and hasattr(value, "numpy")


def _square_sum(values: np.ndarray) -> float:
    return float(np.sum(np.square(values, dtype=np.float64)))
