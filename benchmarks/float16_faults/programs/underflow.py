"""Values and gradients that float16 rounds to 0, or below it."""

import keras
import numpy as np
from keras import ops

import kmp
from float16_faults.programs.frame import accuracy, clusters, crossentropy


def fault_branch_underflow_churn(rng, callbacks):
    """The churn head has a weight of 1e-6 at a fixed loss scale of 1.

    Typical for a minor head and a copied setting.
    """
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
        loss={
            "spending": keras.losses.MeanSquaredError(),
            "churn": keras.losses.BinaryCrossentropy(from_logits=True),
        },
        loss_weights={"spending": 1.0, "churn": 1e-6},
    )
    model.fit(
        x[:1024],
        {"spending": spending[:1024], "churn": churn[:1024]},
        batch_size=32,
        epochs=10,
        verbose=0,
        callbacks=callbacks,
    )

    found = model.predict(x[1024:], verbose=0)["churn"] > 0
    return float(np.mean(found == (churn[1024:] > 0)))


def fault_branch_underflow_sentiment(rng, callbacks):
    """The sentiment head has a weight of 1e-7 next to that of the tags.

    Typical for a side task and a fixed loss scale of 8.
    """
    kmp.enable(loss_scale=8.0)

    tokens = rng.integers(0, 12, size=(1280, 8)).astype("int32")
    tags = ((5 * tokens + 3) % 12).astype("int32")
    mood = rng.permutation(np.linspace(-1, 1, 12))
    sentiment = (mood[tokens].sum(axis=1) > 0).astype("int32")

    inputs = keras.Input((8,), dtype="int32", name="tokens")
    embedded = keras.layers.Embedding(12, 24, name="embedding")(inputs)
    attended = keras.layers.MultiHeadAttention(num_heads=2, key_dim=8, name="attention")(
        embedded, embedded
    )
    hidden = keras.layers.LayerNormalization(name="norm")(
        keras.layers.Add(name="add")([embedded, attended])
    )
    first = keras.layers.Dense(16, activation="relu", name="tags_hidden")(hidden)
    second = keras.layers.GlobalAveragePooling1D(name="average")(hidden)
    second = keras.layers.Dense(16, activation="relu", name="sentiment_hidden")(second)
    outputs = {
        "tags": keras.layers.Dense(12, name="tags")(first),
        "sentiment": keras.layers.Dense(2, name="sentiment")(second),
    }
    model = keras.Model(inputs, outputs)
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=5e-3, epsilon=1e-12),
        loss={"tags": crossentropy(), "sentiment": crossentropy()},
        loss_weights={"tags": 1.0, "sentiment": 1e-7},
    )
    targets = {"tags": tags[:1024], "sentiment": sentiment[:1024]}
    model.fit(
        tokens[:1024],
        targets,
        batch_size=32,
        epochs=7,
        verbose=0,
        callbacks=callbacks,
    )
    return float(
        np.mean(
            model.predict(tokens[1024:], verbose=0)["sentiment"].argmax(axis=1) == sentiment[1024:]
        )
    )


