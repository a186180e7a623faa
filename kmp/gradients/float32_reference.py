"""A float32 pass over one batch, to distinguish values that float16 flushed to zero from values that are truly zero."""

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
    """Disables TF32, TensorFlow's default on a GPU, which rounds the operands of products to 11 significant bits."""
    was_enabled = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(was_enabled)


@_without_tensor_float_32()
def float32_sample(model: keras.Model, batch: Sequence[Any], variables: Mapping[str, Any], step: int) -> GradientSample:
    """Returns the gradients of a compiled model in float32, without a loss scale.

    Runs one eager forward and backward pass. Restores the model's policies, weights, moving statistics, RNN states,
    seeds and metrics. Keras' global seed, which layers without their own seed use, does advance.

    Args:
        model: A compiled and built model with float32 variables.
        batch: `(x, y)` or `(x, y, sample_weight)`.
        variables: The variables to measure, by path, ordered from the input to the loss.
        step: The training step to record in the sample.

    Raises:
        ValueError: If the batch does not fit the model and its loss.
    """
    with _batch_errors_named(model), state_restored(model), _computing_in_float32(model), tf.GradientTape() as tape:
        loss = _loss(model, batch)
    gradients = tape.gradient(loss, [getattr(variable, "value", variable) for variable in variables.values()])
    statistics = tensor_statistics.gradient_statistics(gradients)
    not_measured, no_updates = np.full(len(variables), math.nan), np.zeros(len(variables), np.int64)
    return GradientSample(
        step,
        1.0,
        tuple(variables),
        statistics.counts.numpy(),
        amax=statistics.amax.numpy().astype(np.float64),
        norm=np.sqrt(statistics.square_sum.numpy()),
        weight_norm=not_measured,
        update_norm=not_measured,
        updates=no_updates,
        lost_updates=no_updates,
    )


def check_batch(model: keras.Model, batch: Sequence[Any]) -> None:
    """Runs the forward pass of `float32_sample` on a batch and restores the model.

    Raises:
        ValueError: If the batch does not fit the model and its loss.
    """
    with _batch_errors_named(model), state_restored(model), _computing_in_float32(model):
        _loss(model, batch)


def _loss(model: keras.Model, batch: Sequence[Any]) -> Any:
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(tuple(batch))
    prediction = model(x, training=True)
    takes_training = "training" in inspect.signature(model.compute_loss).parameters  # since Keras 3.5
    training = {"training": True} if takes_training else {}
    return model.compute_loss(x=x, y=y, y_pred=prediction, sample_weight=sample_weight, **training)


def _batch_errors_named(model: keras.Model) -> contextlib.AbstractContextManager[None]:
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
