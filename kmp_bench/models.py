"""The models that are trained, and what measures their steps."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kmp import layers
from kmp.backend.keras_internals import global_policy, sublayers
from kmp.guarding.guarded_step import guard_train_step
from kmp.layers.fused_calls import use_fused_call
from kmp.optimizer import LossScaleOptimizer
from kmp.utils.float_formats import FLOAT32
from kmp_bench.fit_timer import Blocks, time_fit
from kmp_bench.measurement import MODES

# How the loss is scaled.
BARE, KERAS, OURS = "bare", "Keras", "kmp"


class Task(NamedTuple):
    """A model and the batch that it is trained on.

    Args:
        build: Returns the model, not compiled.
        x: A batch of inputs.
        y: Integer labels.
        unit: Unit of the throughput: `"images/s"` or `"tokens/s"`.
        units: Images or tokens per batch.
    """

    build: Callable[[], keras.Model]
    x: np.ndarray
    y: np.ndarray
    unit: str
    units: int


def mlp(width: int, batch: int = 128) -> Task:
    """Returns a task for four dense layers of a width."""
    x = np.random.default_rng(0).normal(size=(batch, width)).astype("float32")

    def build() -> keras.Model:
        hidden = [keras.layers.Dense(width, activation="relu") for _ in range(4)]
        return keras.Sequential(
            [keras.Input((width,)), *hidden, keras.layers.Dense(10), layers.Softmax()]
        )

    return Task(build, x, np.arange(batch) % 10, "images/s", batch)


def convolutional(channels: int, batch: int = 32) -> Task:
    """Returns a task for three convolutions with BatchNormalization.

    Args:
        channels: The channels of the first one; each has twice as many as the one before.
        batch: Images per batch.
    """
    x = np.random.default_rng(0).normal(size=(batch, 32, 32, 3)).astype("float32")

    def build() -> keras.Model:
        blocks = []
        for width in (channels, 2 * channels, 4 * channels):
            blocks.append(keras.layers.Conv2D(width, 3, strides=2, padding="same", use_bias=False))
            blocks += [keras.layers.BatchNormalization(), keras.layers.Activation("relu")]
        head = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10), layers.Softmax()]
        return keras.Sequential([keras.Input((32, 32, 3)), *blocks, *head])

    return Task(build, x, np.arange(batch) % 10, "images/s", batch)


def transformer(width: int, batch: int = 8) -> Task:
    """Returns a task for a transformer block of a width that predicts the next of 64 tokens."""
    length, vocabulary = 64, 1000
    x = np.random.default_rng(0).integers(0, vocabulary, (batch, length))

    def build() -> keras.Model:
        tokens = keras.Input((length,), dtype="int32")
        hidden = keras.layers.Embedding(vocabulary, width)(tokens)
        normed = keras.layers.LayerNormalization()(hidden)
        attention = keras.layers.MultiHeadAttention(4, width // 4)
        hidden = hidden + attention(normed, normed, use_causal_mask=True)
        normed = keras.layers.LayerNormalization()(hidden)
        expanded = keras.layers.Dense(4 * width, activation="gelu")(normed)
        hidden = hidden + keras.layers.Dense(width)(expanded)
        logits = keras.layers.Dense(vocabulary)(hidden)
        return keras.Model(tokens, layers.Softmax()(logits))

    return Task(build, x, np.roll(x, -1, axis=1), "tokens/s", batch * length)


def resnet50(batch: int, side: int) -> Task:
    """Returns a task for ResNet-50 on square images."""
    random = np.random.default_rng(0)

    def build() -> keras.Model:
        images = keras.Input((side, side, 3))
        scaled = keras.layers.Rescaling(1 / 127.5, offset=-1.0)(images)
        options = {"weights": None, "classifier_activation": None}
        network = keras.applications.ResNet50(input_tensor=scaled, **options)
        return keras.Model(images, layers.Softmax()(network.output))

    x = random.integers(0, 256, (batch, side, side, 3), dtype="uint8")
    return Task(build, x, random.integers(0, 1000, batch), "images/s", batch)


def bert(batch: int, length: int) -> Task:
    """Returns a task for BERT-base with a classifier, without dropout.

    It has 12 blocks of width 768 with 12 heads.
    """
    vocabulary, width, random = 30522, 768, np.random.default_rng(0)

    def build() -> keras.Model:
        tokens = keras.Input((length,), dtype="int32")
        positions = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
        of_tokens = keras.layers.Embedding(vocabulary, width)(tokens)
        of_positions = keras.layers.Embedding(length, width)(positions)
        hidden = of_tokens + of_positions
        hidden = keras.layers.LayerNormalization(epsilon=1e-6)(hidden)
        for _ in range(12):
            attended = keras.layers.MultiHeadAttention(12, width // 12)(hidden, hidden)
            hidden = keras.layers.LayerNormalization(epsilon=1e-6)(hidden + attended)
            expanded = keras.layers.Dense(4 * width, activation="gelu")(hidden)
            projected = keras.layers.Dense(width)(expanded)
            hidden = keras.layers.LayerNormalization(epsilon=1e-6)(hidden + projected)
        pooled = keras.layers.Dense(width, activation="tanh")(hidden[:, 0])
        logits = keras.layers.Dense(2)(pooled)
        return keras.Model(tokens, layers.Softmax()(logits))

    tokens = random.integers(0, vocabulary, (batch, length))
    return Task(build, tokens, np.arange(batch) % 2, "tokens/s", batch * length)


def compiled_model(task: Task, policy: str, scaling: str, mode: str) -> keras.Model:
    """Returns a new compiled model of a task.

    Scaling is `BARE`, `KERAS` or `OURS`; the mode is one of `MODES`. In 16 bits, the model has the
    fused normalization of `kmp.enable`, unless the scaling is that of Keras.
    """
    with global_policy(policy):
        model = task.build()
    if policy != FLOAT32.name and scaling != KERAS:
        for layer in sublayers(model):
            use_fused_call(layer)
    optimizer: keras.optimizers.Optimizer = keras.optimizers.Adam(1e-4)
    if scaling != BARE:
        keras_class = keras.optimizers.LossScaleOptimizer
        wrap = keras_class if scaling == KERAS else LossScaleOptimizer
        optimizer = wrap(optimizer)
    options = {"jit_compile": MODES[mode], "auto_scale_loss": False}
    model.compile(optimizer, "sparse_categorical_crossentropy", **options)
    if scaling == OURS:
        guard_train_step(model)
    return model


def timed_training(
    model: keras.Model, task: Task, steps: int, callbacks: Sequence[keras.callbacks.Callback] = ()
) -> Callable[[], float]:
    """Returns a function that continues the training and returns the mean seconds of a step."""
    data = tf.data.Dataset.from_tensors((task.x, task.y)).cache().repeat()
    blocks = Blocks(warm_up=1, count=1, steps=steps)  # the first step has the start of `fit`
    return lambda: time_fit(model, data, blocks, callbacks).seconds[0]
