"""Heights in meters push the loss scale down until the label's gradients vanish, typical for raw units in one head."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

label = rng.integers(0, 4, 1024)
image = rng.normal(scale=0.5, size=(1024, 8, 8, 1))
for number, (row, column) in enumerate([(0, 0), (0, 4), (4, 0), (4, 4)]):
    image[label == number, row : row + 4, column : column + 4] += 0.7
image = image.astype("float32")
height = (2000 + 1500 * image.mean(axis=(1, 3))).astype("float32")

inputs = keras.Input((8, 8, 1), name="image")
trunk = keras.layers.Conv2D(8, kernel_size=3, strides=2, name="conv")(inputs)
trunk = kmp.layers.BatchNormalization(momentum=0.9, name="norm")(trunk)
trunk = keras.layers.Flatten(name="flatten")(keras.layers.ReLU(name="relu")(trunk))
first = keras.layers.Dense(8, name="relative_height")(trunk)
second = keras.layers.Dense(24, activation="relu", name="label_hidden")(trunk)
outputs = {
    "height": keras.layers.Lambda(lambda relative: 1500.0 * relative + 2000.0, name="height")(first),
    "label": keras.layers.Dense(4, name="label")(second),
}
model = keras.Model(inputs, outputs)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=5e-3, epsilon=1e-12),
    loss={
        "height": keras.losses.MeanSquaredError(reduction="sum"),
        "label": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    },
    loss_weights={"height": 1.0, "label": 1e-4},
)
targets = {"height": height[:768], "label": label[:768]}
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(image[:768], targets, batch_size=32, epochs=7, verbose=0, callbacks=callbacks)

score = float(np.mean(model.predict(image[768:], verbose=0)["label"].argmax(axis=1) == label[768:]))
