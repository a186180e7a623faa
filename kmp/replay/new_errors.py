"""The error that a layer itself adds in its own precision, measured in a pass in float32."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from kmp.backend import keras_internals
from kmp.backend.keras_internals import sublayers
from kmp.backend.tensorflow_internals import RandomNumbers, without_tapes
from kmp.backend.thread_overrides import dtype_policies_replaced
from kmp.diagnosis.thresholds import HARMFUL_OUTPUT_ERROR
from kmp.replay.output_errors import Outputs, is_eager_float, largest_error, samples_of


@dataclass(frozen=True)
class LayerCall:
    """A call of a layer in a pass.

    Attributes:
        layer: The layer.
        args: The arguments.
        kwargs: The named arguments.
        random_position: Where the random numbers of the pass were when the call began.
    """

    layer: keras.Layer
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random_position: int


class NewErrors:
    """Runs layers on their float32 inputs once more, in their own precision.

    Args:
        own_policies: The policies of the layers that compute in float32 in the pass, by the `id` of
            the layer.

    Attributes:
        by_layer: The largest relative error of each layer's outputs, by path.
        of_rounded_inputs: Of a harmful one of these, what is left if only the layer's inputs are
            rounded, by path.
        is_measuring: Whether a layer runs for a measurement now.
    """

    def __init__(self, own_policies: Mapping[int, keras.DTypePolicy]) -> None:
        self.by_layer: dict[str, float] = {}
        self.of_rounded_inputs: dict[str, float] = {}
        self.is_measuring = False
        self._own_policies = own_policies

    def measure(
        self, path: str, call: LayerCall, exact: Outputs, random_numbers: RandomNumbers
    ) -> None:
        """Measures the errors of a layer in one call.

        Args:
            path: The path of the layer.
            call: The call.
            exact: The outputs in float32.
            random_numbers: The random numbers of the pass.
        """
        end = random_numbers.position
        self.is_measuring = True
        try:
            with _attributes_restored(call.layer):
                self._compare(path, call, exact, random_numbers)
        except TimeoutError:
            raise
        except Exception:  # of the user's code, on inputs of float32
            return
        finally:
            self.is_measuring = False
            random_numbers.position = end

    def _compare(
        self, path: str, call: LayerCall, exact: Outputs, random_numbers: RandomNumbers
    ) -> None:
        random_numbers.position = call.random_position
        with self._own_precision(call.layer):
            dtype = call.layer.compute_dtype
            error = largest_error(_outputs_of(call.layer, call.args, call.kwargs), exact)
        self.by_layer[path] = max(error, self.by_layer.get(path, 0.0))
        if error <= HARMFUL_OUTPUT_ERROR:
            return
        random_numbers.position = call.random_position
        args, kwargs = _rounded((call.args, call.kwargs), dtype)
        error = largest_error(_outputs_of(call.layer, args, kwargs), exact)
        self.of_rounded_inputs[path] = max(error, self.of_rounded_inputs.get(path, 0.0))

    def _own_precision(self, layer: keras.Layer) -> contextlib.AbstractContextManager[None]:
        return dtype_policies_replaced(
            (inner, self._own_policies[id(inner)])
            for inner in sublayers(layer)
            if id(inner) in self._own_policies
        )


def _outputs_of(layer: keras.Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outputs:
    # A scope of its own drops the losses that the layer adds, and what it assigns.
    with without_tapes(), keras.StatelessScope(collect_losses=True):
        return samples_of(layer(*args, **kwargs))


@contextlib.contextmanager
def _attributes_restored(layer: keras.Layer) -> Iterator[None]:
    """Restores the attributes of a layer: the user's code may keep a tensor, such as a loss."""
    before = [(inner, dict(vars(inner))) for inner in sublayers(layer)]
    try:
        yield
    finally:
        for inner, attributes in before:
            vars(inner).update(attributes)


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
