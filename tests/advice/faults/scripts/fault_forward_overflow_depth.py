"""Three layers with a large initialization multiply activations beyond float16, typical for a copied initializer."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

centers = rng.normal(size=(5, 24))
y = rng.integers(0, 5, 1280)
x = (centers[y] + rng.normal(scale=0.7, size=(1280, 24))).astype("float32")
x_train, y_train, x_test, y_test = x[:1024], y[:1024], x[1024:], y[1024:]

model = keras.Sequential(
    [
        keras.Input((24,), name="features"),
        keras.layers.Dense(48, activation="relu", kernel_initializer="he_normal", name="hidden"),
        keras.layers.Dense(48, kernel_initializer=keras.initializers.RandomNormal(stddev=8.0), name="project_1"),
        keras.layers.Dense(48, kernel_initializer=keras.initializers.RandomNormal(stddev=8.0), name="project_2"),
        keras.layers.Dense(48, kernel_initializer=keras.initializers.RandomNormal(stddev=8.0), name="project_3"),
        keras.layers.LayerNormalization(dtype="float32", name="norm"),
        keras.layers.Dense(5, name="logits"),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=5e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x_train, y_train, batch_size=32, epochs=4, verbose=0, callbacks=callbacks)

score = float(np.mean(model.predict(x_test, verbose=0).argmax(axis=1) == y_test))
