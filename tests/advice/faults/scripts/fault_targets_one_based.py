"""Labels count from 1 while the classes count from 0, typical for labels exported from MATLAB or R."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

quadrant = rng.integers(1, 5, 1024)
images = rng.normal(scale=0.4, size=(1024, 8, 8, 1))
for number, (row, column) in enumerate([(0, 0), (0, 4), (4, 0), (4, 4)], start=1):
    images[quadrant == number, row : row + 4, column : column + 4] += 0.8
images = images.astype("float32")
labels = quadrant
x_train, y_train, x_test, y_test = images[:768], labels[:768], images[768:], labels[768:]

model = keras.Sequential(
    [
        keras.Input((8, 8, 1), name="image"),
        keras.layers.Conv2D(8, kernel_size=3, strides=2, name="conv"),
        kmp.layers.BatchNormalization(momentum=0.9, name="norm"),
        keras.layers.ReLU(name="relu"),
        keras.layers.Flatten(name="flatten"),
        keras.layers.Dense(4, name="quadrant"),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=5e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    jit_compile=True,
)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x_train, y_train, batch_size=32, epochs=5, verbose=0, callbacks=callbacks)

score = float(np.mean(model.predict(x_test, verbose=0).argmax(axis=1) == y_test))
