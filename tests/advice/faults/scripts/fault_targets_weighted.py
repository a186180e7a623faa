"""Missing labels are NaN with a sample weight of 0, and 0 times NaN is NaN, typical for a port from pandas."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
kmp.enable()
rng = np.random.default_rng(0)

voice = rng.normal(size=(3000, 12)).astype("float32")
valence = np.tanh(voice[:, 0] + voice[:, 1]) + 0.1 * rng.normal(size=3000)
arousal = np.tanh(voice[:, 2] - voice[:, 3]) + 0.3 * voice[:, 4] + 0.1 * rng.normal(size=3000)
valence, arousal = valence.astype("float32")[:, None], arousal.astype("float32")[:, None]
rated = rng.random(2500) > 0.2
arousal_train = arousal[:2500].copy()
arousal_train[~rated] = np.nan
x, y = voice[:2500], {"valence": valence[:2500], "arousal": arousal_train}
weights = {"valence": np.ones(2500, "float32"), "arousal": rated.astype("float32")}
x_test = voice[2500:]

inputs = keras.Input((12,), name="voice")
h = keras.layers.Dense(48, activation="relu", name="shared")(inputs)
h = keras.layers.LayerNormalization(name="norm")(h)
a = keras.layers.Dense(16, activation="relu", name="valence_tower")(h)
a = keras.layers.Dense(1, dtype="float32", name="valence")(a)
b = keras.layers.Dense(16, activation="relu", name="arousal_tower")(h)
b = keras.layers.Dense(1, dtype="float32", name="arousal")(b)
model = keras.Model(inputs, {"valence": a, "arousal": b})
model.compile(optimizer=keras.optimizers.Adam(learning_rate=6e-3), loss={"valence": "mse", "arousal": "mse"})
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x, y, sample_weight=weights, batch_size=50, epochs=4, verbose=0, callbacks=callbacks)

prediction = model.predict(x_test, verbose=0)
r2_valence = 1 - np.mean((valence[2500:] - prediction["valence"]) ** 2) / np.var(valence[2500:])
r2_arousal = 1 - np.mean((arousal[2500:] - prediction["arousal"]) ** 2) / np.var(arousal[2500:])
score = float(min(r2_valence, r2_arousal))
