"""The models whose training steps the benchmarks count, and a compiled step of each."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import kmp
from kmp.backend import xla
from kmp.backend.keras_internals import global_policy

SCALINGS = BARE, KERAS, UNWATCHED, OURS, COMPILED = "bare", "keras", "unwatched", "kmp", "compiled"
DEFAULT_BATCH = {
    "resnet50": 64,
    "efficientnet": 32,
    "convnext": 32,
    "bert": 32,
    "unet": 8,
    "small": 32,
}
MODELS = tuple(DEFAULT_BATCH)

_APPLICATIONS = {
    "resnet50": "ResNet50",
    "efficientnet": "EfficientNetB0",
    "convnext": "ConvNeXtTiny",
}


class StepModel(NamedTuple):
    """A model, and what it trains on: shapes without the batch."""

    model: keras.Model
    input_shape: tuple[int, ...]
    input_dtype: str
    label_shape: tuple[int, ...]


class CompiledStep(NamedTuple):
    """A training step, which a `tf.function` can trace, and the specs of its arguments."""

    train_step: Callable[..., Any]
    specs: tuple[tf.TensorSpec, tf.TensorSpec]


def step_model(name: str) -> StepModel:
    """Returns one of `MODELS` with random weights, in the global policy. Labels are integers."""
    if name == "bert":
        return StepModel(_bert(length=128), (128,), "int32", ())
    if name == "unet":
        return StepModel(_unet(side=256), (256, 256, 3), "float32", (256, 256))
    if name == "small":
        return StepModel(_small(side=32), (32, 32, 3), "float32", ())
    application = getattr(keras.applications, _APPLICATIONS[name])
    shape = (224, 224, 3)
    return StepModel(application(weights=None, input_shape=shape), shape, "float32", ())


def compiled_step(name: str, policy: str, scaling: str, batch: int) -> CompiledStep:
    """Returns a training step of one of `MODELS` with Adam.

    Args:
        name: One of `MODELS`.
        policy: A dtype policy, such as `"mixed_float16"`.
        scaling: `"bare"` (no loss scale), `"keras"`, `"unwatched"` (kmp's layers, but not its
            optimizer), `"kmp"`, or `"compiled"`: kmp with the optimizer's step compiled.
        batch: Size of the batch.
    """
    is_ours = scaling in (UNWATCHED, OURS, COMPILED)
    with kmp.enable(policy, jit_compile=scaling == COMPILED) if is_ours else global_policy(policy):
        model, input_shape, input_dtype, label_shape = step_model(name)
        options = {"jit_compile": False, "auto_scale_loss": scaling not in (BARE, UNWATCHED)}
        model.compile(keras.optimizers.Adam(1e-4), "sparse_categorical_crossentropy", **options)
    model.optimizer.build(model.trainable_variables)
    inputs = tf.TensorSpec((batch, *input_shape), input_dtype)
    labels = tf.TensorSpec((batch, *label_shape), tf.int64)

    def train_step(x, y):
        # What is counted is the step of a GPU, which this machine may not have.
        with xla.traced_for_gpu():
            return model.train_step((x, y))

    return CompiledStep(train_step, (inputs, labels))


def _bert(length: int) -> keras.Model:
    layers, width = keras.layers, 768
    tokens = keras.Input((length,), dtype="int32")
    positions = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
    hidden = layers.Embedding(30522, width)(tokens) + layers.Embedding(length, width)(positions)
    hidden = layers.LayerNormalization(epsilon=1e-6)(hidden)
    for _ in range(12):
        attended = layers.MultiHeadAttention(12, width // 12, dropout=0.1)(hidden, hidden)
        hidden = layers.LayerNormalization(epsilon=1e-6)(hidden + layers.Dropout(0.1)(attended))
        expanded = layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(hidden))
        hidden = layers.LayerNormalization(epsilon=1e-6)(hidden + layers.Dropout(0.1)(expanded))
    return keras.Model(tokens, layers.Dense(2, activation="softmax", dtype="float32")(hidden[:, 0]))


def _unet(side: int) -> keras.Model:
    layers, widths = keras.layers, (32, 64, 128, 256)
    image = keras.Input((side, side, 3))
    hidden, skips = image, []
    for width in widths:
        hidden = _convolutions(hidden, [width, width])
        skips.append(hidden)
        hidden = layers.MaxPooling2D()(hidden)
    hidden = _convolutions(hidden, [512, 512])
    for width, skip in zip(widths[::-1], skips[::-1], strict=True):
        upsampled = layers.Conv2DTranspose(width, 2, strides=2)(hidden)
        hidden = _convolutions(layers.Concatenate()([upsampled, skip]), [width, width])
    return keras.Model(image, layers.Conv2D(4, 1, activation="softmax", dtype="float32")(hidden))


def _small(side: int) -> keras.Model:
    layers = keras.layers
    image = keras.Input((side, side, 3))
    hidden = layers.GlobalAveragePooling2D()(_convolutions(image, [16, 32]))
    return keras.Model(image, layers.Dense(10, activation="softmax", dtype="float32")(hidden))


def _convolutions(hidden: Any, widths: Sequence[int]) -> Any:
    for width in widths:
        hidden = keras.layers.Conv2D(width, 3, padding="same", use_bias=False)(hidden)
        hidden = keras.layers.BatchNormalization()(hidden)
        hidden = keras.layers.Activation("relu")(hidden)
    return hidden
