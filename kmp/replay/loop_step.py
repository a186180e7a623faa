"""The step of a custom training loop, replayed from the gradients of the outputs in the loop.

A replay calls the model, but not the loop: its loss is not known. The gradients of the outputs that
the loop computed take its place: the loss of a replay is the sum of the outputs times these, which
has the same gradients.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kmp.backend import keras_internals
from kmp.optimizer import LossScaleOptimizer
from kmp.replay.eager_pass import TrainStep, call_in_training
from kmp.utils.float_formats import DTYPES_16_BIT

# Bytes of the outputs of an example, so that those of 256 examples take 64 MB.
_MOST_BYTES = 2**18
_UNKNOWN_SIZE = 1024  # for an axis of unknown size


class LoopData(NamedTuple):
    """What is captured of the step of a loop, in place of what `train_step` gets.

    Attributes:
        x: The inputs of the model.
        gradients: Those of the outputs that are floats, in their order, of the scaled loss.
    """

    x: Any
    gradients: list[Any]


class OutputGradients:
    """Keeps the gradients that a tape computes for the outputs of a call.

    Attributes:
        calls: How many calls of the model were seen.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._outputs: list[tf.Tensor] = []
        self._gradients: dict[int, list[tf.Tensor]] = {}

    def watch(self, outputs: Any) -> Any:
        """Returns the outputs of a call, with an operation after each that keeps its gradient.

        Those of the first call; outputs that are large, or have no rows, are returned as they are.
        """
        self.calls += 1
        tensors = [each for each in keras.tree.flatten(outputs) if _is_float(each)]
        have_rows = all(tensor.shape.rank for tensor in tensors)
        is_large = sum(map(_bytes_of_example, tensors)) > _MOST_BYTES
        if self.calls > 1 or is_large or not have_rows:
            return outputs
        return keras.tree.map_structure(self._watched, outputs)

    def found(self) -> list[tf.Tensor]:
        """Returns the gradients, zeros of outputs without one.

        None if no gradient was computed, or if they are not all: the model was called, or a
        gradient was computed, more than once.
        """
        counts = [len(each) for each in self._gradients.values()]
        if self.calls != 1 or not counts or max(counts) > 1:
            return []
        return [self._gradient_of(index) for index in range(len(self._outputs))]

    @property
    def are_read_in_16_bits(self) -> bool:
        """Whether more than a cast may read an output in 16 bits."""
        in_16_bits = [each for each in self._outputs if each.dtype.name in DTYPES_16_BIT]
        return not all(map(_is_only_cast, in_16_bits))

    def _watched(self, output: Any) -> Any:
        if not _is_float(output):
            return output
        index = len(self._outputs)

        @tf.custom_gradient
        def identity(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
            return tf.identity(tensor), functools.partial(self._keep, index)

        watched = identity(output)
        for name, value in keras_internals.attached_to(output).items():
            setattr(watched, name, value)
        self._outputs.append(watched)
        return watched

    def _keep(self, index: int, gradient: Any) -> Any:
        dense = tf.convert_to_tensor(gradient)  # that of `tf.gather` has slices
        self._gradients.setdefault(index, []).append(dense)
        return gradient

    def _gradient_of(self, index: int) -> tf.Tensor:
        output = self._outputs[index]
        if index not in self._gradients:
            return tf.zeros_like(output)
        return tf.ensure_shape(self._gradients[index][0], output.shape)


def loop_step(
    model: keras.Model, optimizer: LossScaleOptimizer, data: Any, scale: float, batch_size: int
) -> TrainStep | None:
    """Returns a training step with the gradients of a loop's outputs.

    Args:
        model: The model that the loop trains.
        optimizer: The optimizer that scaled the loss.
        data: What was captured of the loop.
        scale: The loss scale of the captured gradients.
        batch_size: The number of examples in the training batch. With fewer, the gradients are
            multiplied, so that those of the variables are an estimate for the whole batch.

    Returns:
        The step, `None` if no gradients were captured, or some are not finite: those of a loss that
        is not.
    """
    gradients = data.gradients if isinstance(data, LoopData) else []
    if not gradients or not all(np.isfinite(_array(each)).all() for each in gradients):
        return None

    def run(data: LoopData) -> None:
        examples = len(keras.tree.flatten(data.x)[0])
        factor = batch_size / examples / scale
        variables = model.trainable_variables
        with tf.GradientTape() as tape:
            outputs = call_in_training(model, data.x)
            loss = _sum_of_products(outputs, data.gradients, factor)
            scaled_loss = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled_loss, variables), variables)

    return TrainStep(run, [optimizer], "loop")


def _sum_of_products(outputs: Any, gradients: Sequence[Any], factor: float) -> tf.Tensor:
    floats = [each for each in keras.tree.flatten(outputs) if _is_float(each)]
    products = [
        tf.reduce_sum(tf.cast(output, tf.float32) * tf.cast(gradient, tf.float32) * factor)
        for output, gradient in zip(floats, gradients, strict=True)
    ]
    return tf.add_n(products)


def _array(tensor: Any) -> np.ndarray:
    return np.asarray(tf.cast(tensor, tf.float32))


def _is_only_cast(tensor: tf.Tensor) -> bool:
    """Whether all that reads a tensor in its graph is a cast; false in eager mode."""
    if not tf.is_symbolic_tensor(tensor):
        return False
    return all(operation.type == "Cast" for operation in tensor.consumers())


def _is_float(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.dtype.is_floating


def _bytes_of_example(tensor: tf.Tensor) -> int:
    sizes = [_UNKNOWN_SIZE if size is None else size for size in tensor.shape[1:]]
    return math.prod(sizes) * int(tensor.dtype.size)
