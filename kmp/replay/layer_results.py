"""What a pass shows of the layers of a model."""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from kmp.backend.step_graph import StepGraph
from kmp.backend.step_places import LayerCall
from kmp.records.replay import LOSS_FUNCTION
from kmp.replay.arrays import array_of
from kmp.replay.output_errors import MOST_VALUES, Outputs, largest_error, samples_of
from kmp.replay.step_program import ProgramView
from kmp.utils.float_formats import DTYPES_16_BIT


@dataclass
class LayerResults:
    """The layers of a pass.

    Attributes:
        called: The paths of the layers that returned, in this order, each once.
        nonfinite: The paths of the layers with NaN or Inf in an output, in the order of `called`.
        activation_gradients: The largest magnitude of the gradient of each layer's outputs; inf or
            NaN if one is not finite. In the order of the backward pass.
        in_16_bits: The paths of the layers with an output in 16 bits.
        computing_in_16_bits: The paths of the layers that compute in 16 bits by their policy.
        outputs: Samples of the outputs of each layer's calls, by path, in the order of `called`.
        errors: The largest relative error of each layer's outputs, by path, against another pass:
            see `relative_error`.
        outermost: The paths of the layers that a training step itself calls: the model, or several.
        new_errors: The part of the errors that a layer adds, by path: its error on inputs of
            float32; if that was measured.
        input_errors: Of a harmful new error, what is left if only the layer's inputs are rounded,
            by path.
    """

    called: dict[str, None] = field(default_factory=dict)
    nonfinite: dict[str, None] = field(default_factory=dict)
    activation_gradients: dict[str, float] = field(default_factory=dict)
    in_16_bits: set[str] = field(default_factory=set)
    computing_in_16_bits: set[str] = field(default_factory=set)
    outputs: dict[str, Outputs] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    outermost: dict[str, None] = field(default_factory=dict)
    new_errors: dict[str, float] = field(default_factory=dict)
    input_errors: dict[str, float] = field(default_factory=dict)

    @property
    def output_error(self) -> float:
        """The largest relative error of the model's outputs."""
        return max((self.errors.get(path, 0.0) for path in self.outermost), default=0.0)

    def compare(self, reference: Mapping[str, Outputs]) -> None:
        """Measures the errors against the outputs of another pass."""
        for path, values in self.outputs.items():
            if values and (exact := reference.get(path)):
                self.errors[path] = largest_error(values, exact)


class LayerMeasure:
    """Measures outputs of layers, and the gradients of these, in a program.

    Args:
        step: The step.
        calls: The calls to measure.
        paths: The paths of the layers by `id`.
        examples: The number of examples in the batch.
        keeps_all_values: Whether samples have all values.
        computing_gradients: The names of the operations that compute the gradients to measure.
    """

    def __init__(
        self,
        step: StepGraph,
        calls: Sequence[LayerCall],
        paths: Mapping[int, str],
        examples: int,
        *,
        keeps_all_values: bool,
        computing_gradients: Set[str],
    ) -> None:
        self._step, self._calls, self._paths = step, calls, paths
        self._examples = examples
        self._keeps_all_values = keeps_all_values
        self._computing_gradients = computing_gradients
        self._in_16_bits: set[str] = set()
        self._of_gradients: list[str] = []  # their paths

    @property
    def tensors(self) -> list[tf.Tensor]:
        """What the program has to compute."""
        return [output for call in self._calls for output in numeric_outputs(call)]

    def path_of(self, call: LayerCall | None) -> str:
        """Returns the path of the layer of a call, or of the next one around it that has one.

        Outside of layers, returns that of the loss function.
        """
        around = self._step.places.chain(call)
        return next(
            (self._paths[each.layer] for each in around if each.layer in self._paths), LOSS_FUNCTION
        )

    def add(self, view: ProgramView) -> Any:
        """Adds the operations to a program."""
        outputs = []
        for call in self._calls:
            found = [view.find(output) for output in numeric_outputs(call)]
            outputs.append([self._measured(each) for each in found])
            if any(each.dtype.name in DTYPES_16_BIT for each in found):
                self._in_16_bits.add(self.path_of(call))
        gradients = []
        places, names = self._step.places, view.operations & self._computing_gradients
        for call in places.in_backward_order if names else ():
            if call.layer not in self._paths:
                continue
            for gradient in places.gradients_of(call):
                if gradient.op.name in names:
                    found_gradient = view.find(gradient)
                    amax = tf.reduce_max(tf.abs(tf.cast(found_gradient, tf.float32)))
                    gradients.append((amax, counts_of_nonfinite(found_gradient)))
                    self._of_gradients.append(self.path_of(call))
        return outputs, gradients

    def _measured(self, output: tf.Tensor) -> list[tf.Tensor]:
        """Returns an output, or a sample of it and how many of its values are not finite."""
        if self._keeps_all_values or not output.dtype.is_floating:
            return [output]
        sampled = sample(output, self._examples)
        return [output] if sampled is output else [sampled, counts_of_nonfinite(output)]

    def read(self, measured: Any) -> LayerResults:
        """Returns what the program has measured."""
        outputs, gradients = measured
        results = LayerResults(in_16_bits=set(self._in_16_bits))
        for call in self._step.calls:
            if path := self._paths.get(call.layer):
                results.called[path] = None
                if call.dtype in DTYPES_16_BIT:
                    results.computing_in_16_bits.add(path)
        for call in self._step.places.outermost_calls:
            if call in self._calls:
                results.outermost[self.path_of(call)] = None
        for call, found in zip(self._calls, outputs, strict=True):
            path = self.path_of(call)
            of_path = results.outputs.setdefault(path, [])
            of_path += samples_of([each[0] for each in found])
            if not all(map(_is_finite, found)):
                results.nonfinite[path] = None
        for path, (amax, counts) in zip(self._of_gradients, gradients, strict=True):
            *_, minus_inf, inf, nan = array_of(counts)
            largest = float(amax)
            if nan:
                largest = math.nan
            elif minus_inf or inf:
                largest = math.inf
            before = results.activation_gradients.get(path, 0.0)
            results.activation_gradients[path] = float(np.maximum(before, largest))
        return results


def numeric_outputs(call: LayerCall) -> list[tf.Tensor]:
    """Returns the outputs of a call that are numbers."""
    return [each for each in call.outputs if each.dtype.is_floating or each.dtype.is_integer]


def _is_finite(measured: Sequence[tf.Tensor]) -> bool:
    values, *counts = measured
    if counts:
        return not array_of(counts[0])[2:].any()
    return not values.dtype.is_floating or bool(np.isfinite(array_of(values)).all())


def counts_of_nonfinite(tensor: tf.Tensor) -> tf.Tensor:
    """Returns five numbers: an id, the size, and how many values are -Inf, Inf and NaN."""
    if tensor.dtype == tf.bfloat16:  # no kernel on a GPU
        tensor = tf.cast(tensor, tf.float32)
    return tf.raw_ops.DebugNumericSummaryV2(
        input=tensor, output_dtype=tf.float32, tensor_debug_mode=3, tensor_id=0
    )


def sample(output: tf.Tensor, examples: int, most: int = MOST_VALUES) -> tf.Tensor:
    """Returns some values of each example of a large output, else the output.

    Args:
        output: Shape `(examples, ...)`.
        examples: The number of examples, if the shape does not tell.
        most: How many values are not large.
    """
    if not output.shape.rank or None in output.shape[1:]:
        return output
    values = math.prod(output.shape[1:])
    stride = (output.shape[0] or examples) * values // most
    if stride < 2 or not values:
        return output
    return tf.reshape(output, [-1, values])[:, ::stride]
