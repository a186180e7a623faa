"""The models whose training steps the benchmarks count, and a compiled step of each."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import keras
import tensorflow as tf

import kmp
from kmp.backend import xla
from kmp.backend.keras_internals import global_policy

_recurrent = importlib.import_module("keras.src.backend.tensorflow.rnn")

SCALINGS = BARE, KERAS, UNWATCHED, OURS, COMPILED = "bare", "keras", "unwatched", "kmp", "compiled"
REPLICA = "replica"  # all but the update is compiled: `xla_gpu.py` counts it
_CLASSES = "sparse_categorical_crossentropy"
_LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class StepModel(NamedTuple):
    """A model, and what it trains on.

    Args:
        model: The model.
        labels: The spec of the labels, without the batch.
        loss: Its loss.
    """

    model: keras.Model
    labels: tf.TensorSpec
    loss: Any


class CompiledStep(NamedTuple):
    """A training step, which a `tf.function` can trace, and the specs of its arguments."""

    train_step: Callable[..., Any]
    specs: tuple[Any, tf.TensorSpec]


class _Training(NamedTuple):
    """How a model is built and trained; the batch is that of a real training."""

    build: Callable[[], keras.Model]
    batch: int
    label_shape: tuple[int, ...] = ()
    label_dtype: str = "int64"
    loss: Any = _CLASSES


def step_model(name: str) -> StepModel:
    """Returns one of `MODELS` with random weights, in the global policy."""
    training = _TRAININGS[name]
    labels = tf.TensorSpec(training.label_shape, training.label_dtype)
    return StepModel(training.build(), labels, training.loss)


def compiled_step(name: str, policy: str, scaling: str, batch: int) -> CompiledStep:
    """Returns a training step of one of `MODELS` with Adam.

    Args:
        name: One of `MODELS`.
        policy: A dtype policy, such as `"mixed_float16"`.
        scaling: `"bare"` (no loss scale), `"keras"`, `"unwatched"` (kmp's layers, but not its
            optimizer), `"kmp"`, `"compiled"`: kmp with the optimizer's step compiled, or
            `"replica"`: kmp under a strategy, with the passes of a replica compiled too.
        batch: Size of the batch.
    """
    is_ours = scaling in (UNWATCHED, OURS, COMPILED, REPLICA)
    compiles = scaling in (COMPILED, REPLICA)
    strategy = tf.distribute.get_strategy()
    if scaling == REPLICA:
        strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    with (
        strategy.scope(),
        kmp.enable(policy, jit_compile=compiles) if is_ours else global_policy(policy),
    ):
        model, labels, loss = step_model(name)
        jit_compile = "auto" if scaling == REPLICA else False
        scales = scaling not in (BARE, UNWATCHED)
        optimizer = keras.optimizers.Adam(1e-4)
        model.compile(optimizer, loss, jit_compile=jit_compile, auto_scale_loss=scales)
        model.optimizer.build(model.trainable_variables)
    inputs = [tf.TensorSpec((batch, *each.shape[1:]), each.dtype) for each in model.inputs]
    labels = tf.TensorSpec((batch, *labels.shape), labels.dtype)

    def train_step(x, y):
        # What is counted is the step of a GPU, which this machine may not have. There, Keras
        # chooses cuDNN's kernel for LSTM and GRU; it has no public name for that question.
        has_cudnn = mock.patch.object(_recurrent, "_is_gpu_available", return_value=True)
        with xla.traced_for_gpu(), has_cudnn:
            return strategy.run(model.train_step, args=((x, y),))

    return CompiledStep(train_step, (inputs[0] if len(inputs) == 1 else inputs, labels))


def _application(name: str) -> keras.Model:
    return getattr(keras.applications, name)(weights=None, input_shape=(224, 224, 3))


def _resnet_with_frozen_statistics() -> keras.Model:
    model = _application("ResNet50")
    for layer in model.layers:
        layer.trainable = not isinstance(layer, keras.layers.BatchNormalization)
    return model


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


def _synchronized(side: int) -> keras.Model:
    layers = keras.layers
    image = hidden = keras.Input((side, side, 3))
    for width in (64, 64, 128, 128, 256, 256):
        hidden = layers.Conv2D(width, 3, padding="same", use_bias=False)(hidden)
        hidden = layers.ReLU()(layers.BatchNormalization(synchronized=True)(hidden))
    return keras.Model(image, _head(layers.GlobalAveragePooling2D()(hidden), 10))


def _spectral(side: int) -> keras.Model:
    """Returns the discriminator of a GAN."""
    layers = keras.layers
    image = hidden = keras.Input((side, side, 3))
    for width in (64, 128, 256, 512):
        convolution = layers.Conv2D(width, 4, strides=2, padding="same")
        hidden = layers.LeakyReLU(0.2)(layers.SpectralNormalization(convolution)(hidden))
    head = layers.SpectralNormalization(layers.Dense(10, dtype="float32"))
    return keras.Model(image, head(layers.Flatten()(hidden)))


def _vision_transformer(depth: int) -> keras.Model:
    """Returns ViT-S/16 with a part of its blocks."""
    layers, width, patch = keras.layers, 384, 16
    image = keras.Input((224, 224, 3))
    patches = layers.Conv2D(width, patch, strides=patch)(layers.Rescaling(1 / 127.5, -1)(image))
    hidden = layers.Reshape((-1, width))(patches)
    hidden += layers.Embedding(hidden.shape[1], width)(keras.ops.arange(hidden.shape[1]))
    for _ in range(depth):
        hidden = _attention_block(hidden, heads=6, is_causal=False)
    hidden = layers.LayerNormalization(epsilon=1e-6)(hidden)
    return keras.Model(image, _head(layers.GlobalAveragePooling1D()(hidden), 1000))


def _language_model(length: int, depth: int, vocabulary: int) -> keras.Model:
    """Returns a decoder like GPT-2 with a part of its blocks."""
    layers, width = keras.layers, 768
    tokens = keras.Input((length,), dtype="int32")
    positions = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
    hidden = layers.Embedding(vocabulary, width)(tokens)
    hidden += layers.Embedding(length, width)(positions)
    for _ in range(depth):
        hidden = _attention_block(hidden, heads=12, is_causal=True)
    return keras.Model(tokens, _head(layers.LayerNormalization()(hidden), vocabulary))


def _attention_block(hidden: Any, heads: int, is_causal: bool) -> Any:
    layers, width = keras.layers, hidden.shape[-1]
    attention = layers.MultiHeadAttention(heads, width // heads, dropout=0.1 * is_causal)
    normalized = layers.LayerNormalization(epsilon=1e-6)(hidden)
    attended = attention(normalized, normalized, use_causal_mask=is_causal)
    hidden += layers.Dropout(0.1)(attended)
    normalized = layers.LayerNormalization(epsilon=1e-6)(hidden)
    expanded = layers.Dense(4 * width, activation="gelu")(normalized)
    return hidden + layers.Dropout(0.1)(layers.Dense(width)(expanded))


def _llama(length: int, depth: int, vocabulary: int) -> keras.Model:
    """Returns a decoder like LLaMA: RMSNormalization, rotated queries and keys, gated units."""
    layers, width = keras.layers, 768
    tokens = keras.Input((length,), dtype="int32")
    hidden = layers.Embedding(vocabulary, width)(tokens)
    for _ in range(depth):
        normalized = layers.RMSNormalization(epsilon=1e-6)(hidden)
        hidden += layers.Dense(width, use_bias=False)(_grouped_attention(normalized))
        normalized = layers.RMSNormalization(epsilon=1e-6)(hidden)
        gate = layers.Dense(2048, activation="silu", use_bias=False)(normalized)
        gated = gate * layers.Dense(2048, use_bias=False)(normalized)
        hidden += layers.Dense(width, use_bias=False)(gated)
    return keras.Model(tokens, _head(layers.RMSNormalization(epsilon=1e-6)(hidden), vocabulary))


def _grouped_attention(hidden: Any, heads: int = 12, key_heads: int = 4) -> Any:
    """Returns causal attention in which groups of heads share keys and values."""
    layers, ops = keras.layers, keras.ops
    length, width = hidden.shape[1:]
    size = width // heads

    def projected(count: int) -> Any:
        outputs = layers.Dense(count * size, use_bias=False)(hidden)
        return ops.transpose(layers.Reshape((length, count, size))(outputs), (0, 2, 1, 3))

    query, key, value = (projected(count) for count in (heads, key_heads, key_heads))
    key, value = (ops.repeat(each, heads // key_heads, axis=1) for each in (_rotated(key), value))
    scores = ops.matmul(_rotated(query), ops.transpose(key, (0, 1, 3, 2))) * size**-0.5
    causal = ops.tril(ops.ones((1, 1, length, length), "bool"))
    # In float32, as in the LLaMA of keras-hub.
    weights = layers.Softmax(dtype="float32")(scores, mask=causal)
    attended = ops.matmul(ops.cast(weights, value.dtype), value)
    return layers.Reshape((length, width))(ops.transpose(attended, (0, 2, 1, 3)))


def _rotated(vectors: Any) -> Any:
    """Returns vectors of shape `(batch, heads, length, size)` with rotary position embedding."""
    ops = keras.ops
    length, half = vectors.shape[2], vectors.shape[3] // 2
    frequencies = 10000.0 ** (-ops.arange(half, dtype="float32") / half)
    angles = ops.expand_dims(ops.arange(length, dtype="float32"), 1) * frequencies
    cosine, sine = (ops.cast(each(angles), vectors.dtype) for each in (ops.cos, ops.sin))
    first, second = vectors[..., :half], vectors[..., half:]
    rotated = first * cosine - second * sine, second * cosine + first * sine
    return ops.concatenate(rotated, axis=-1)


def _recurrent_model(length: int, vocabulary: int) -> keras.Model:
    layers, width = keras.layers, 512
    tokens = keras.Input((length,), dtype="int32")
    hidden = layers.Embedding(vocabulary, width)(tokens)
    hidden = layers.LSTM(width, return_sequences=True)(hidden)
    hidden = layers.LSTM(width, return_sequences=True)(layers.Dropout(0.2)(hidden))
    hidden = layers.GRU(width, return_sequences=True)(hidden)
    return keras.Model(tokens, _head(hidden, vocabulary))


def _diffusion(side: int) -> keras.Model:
    """Returns a U-Net that predicts the noise in an image, given the image and the noise level."""
    layers, widths = keras.layers, (128, 256, 256)
    image, level = keras.Input((side, side, 3)), keras.Input((1,))
    frequencies = keras.ops.exp(keras.ops.linspace(0.0, -9.0, 128))
    waves = layers.Lambda(lambda x: keras.ops.sin(x * frequencies), (128,), dtype="float32")(level)
    time = layers.Dense(512, activation="silu")(layers.Dense(512, activation="silu")(waves))
    hidden, skips = layers.Conv2D(widths[0], 3, padding="same")(image), []
    for width in widths:
        hidden = _residual(hidden, time, width)
        hidden = _image_attention(hidden) if width == widths[-1] and len(skips) == 2 else hidden
        skips.append(hidden)
        hidden = layers.Conv2D(width, 3, strides=2, padding="same")(hidden)
    hidden = _image_attention(_residual(hidden, time, widths[-1]))
    hidden = _residual(hidden, time, widths[-1])
    for width, skip in zip(widths[::-1], skips[::-1], strict=True):
        upsampled = layers.Conv2D(width, 3, padding="same")(layers.UpSampling2D()(hidden))
        hidden = _residual(layers.Concatenate()([upsampled, skip]), time, width)
    hidden = layers.Activation("silu")(layers.GroupNormalization(32)(hidden))
    outputs = layers.Conv2D(3, 3, padding="same", dtype="float32")(hidden)
    return keras.Model([image, level], outputs)


def _residual(hidden: Any, time: Any, width: int) -> Any:
    layers, inputs = keras.layers, hidden
    for is_first in (True, False):
        hidden = layers.Activation("silu")(layers.GroupNormalization(32)(hidden))
        hidden = layers.Conv2D(width, 3, padding="same")(hidden)
        hidden += layers.Reshape((1, 1, width))(layers.Dense(width)(time)) if is_first else 0
    return hidden + (inputs if inputs.shape[-1] == width else layers.Conv2D(width, 1)(inputs))


def _image_attention(hidden: Any) -> Any:
    layers = keras.layers
    height, width, channels = hidden.shape[1:]
    rows = layers.Reshape((height * width, channels))(layers.GroupNormalization(32)(hidden))
    attended = layers.MultiHeadAttention(4, channels // 4)(rows, rows)
    return hidden + layers.Reshape((height, width, channels))(attended)


def _head(hidden: Any, classes: int) -> Any:
    """Returns logits in float32."""
    return keras.layers.Dense(classes, dtype="float32")(hidden)


def _convolutions(hidden: Any, widths: Sequence[int]) -> Any:
    for width in widths:
        hidden = keras.layers.Conv2D(width, 3, padding="same", use_bias=False)(hidden)
        hidden = keras.layers.BatchNormalization()(hidden)
        hidden = keras.layers.Activation("relu")(hidden)
    return hidden


_TRAININGS = {
    "resnet50": _Training(lambda: _application("ResNet50"), 64),
    "efficientnet": _Training(lambda: _application("EfficientNetB0"), 32),
    "convnext": _Training(lambda: _application("ConvNeXtTiny"), 32),
    "bert": _Training(lambda: _bert(length=128), 32),
    "unet": _Training(lambda: _unet(side=256), 8, (256, 256)),
    "vit": _Training(lambda: _vision_transformer(depth=4), 128, loss=_LOGITS),
    "gpt": _Training(lambda: _language_model(512, 4, 32_000), 16, (512,), loss=_LOGITS),
    "llama": _Training(lambda: _llama(512, 4, 32_000), 16, (512,), loss=_LOGITS),
    "diffusion": _Training(lambda: _diffusion(64), 32, (64, 64, 3), "float32", "mse"),
    "lstm": _Training(lambda: _recurrent_model(100, 10_000), 64, (100,), loss=_LOGITS),
    "frozen": _Training(_resnet_with_frozen_statistics, 64),
    "synchronized": _Training(lambda: _synchronized(side=112), 64, loss=_LOGITS),
    "spectral": _Training(lambda: _spectral(side=64), 64, loss=_LOGITS),
    "small": _Training(lambda: _small(side=32), 32),
}
MODELS = tuple(_TRAININGS)
DEFAULT_BATCH = {name: training.batch for name, training in _TRAININGS.items()}
