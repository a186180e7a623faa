"""How much larger the outputs of layers are for other batches, and after training.

    python benchmarks/output_growth.py

This is the evidence for the headroom of measured ranges in `kmp/numerics/interpreter.py`.
"""

import os
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import layers, ops

import kmp

BATCH = 32
CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def normalized_network() -> keras.Model:
    inputs = hidden = keras.Input((16, 16, 3))
    for filters in (16, 32):
        hidden = layers.Conv2D(filters, 3, padding="same", use_bias=False)(hidden)
        hidden = layers.ReLU()(layers.BatchNormalization()(hidden))
        hidden = layers.MaxPooling2D()(hidden)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(hidden)))


def plain_network() -> keras.Model:
    inputs = hidden = keras.Input((16, 16, 3))
    for filters in (16, 32):
        hidden = layers.Conv2D(filters, 3, activation="relu", padding="same")(hidden)
        hidden = layers.MaxPooling2D()(hidden)
    hidden = layers.Dense(64, "relu")(layers.Flatten()(hidden))
    return keras.Model(inputs, layers.Dense(10)(hidden))


def transformer() -> keras.Model:
    inputs = keras.Input((16,), dtype="int32")
    hidden = layers.Embedding(50, 32)(inputs)
    for _ in range(2):
        normalized = layers.LayerNormalization()(hidden)
        query, key, value = (layers.Dense(32)(normalized) for _ in range(3))
        scores = ops.matmul(query, ops.transpose(key, (0, 2, 1))) / 32**0.5
        hidden = hidden + layers.Dense(32)(ops.matmul(ops.softmax(scores), value))
        wide = layers.Dense(64, "gelu")(layers.LayerNormalization()(hidden))
        hidden = hidden + layers.Dense(32)(wide)
    return keras.Model(inputs, layers.Dense(50)(hidden))


def regression() -> keras.Model:
    hidden = [layers.Dense(64, "relu") for _ in range(4)]
    return keras.Sequential([keras.Input((8,)), *hidden, layers.Dense(1)])


def largest_outputs(model: keras.Model, batch: np.ndarray) -> dict[str, float]:
    """Returns the largest magnitude of the outputs of each layer and operation."""
    return {row.path: row.amax for row in kmp.audit(model, batch).rows if row.amax}


def growth(before: dict[str, float], after: dict[str, float]) -> list[float]:
    return [after[path] / before[path] for path in before.keys() & after.keys()]


def run(make: Callable[[], keras.Model], x: np.ndarray, y: np.ndarray, loss: object) -> None:
    keras.utils.set_random_seed(1)
    model = make()
    first, *others = (largest_outputs(model, x[i : i + BATCH]) for i in range(0, 1800, 200))
    between_batches = max(max(growth(first, other)) for other in others)
    model.compile("adam", loss)
    model.fit(x, y, batch_size=BATCH, epochs=8, verbose=0)
    of_training = growth(first, largest_outputs(model, x[:BATCH]))
    print(
        f"{make.__name__:20s} other batches: up to {between_batches:.1f} times as large;"
        f" trained: median {np.median(of_training):.1f}, up to {max(of_training):.1f} times"
    )


def main() -> None:
    numbers = np.random.default_rng(0)
    images = numbers.normal(size=(2048, 16, 16, 3)).astype("float32")
    classes = (images.mean((1, 2)) @ numbers.normal(size=(3, 10))).argmax(1)
    tokens = numbers.integers(0, 50, (2048, 16))
    rows = 3.0 * numbers.normal(size=(2048, 8)).astype("float32")
    run(normalized_network, images, classes, CROSSENTROPY)
    run(plain_network, images, classes, CROSSENTROPY)
    run(transformer, tokens, (7 * tokens + 3) % 50, CROSSENTROPY)
    run(regression, rows, np.square(rows).sum(1, keepdims=True), "mse")


if __name__ == "__main__":
    main()
