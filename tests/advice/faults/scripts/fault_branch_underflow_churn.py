"""The churn head has a weight of 1e-6 at a fixed loss scale of 1, typical for a minor head and a copied setting."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable(loss_scale=1.0)

x = rng.normal(size=(1280, 12)).astype("float32")
spending = (x[:, 0] + np.sin(2 * x[:, 1]))[:, None].astype("float32")
churn = (x[:, 2] + 0.5 * x[:, 3] ** 2 > 0.5).astype("float32")[:, None]

inputs = keras.Input((12,), name="customer")
trunk = keras.layers.Dense(64, activation="relu", name="trunk")(inputs)
first = keras.layers.Dense(32, activation="relu", name="spending_hidden")(trunk)
second = keras.layers.Dense(32, activation="relu", name="churn_hidden")(trunk)
outputs = {
    "spending": keras.layers.Dense(1, name="spending")(first),
    "churn": keras.layers.Dense(1, name="churn")(second),
}
model = keras.Model(inputs, outputs)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=5e-3, epsilon=1e-12),
    loss={"spending": keras.losses.MeanSquaredError(), "churn": keras.losses.BinaryCrossentropy(from_logits=True)},
    loss_weights={"spending": 1.0, "churn": 1e-6},
)
model.fit(
    x[:1024],
    {"spending": spending[:1024], "churn": churn[:1024]},
    batch_size=32,
    epochs=10,
    verbose=0,
    callbacks=kmp.callbacks.defaults(log_dir="run"),
)

found = model.predict(x[1024:], verbose=0)["churn"] > 0
score = float(np.mean(found == (churn[1024:] > 0)))
