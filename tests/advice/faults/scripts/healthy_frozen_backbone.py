"""Sound: transfer learning with a frozen convolution and BatchNormalization; only the head is trained."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

y = rng.integers(0, 4, 1024)
images = rng.normal(scale=0.4, size=(1024, 8, 8, 1))
for number, (row, column) in enumerate([(0, 0), (0, 4), (4, 0), (4, 4)]):
    images[y == number, row : row + 4, column : column + 4] += 0.6
images = images.astype("float32")
x_train, y_train, x_test, y_test = images[:768], y[:768], images[768:], y[768:]

backbone = keras.Sequential(
    [
        keras.Input((8, 8, 1), name="image"),
        keras.layers.Conv2D(12, kernel_size=3, strides=2, name="conv"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.ReLU(name="relu"),
        keras.layers.Flatten(name="flatten"),
    ],
    name="backbone",
)
backbone.trainable = False
model = keras.Sequential(
    [
        keras.Input((8, 8, 1), name="picture"),
        backbone,
        keras.layers.Dense(24, activation="relu", name="hidden"),
        keras.layers.Dense(4, name="logits"),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=3e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x_train, y_train, batch_size=32, epochs=5, verbose=0, callbacks=callbacks)

score = float(np.mean(model.predict(x_test, verbose=0).argmax(axis=1) == y_test))
