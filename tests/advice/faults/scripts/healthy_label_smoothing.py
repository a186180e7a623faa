"""Sound: label smoothing and noisy labels, which keep the loss far above zero."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

quadrant = rng.integers(0, 4, 1024)
images = rng.normal(scale=0.4, size=(1024, 8, 8, 1))
for number, (row, column) in enumerate([(0, 0), (0, 4), (4, 0), (4, 4)]):
    images[quadrant == number, row : row + 4, column : column + 4] += 0.8
images = images.astype("float32")
noisy = np.where(rng.random(1024) < 0.1, rng.integers(0, 4, 1024), quadrant)
one_hot = np.eye(4, dtype="float32")[noisy]

model = keras.Sequential(
    [
        keras.Input((8, 8, 1), name="image"),
        keras.layers.Conv2D(8, kernel_size=3, strides=2, name="conv"),
        keras.layers.BatchNormalization(momentum=0.9, name="norm"),
        keras.layers.ReLU(name="relu"),
        keras.layers.Flatten(name="flatten"),
        keras.layers.Dense(4, name="logits"),
        kmp.layers.Softmax(name="quadrant"),
    ]
)
model.compile(
    optimizer=keras.optimizers.AdamW(learning_rate=5e-3, weight_decay=1e-3),
    loss=keras.losses.CategoricalCrossentropy(label_smoothing=0.1),
)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(images[:768], one_hot[:768], batch_size=32, epochs=4, verbose=0, callbacks=callbacks)

score = float(np.mean(model.predict(images[768:], verbose=0).argmax(axis=1) == quadrant[768:]))
