"""A float32 pass over one batch, to tell what float16 flushed to zero from what is zero anyway."""

import contextlib
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmp.backend import state_restored, sublayers
from kmp.gradients import tensor_statistics
from kmp.records import GradientSample
from kmp.utils import FLOAT32, user_messages


@contextlib.contextmanager
def _without_tensor_float_32() -> Iterator[None]:
    """Has a GPU multiply float32 as it is, and not rounded to TF32's 11 bits, as TensorFlow has it do by default."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)


@_without_tensor_float_32()
def float32_sample(model: keras.Model, batch: Sequence[Any], variables: Mapping[str, Any], step: int) -> GradientSample:
    """Returns the gradients that a compiled model would have in float32, without a loss scale.

    Runs eagerly, forward and backward once. Leaves the model as it was: policies, weights, moving statistics, RNN
    states, seeds and metrics. (Keras' global seed, which layers without a seed of their own draw from, goes on.)

    Args:
        model: A compiled model, built, whose variables are float32.
        batch: `(x, y)` or `(x, y, sample_weight)`.
        variables: The variables to measure, by path, from the input to the loss.
        step: The training step that the sample is filed under.

    Raises:
        ValueError: If the batch does not fit the model and its loss.
    """
    with _named(model), state_restored(model), _computing_in_float32(model), tf.GradientTape() as tape:
        loss = _loss(model, batch)
    gradients = tape.gradient(loss, [getattr(variable, "value", variable) for variable in variables.values()])
    measured = tensor_statistics.of_gradients(gradients)
    unknown, nothing = np.full(len(variables), math.nan), np.zeros(len(variables), np.int64)
    return GradientSample(
        step,
        1.0,
        tuple(variables),
        measured.counts.numpy(),
        amax=measured.amax.numpy().astype(np.float64),
        norm=np.sqrt(measured.square_sum.numpy()),
        weight_norm=unknown,
        update_norm=unknown,
        updates=nothing,
        lost_updates=nothing,
    )


def check_batch(model: keras.Model, batch: Sequence[Any]) -> None:
    """Makes sure that `float32_sample` can take a batch: the forward pass of it, which leaves the model as it was.

    Raises:
        ValueError: If the batch does not fit the model and its loss.
    """
    with _named(model), state_restored(model), _computing_in_float32(model):
        _loss(model, batch)


def _loss(model: keras.Model, batch: Sequence[Any]) -> Any:
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(tuple(batch))
    prediction = model(x, training=True)
    takes_training = "training" in inspect.signature(model.compute_loss).parameters  # Keras' does since 3.5
    training = {"training": True} if takes_training else {}
    return model.compute_loss(x=x, y=y, y_pred=prediction, sample_weight=sample_weight, **training)


def _named(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    return user_messages.naming_argument("reference", f"{type(model).__name__} {model.name!r} and its loss")


@contextlib.contextmanager
def _computing_in_float32(model: keras.Model) -> Iterator[None]:
    layers = [layer for layer in sublayers(model) if layer.compute_dtype != FLOAT32.name]
    policies = [layer.dtype_policy for layer in layers]
    try:
        for layer in layers:
            layer.dtype_policy = FLOAT32.name
        yield
    finally:
        for layer, policy in zip(layers, policies, strict=True):
            layer.dtype_policy = policy
