"""A fixed loss scale of 2^24 overflows in every step, typical for the belief that larger is safer."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable(loss_scale=2.0**24)

is_vertical = rng.integers(0, 2, 1024)
images = rng.normal(scale=0.6, size=(1024, 8, 8, 1))
position = rng.integers(0, 8, 1024)
for image, vertical, line in zip(images, is_vertical, position, strict=True):
    image[:, line] += 1.5 * vertical
    image[line, :] += 1.5 * (1 - vertical)
images = images.astype("float32")

model = keras.Sequential(
    [
        keras.Input((8, 8, 1), name="image"),
        keras.layers.Conv2D(8, kernel_size=5, padding="same", name="conv"),
        kmp.layers.BatchNormalization(momentum=0.9, name="norm"),
        keras.layers.ReLU(name="relu"),
        keras.layers.GlobalMaxPooling2D(name="pool"),
        keras.layers.Dense(2, name="logits"),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=1e-2),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(images[:768], is_vertical[:768], batch_size=32, epochs=5, verbose=0, callbacks=callbacks)

score = float(np.mean(model.predict(images[768:], verbose=0).argmax(axis=1) == is_vertical[768:]))