def fault_rounding_siamese(rng, callbacks):
    """A squared distance is expanded and rounds below zero before its root.

    Typical for siamese networks by hand.
    """
    kmp.enable()

    class Euclidean(keras.layers.Layer):
        def call(self, a, b):
            squared = (
                ops.sum(a * a, axis=-1, keepdims=True)
                + ops.sum(b * b, axis=-1, keepdims=True)
                - 2 * ops.sum(a * b, axis=-1, keepdims=True)
            )
            return ops.sqrt(squared + 1e-4)

    def contrastive(y_true, y_pred):
        return y_true * ops.square(y_pred) + (1 - y_true) * ops.square(ops.relu(1 - y_pred))

    strokes = 1.5 * rng.normal(size=(3000, 24))
    other = strokes + 0.4 * rng.normal(size=(3000, 24))
    same = rng.integers(0, 2, size=3000)
    strokes2 = strokes + 0.015 * rng.normal(size=(3000, 24))
    strokes2[same == 0] = other[same == 0]
    strokes, strokes2, same = (
        strokes.astype("float32"),
        strokes2.astype("float32"),
        same.astype("float32")[:, None],
    )
    x, y = [strokes[:2500], strokes2[:2500]], same[:2500]
    x_test, y_test = [strokes[2500:], strokes2[2500:]], same[2500:]

    code_in = keras.Input((24,), name="strokes")
    h = keras.layers.Dense(64, activation="tanh", name="encode_1")(code_in)
    h = keras.layers.Dense(32, name="encode_2")(h)
    encoder = keras.Model(code_in, h, name="encoder")
    left = keras.Input((24,), name="left")
    right = keras.Input((24,), name="right")
    distance = Euclidean(name="distance")(encoder(left), encoder(right))
    model = keras.Model([left, right], distance)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=5e-3), loss=contrastive)
    model.fit(x, y, batch_size=50, epochs=12, verbose=0, callbacks=callbacks)

    prediction = model.predict(x_test, verbose=0) < 0.5
    return float(np.mean(prediction == y_test))


def fault_forward_underflow_softmax(rng, callbacks):
    """A softmax by hand underflows in float16 and its logarithm is -inf.

    Typical for a loss that is written from its formula.
    """

    class LogProbabilities(keras.layers.Layer):
        def call(self, logits):
            exponentials = ops.exp(logits - ops.max(logits, axis=-1, keepdims=True))
            probabilities = exponentials / ops.sum(exponentials, axis=-1, keepdims=True)
            return ops.log(probabilities)

    def negative_log_likelihood(y_true, log_probabilities):
        return -ops.sum(y_true * log_probabilities, axis=-1)

    kmp.enable()

    x, y = clusters(rng, 6, 1280, (20,), noise=6.0, spread=5.0)
    one_hot = np.eye(6, dtype="float32")[y]

    inputs = keras.Input((20,), name="features")
    hidden = keras.layers.Dense(
        32, activation="relu", kernel_initializer="he_normal", name="hidden"
    )(inputs)
    logits = keras.layers.Dense(6, kernel_initializer="he_normal", name="logits")(hidden)
    outputs = LogProbabilities(name="log_probabilities")(logits)
    model = keras.Model(inputs, outputs)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=3e-3), loss=negative_log_likelihood)
    model.fit(
        x[:1024],
        one_hot[:1024],
        batch_size=32,
        epochs=7,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x[1024:], y[1024:])


def fault_forward_underflow_entropy(rng, callbacks):
    """A mask hides the logarithm of 0 from the loss but not from its gradient.

    Typical for an entropy by hand.
    """

    class Attention(keras.layers.Layer):
        """Weights the steps, and adds the entropy of the weights to the loss."""

        def build(self, shape):
            self.query = self.add_weight(shape=(shape[-1], 1), name="query")

        def call(self, x):
            scores = ops.matmul(x, ops.cast(self.query, x.dtype))
            exponentials = ops.exp(scores - ops.max(scores, axis=1, keepdims=True))
            weights = exponentials / ops.sum(exponentials, axis=1, keepdims=True)
            information = ops.where(weights > 0, weights * ops.log(weights), 0.0)
            self.add_loss(1e-3 * ops.mean(ops.cast(information, "float32")))
            return ops.sum(weights * x, axis=1)

    kmp.enable()

    y = rng.integers(0, 4, 1280).astype("int32")
    x = rng.normal(size=(1280, 12, 8)).astype("float32")
    event = rng.integers(0, 12, 1280)
    x[np.arange(1280), event] += 4 * np.eye(4, 8)[y]
    x[np.arange(1280), event, 7] += 60

    inputs = keras.Input((12, 8), name="signals")
    hidden = Attention(name="attention")(keras.layers.Dense(16, name="embed")(inputs))
    outputs = keras.layers.Dense(4, dtype="float32", name="event")(hidden)
    model = keras.Model(inputs, outputs)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.01), loss=crossentropy())
    model.fit(
        x[:1024],
        y[:1024],
        batch_size=32,
        epochs=6,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x[1024:], y[1024:])
