"""Tables of a recommender in float16 never move by the small steps of Lion, typical for a port of model.half()."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
USERS, ITEMS, RANK = 300, 200, 4
true_users = rng.uniform(0.4, 1.2, (USERS, RANK))
true_items = rng.uniform(0.4, 1.2, (ITEMS, RANK))


def sample(n):
    pairs = np.stack([rng.integers(0, USERS, n), rng.integers(0, ITEMS, n)], axis=1).astype("int32")
    ratings = (true_users[pairs[:, 0]] * true_items[pairs[:, 1]]).sum(axis=1) + 0.1 * rng.normal(size=n)
    return pairs, ratings[:, None].astype("float32")


x, y = sample(20000)
x_test, y_test = sample(4000)

kmp.enable("float16")


class Factorization(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.user_factors = keras.layers.Embedding(
            USERS, RANK, embeddings_initializer=keras.initializers.RandomUniform(0.6, 1.0, seed=1), name="user_factors"
        )
        self.item_factors = keras.layers.Embedding(
            ITEMS, RANK, embeddings_initializer=keras.initializers.RandomUniform(0.6, 1.0, seed=2), name="item_factors"
        )

    def call(self, pairs):
        users = keras.ops.relu(self.user_factors(pairs[:, 0]))
        items = keras.ops.relu(self.item_factors(pairs[:, 1]))
        return keras.ops.sum(users * items, axis=-1, keepdims=True)


model = Factorization(name="factorization")
model.compile(optimizer=keras.optimizers.Lion(learning_rate=2e-4), loss="mse")
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x, y, epochs=10, batch_size=250, verbose=0, callbacks=callbacks)

prediction = model.predict(x_test, verbose=0).astype("float32")
score = float(1 - np.mean((prediction - y_test) ** 2) / np.var(y_test))
