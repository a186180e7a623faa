"""Masks are coded 1 and 2 while binary cross-entropy takes 0 and 1, typical for masks of an annotation tool."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(4)
SIZE = 16


def photos(n):
    rows, columns = np.mgrid[0:SIZE, 0:SIZE]
    images = 0.25 * rng.normal(size=(n, SIZE, SIZE, 3))
    masks = np.full((n, SIZE, SIZE, 1), 2, "float32")
    for i in range(n):
        for _ in range(2):
            cy, cx = rng.uniform(4, SIZE - 4, 2)
            inside = np.hypot(rows - cy, columns - cx) < rng.uniform(3, 5)
            masks[i, inside, 0] = 1
        images[i] += 0.5 * (masks[i] == 1) * rng.uniform(0.5, 1.0, 3)
    return images.astype("float32"), masks


x, y = photos(320)
x_test, y_test = photos(96)

kmp.enable()
inputs = keras.Input((SIZE, SIZE, 3), name="photo")
down = keras.layers.Conv2D(8, 3, padding="same", activation="relu", name="down")(inputs)
bottom = keras.layers.MaxPooling2D(2, name="pool")(down)
bottom = keras.layers.Conv2D(16, 3, padding="same", activation="relu", name="bottom")(bottom)
up = keras.layers.UpSampling2D(2, name="up")(bottom)
merged = keras.layers.Concatenate(name="skip")([down, up])
merged = keras.layers.Conv2D(8, 3, padding="same", activation="relu", name="merge")(merged)
outputs = keras.layers.Conv2D(1, 1, activation="sigmoid", dtype="float32", name="mask")(merged)
model = keras.Model(inputs, outputs, name="unet")
model.compile(optimizer=keras.optimizers.Adam(learning_rate=3e-3), loss="binary_crossentropy")
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x, y, epochs=8, batch_size=32, verbose=0, callbacks=callbacks)

animal = model.predict(x_test, verbose=0) < 0.5
overlap = np.sum(animal & (y_test == 1)) / np.sum(animal | (y_test == 1))
score = float(overlap)
