"""The method of "Classification with Neural Decision Forests".

https://keras.io/examples/structured_data/deep_neural_decision_forests/
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

DEPTH, CLASSES = 4, 2
CATEGORIES = {"education": 16, "occupation": 15}
NUMBERS = ["age", "hours"]


class Tree(keras.Model):
    """A tree whose nodes route each row with a probability; each leaf has class probabilities."""

    def __init__(self, features, share):
        super().__init__()
        chosen = np.random.permutation(features)[: int(features * share)]
        self.selection = ops.convert_to_tensor(np.eye(features)[:, chosen], dtype="float32")
        self.leaves = self.add_weight((2**DEPTH, CLASSES), "random_normal", dtype="float32")
        self.decide = layers.Dense(2**DEPTH, activation="sigmoid")

    def call(self, features):
        rows = ops.shape(features)[0]
        right = ops.expand_dims(self.decide(ops.matmul(features, self.selection)), -1)
        routes = layers.concatenate([right, 1 - right], axis=2)
        reached = ops.ones([rows, 1, 1])
        for level in range(DEPTH):
            reached = ops.tile(ops.reshape(reached, [rows, -1, 1]), (1, 1, 2))
            reached = reached * routes[:, 2**level : 2 ** (level + 1)]
        reached = ops.reshape(reached, [rows, 2**DEPTH])
        return ops.matmul(reached, keras.activations.softmax(self.leaves))


class Forest(keras.Model):
    def __init__(self, trees, features):
        super().__init__()
        self.trees = [Tree(features, share=0.5) for _ in range(trees)]

    def call(self, features):
        outputs = ops.zeros([ops.shape(features)[0], CLASSES])
        for tree in self.trees:
            outputs += tree(features)
        outputs /= len(self.trees)
        return outputs


def census(count):
    random = np.random.default_rng(0)
    rows = {name: random.integers(0, size, count) for name, size in CATEGORIES.items()}
    rows["age"] = random.uniform(17, 90, count).astype("float32")
    rows["hours"] = random.uniform(1, 99, count).astype("float32")
    score = (rows["age"] - 50) / 20 + (rows["education"] - 8) / 4
    labels = (score + random.normal(scale=0.3, size=count) > 0).astype("int64")
    return tf.data.Dataset.from_tensor_slices((rows, labels)).batch(32).cache()


def train(callbacks=(), seed=0):
    keras.utils.set_random_seed(seed)
    inputs = {name: keras.Input((), name=name, dtype="float32") for name in NUMBERS}
    inputs |= {name: keras.Input((), name=name, dtype="int32") for name in CATEGORIES}
    encoded = [ops.expand_dims(inputs[name], -1) for name in NUMBERS]
    encoded += [layers.Embedding(size, 4)(inputs[name]) for name, size in CATEGORIES.items()]
    features = layers.BatchNormalization()(layers.concatenate(encoded))
    model = keras.Model(inputs, Forest(3, features.shape[1])(features))
    loss = keras.losses.SparseCategoricalCrossentropy()
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    data = census(1024)
    return model.fit(data, epochs=6, verbose=0, shuffle=False, callbacks=callbacks).history
