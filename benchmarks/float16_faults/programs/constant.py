"""Constants that float16 rounds to 0 or to Inf."""

import keras
import numpy as np
from keras import layers, ops

import kmp
from float16_faults.programs.frame import (
    MaskedAttention,
    accuracy,
    crossentropy,
    sign_accuracy,
    text_classifier,
    texts,
)


def fault_constant_mask(rng, callbacks):
    """An attention multiplies its mask with -1e9, which is -inf in float16.

    Typical for code written for float32.
    """

    class Attention(MaskedAttention):
        def mask(self, scores, is_word):
            return scores + (1.0 - is_word) * -1e9

    kmp.enable()

    data, y = texts(rng)

    model = text_classifier(Attention(units=16, name="masked_attention"))
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss=crossentropy())
    model.fit(data, y, batch_size=32, epochs=5, verbose=0, callbacks=callbacks)
    return accuracy(model, data, y)


def fault_constant_normalize(rng, callbacks):
    """The epsilon of a normalization by hand is zero in float16, so blank images divide 0 by 0.

    Typical for NumPy code.
    """

    class Standardize(keras.layers.Layer):
        def __init__(self, epsilon=1e-12, **kwargs):
            super().__init__(**kwargs)
            self.epsilon = epsilon

        def call(self, images):
            mean = ops.mean(images, axis=(1, 2, 3), keepdims=True)
            variance = ops.mean(ops.square(images - mean), axis=(1, 2, 3), keepdims=True)
            return (images - mean) / ops.sqrt(variance + self.epsilon)

    kmp.enable()

    y = rng.integers(0, 4, 1024)
    images = rng.normal(scale=0.3, size=(1024, 8, 8, 1))
    for number, (row, column) in enumerate([(0, 0), (0, 4), (4, 0)]):
        images[y == number, row : row + 4, column : column + 4] += 0.6
    images[y == 3] = 0.0
    images = images.astype("float32")
    x_train, y_train, x_test, y_test = images[:768], y[:768], images[768:], y[768:]

    inputs = keras.Input((8, 8, 1), name="image")
    hidden = Standardize(epsilon=1e-12, name="standardize")(inputs)
    hidden = keras.layers.Conv2D(8, kernel_size=3, strides=2, activation="relu", name="conv")(
        hidden
    )
    hidden = keras.layers.Flatten(name="flatten")(hidden)
    logits = keras.layers.Dense(4, name="logits")(hidden)
    model = keras.Model(inputs, logits)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=3e-3), loss=crossentropy())
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=5,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x_test, y_test)


def fault_constant_empty_set(rng, callbacks):
    """A mean over a set adds 1e-8 to a count that can be zero, and float16 rounds 1e-8 to 0.

    Typical for sets that may be empty.
    """
    keras.utils.set_random_seed(41)
    kmp.enable()

    class ParcelMean(layers.Layer):
        def call(self, parcels, present):
            present = ops.expand_dims(ops.cast(present, parcels.dtype), -1)
            return ops.sum(parcels * present, axis=1) / (ops.sum(present, axis=1) + 1e-8)

    class ManifestNet(keras.Model):
        def __init__(self):
            super().__init__(name="manifest_net")
            self.parcel = layers.Dense(24, "elu", name="parcel")
            self.parcel_mean = ParcelMean(name="parcel_mean")
            self.hold = layers.Dense(24, "elu", name="hold")
            self.stowage = layers.Dense(3, dtype="float32", name="stowage")

        def call(self, inputs):
            pooled = self.parcel_mean(self.parcel(inputs["parcels"]), inputs["present"])
            return self.stowage(self.hold(pooled))

    def manifests(n, slots=12):
        parcels = np.random.normal(0, 1, (n, slots, 5)).astype("float32")
        count = np.random.randint(1, slots + 1, n)
        count[np.random.rand(n) < 0.06] = 0  # sails in ballast
        present = np.arange(slots)[None] < count[:, None]
        mean = (parcels * present[..., None]).sum(1) / np.maximum(count, 1)[:, None]
        trim = mean[:, 0] + np.abs(mean[:, 1]) - 0.25
        return {"parcels": parcels, "present": present}, np.digitize(trim, [-0.15, 0.15])

    x, stowage = manifests(3200)
    x_test, stowage_test = manifests(1000)
    model = ManifestNet()
    model.compile(keras.optimizers.Adamax(2e-2), crossentropy())
    model.fit(x, stowage, batch_size=64, epochs=4, verbose=0, callbacks=callbacks)
    return accuracy(model, x_test, stowage_test)


def fault_constant_average(rng, callbacks):
    """A masked mean adds 1e-10 to a count that can be zero, which float16 rounds to zero.

    Typical for empty texts.
    """

    class MaskedAverage(keras.layers.Layer):
        def call(self, embedded, is_word):
            total = ops.sum(embedded * is_word[:, :, None], axis=1)
            return total / (ops.sum(is_word, axis=1, keepdims=True) + 1e-10)

    kmp.enable()

    length = rng.integers(0, 9, 1280)
    is_word = (np.arange(8) < length[:, None]).astype("float32")
    tokens = (rng.integers(1, 50, size=(1280, 8)) * is_word).astype("int32")
    meaning = rng.normal(size=50)
    y = ((meaning[tokens] * is_word).sum(axis=1) > 0).astype("float32")[:, None]
    train = {"tokens": tokens[:1024], "is_word": is_word[:1024]}
    test = {"tokens": tokens[1024:], "is_word": is_word[1024:]}

    token_input, word_input = (
        keras.Input((8,), dtype="int32", name="tokens"),
        keras.Input((8,), name="is_word"),
    )
    embedded = keras.layers.Embedding(50, 12, name="embedding")(token_input)
    averaged = MaskedAverage(name="masked_average")(embedded, word_input)
    hidden = keras.layers.Dense(16, activation="relu", name="hidden")(averaged)
    logit = keras.layers.Dense(1, name="logit")(hidden)
    model = keras.Model({"tokens": token_input, "is_word": word_input}, logit)
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=1e-2),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    model.fit(train, y[:1024], batch_size=32, epochs=5, verbose=0, callbacks=callbacks)
    return sign_accuracy(model, test, y[1024:])
