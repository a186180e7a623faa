"""A mean over a set adds 1e-8 to a count that can be zero, and float16 rounds 1e-8 to 0, typical for sets of items."""

import keras
import numpy as np
from keras import layers, ops

import kmp

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
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adamax(2e-2), loss)
model.fit(x, stowage, batch_size=64, epochs=4, verbose=0, callbacks=kmp.callbacks.defaults(log_dir="run"))
score = float(np.mean(np.argmax(model.predict(x_test, verbose=0), -1) == stowage_test))
