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
from kmp.utils.float_formats import DTYPES_16_BIT, FLOAT16

# Bytes of the outputs of an example, so that those of 1024 examples take 64 MB.
_MOST_BYTES = 2**16
_UNKNOWN_SIZE = 1024  # for an axis of unknown size
# Keras' losses read the input of these operations in a graph, and not their result.
_READ_PAST = "Sigmoid", "Softmax"
# Attached to a tensor; Keras' losses read them in its place.
_LOGITS = "_keras_logits"
# The largest share of subnormal numbers in a float16 gradient that can stand for one in float32.
_MOST_SUBNORMAL = 0.05


class LoopData(NamedTuple):
    """What is captured of the step of a loop, in place of what `train_step` gets.

    Attributes:
        x: The inputs of the model.
        gradients: Those of the outputs that are floats, and of their logits, in their order, of the
            scaled loss. None if they are not known.
    """

    x: Any
    gradients: list[Any]


class OutputGradients:
    """Keeps the gradients that a tape computes for the outputs of a call."""

    def __init__(self) -> None:
        self._calls = 0
        self._watched: list[tf.Tensor] = []
        self._gradients: dict[int, list[tf.Tensor]] = {}

    def count_call(self) -> None:
        """Counts a call of the model."""
        self._calls += 1

    def watch(self, outputs: Any) -> Any:
        """Returns the outputs of a call, with an operation after each that keeps its gradient.

        Outputs that are large, have no rows, or may be read in another way than as a tensor, are
        returned as they are.
        """
        tensors = _floats_of(outputs)
        are_small = sum(map(_bytes_of_example, tensors)) <= _MOST_BYTES
        if not are_small or not all(map(_can_be_watched, tensors)):
            return outputs
        return keras.tree.map_structure(self._with_watch, outputs)

    def found(self, rows: int | None) -> list[tf.Tensor]:
        """Returns the gradients of all, zeros of tensors without one.

        An empty list if no gradient was computed in the graph of this context, or if they do not
        stand for the step: the model was called, or a gradient was computed, more than once, or the
        outputs have another number of rows than the inputs.
        """
        gradients = [each for found in self._gradients.values() for each in found]
        is_one_step = self._calls == 1 and len(gradients) == len(self._gradients) > 0
        if not is_one_step or not are_of_this_graph([*self._watched, *gradients]):
            return []
        if any(None is not each.shape[0] != rows for each in self._watched):
            return []
        return [self._gradient_of(index) for index in range(len(self._watched))]

    @property
    def are_read_in_16_bits(self) -> bool:
        """Whether more than a cast to float32 may read an output in 16 bits."""
        in_16_bits = [each for each in self._watched if each.dtype.name in DTYPES_16_BIT]
        return not all(map(_is_only_cast, in_16_bits))

    def _with_watch(self, output: Any) -> Any:
        if not _is_float(output):
            return output
        index = len(self._watched)

        @tf.custom_gradient
        def identity(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
            return tf.identity(tensor), functools.partial(self._keep, index)

        watched = identity(output)
        self._watched.append(watched)
        for name, value in keras_internals.attached_to(output).items():
            setattr(watched, name, self._with_watch(value) if name == _LOGITS else value)
        return watched

    def _keep(self, index: int, gradient: Any) -> Any:
        dense = tf.convert_to_tensor(gradient)  # that of `tf.gather` has slices
        self._gradients.setdefault(index, []).append(dense)
        return gradient

    def _gradient_of(self, index: int) -> tf.Tensor:
        watched = self._watched[index]
        if index not in self._gradients:
            return tf.zeros_like(watched)
        return tf.ensure_shape(self._gradients[index][0], watched.shape)


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
        The step, `None` if the captured gradients cannot take the place of the loss: there are
        none, some are not finite, or 16 bits have lost a part of them.
    """
    if not _are_known(data.gradients):
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


def _are_known(gradients: Sequence[Any]) -> bool:
    arrays = [np.asarray(tf.cast(each, tf.float32)) for each in gradients]
    if not all(np.isfinite(each).all() for each in arrays) or not any(map(np.any, arrays)):
        return False
    float16 = [
        array
        for gradient, array in zip(gradients, arrays, strict=True)
        if gradient.dtype == tf.float16
    ]
    return all(_subnormal_share(each) <= _MOST_SUBNORMAL for each in float16)


def _subnormal_share(values: np.ndarray) -> float:
    nonzero = np.abs(values[values != 0])
    return float(np.mean(nonzero < FLOAT16.smallest_normal)) if nonzero.size else 0.0


def _sum_of_products(outputs: Any, gradients: Sequence[Any], factor: float) -> tf.Tensor:
    products = [
        tf.reduce_sum(tf.cast(output, tf.float32) * tf.cast(gradient, tf.float32) * factor)
        for output, gradient in zip(_floats_of(outputs), gradients, strict=True)
    ]
    return tf.add_n(products)


def _floats_of(outputs: Any) -> list[tf.Tensor]:
    """Returns the outputs that are floats, each followed by its logits, if it has some."""
    floats = []
    for output in keras.tree.flatten(outputs):
        tensor = output
        while _is_float(tensor):
            floats.append(tensor)
            tensor = getattr(tensor, _LOGITS, None)
    return floats


def _can_be_watched(tensor: tf.Tensor) -> bool:
    """Whether a tensor has rows, and no loss of Keras reads the operation that computed it."""
    if not tensor.shape.rank:
        return False
    if not tf.is_symbolic_tensor(tensor) or hasattr(tensor, _LOGITS):
        return True
    return tensor.op.type not in _READ_PAST


def are_of_this_graph(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether tensors are of the function that is traced now; in eager mode, of no function."""
    if tf.executing_eagerly():
        return not any(map(tf.is_symbolic_tensor, tensors))
    graph = tf.compat.v1.get_default_graph()
    return all(tf.is_symbolic_tensor(each) and each.graph is graph for each in tensors)


def _is_only_cast(tensor: tf.Tensor) -> bool:
    """Whether all that reads a tensor in its graph casts it to float32; false in eager mode."""
    if not tf.is_symbolic_tensor(tensor):
        return False
    consumers = tensor.consumers()
    return all(each.type == "Cast" and each.outputs[0].dtype == tf.float32 for each in consumers)


def _is_float(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.dtype.is_floating


def _bytes_of_example(tensor: tf.Tensor) -> int:
    sizes = [_UNKNOWN_SIZE if size is None else size for size in tensor.shape[1:]]
    return math.prod(sizes) * int(tensor.dtype.size)
