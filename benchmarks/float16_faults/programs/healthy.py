"""Programs without a fault."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import kmp
from float16_faults.programs.frame import (
    MaskedAttention,
    accuracy,
    census,
    clusters,
    crossentropy,
    event_classifier,
    events,
    explained_variance,
    line_classifier,
    lines,
    quadrants,
    sign_accuracy,
    text_classifier,
    texts,
    train_in_loop,
    walk_model,
    walks,
)


def healthy_autoencoder(rng, callbacks):
    """Sound: a variational autoencoder that samples, and adds a divergence, in float32."""

    class Sampling(keras.layers.Layer):
        def __init__(self, weight, **kwargs):
            super().__init__(**kwargs)
            self.weight = weight
            self.seed_generator = keras.random.SeedGenerator(0)

        def call(self, mean, log_variance):
            mean, log_variance = ops.cast(mean, "float32"), ops.cast(log_variance, "float32")
            divergence = ops.square(mean) + ops.exp(log_variance) - log_variance - 1
            self.add_loss(self.weight * ops.mean(divergence))
            noise = keras.random.normal(ops.shape(mean), dtype="float32", seed=self.seed_generator)
            return ops.cast(mean + ops.exp(0.5 * log_variance) * noise, self.compute_dtype)

    kmp.enable()

    images = (np.tanh(rng.normal(size=(1024, 3)) @ rng.normal(size=(3, 64)))).astype("float32")

    inputs = keras.Input((64,), name="image")
    hidden = keras.layers.Dense(48, activation="relu", name="encoder")(inputs)
    mean = keras.layers.Dense(4, name="mean")(hidden)
    log_variance = keras.layers.Dense(4, kernel_initializer="zeros", name="log_variance")(hidden)
    code = Sampling(weight=1e-3, name="sampling")(mean, log_variance)
    hidden = keras.layers.Dense(48, activation="relu", name="decoder")(code)
    outputs = keras.layers.Dense(64, name="pixels")(hidden)
    model = keras.Model(inputs, outputs)
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=5e-3), loss=keras.losses.MeanSquaredError()
    )
    model.fit(images, images, batch_size=32, epochs=6, verbose=0, callbacks=callbacks)
    return explained_variance(model, images, images)


def healthy_bfloat16(rng, callbacks):
    """Sound: a bfloat16 run with large inputs, recorded with a loss scale of 1."""
    kmp.enable("mixed_bfloat16")

    x, y = census(rng, mean=0.0, deviation=1.0)
    x_train, y_train, x_test, y_test = x[:1024], y[:1024], x[1024:], y[1024:]

    model = keras.Sequential(
        [
            keras.Input((6,), name="census"),
            keras.layers.BatchNormalization(momentum=0.9, name="norm"),
            keras.layers.Dense(24, activation="relu", name="hidden"),
            keras.layers.Dense(1, name="is_growing"),
        ]
    )
    model.compile(
        optimizer=kmp.wrap(keras.optimizers.Adam(learning_rate=1e-2), loss_scale=1.0),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=4,
        verbose=0,
        callbacks=callbacks,
    )
    return sign_accuracy(model, x_test, y_test)


def healthy_clipped_lstm(rng, callbacks):
    """Sound: an LSTM whose gradients are clipped by their global norm in most steps."""
    kmp.enable()

    x, y = walks(rng)
    x_train, y_train, x_test, y_test = x[:768], y[:768], x[768:], y[768:]

    model = walk_model()
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=5e-3, global_clipnorm=0.1),
        loss=keras.losses.MeanSquaredError(),
    )
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=5,
        verbose=0,
        callbacks=callbacks,
    )

    error = model.predict(x_test, verbose=0).astype("float32") - y_test
    return -float(np.mean(error**2))


def healthy_custom_loop(rng, callbacks):
    """Sound: a custom training loop with scale_loss and kmp.guard.

    Gradients are clipped by hand after unscale.
    """
    kmp.enable()

    tokens = np.zeros((768, 13), "int32")
    tokens[:, 0] = rng.integers(0, 20, 768)
    for position in range(1, 13):
        is_noise = rng.random(768) < 0.1
        tokens[:, position] = np.where(
            is_noise, rng.integers(0, 20, 768), (7 * tokens[:, position - 1] + 3) % 20
        )

    model = keras.Sequential(
        [
            keras.Input((12,), dtype="int32", name="tokens"),
            keras.layers.Embedding(20, 16, name="embedding"),
            keras.layers.GRU(24, return_sequences=True, name="gru"),
            keras.layers.Dense(20, name="logits"),
        ]
    )
    loss_function = crossentropy()
    optimizer = kmp.wrap(keras.optimizers.Adam(learning_rate=5e-3))
    model.compile(optimizer=optimizer)

    @tf.function
    def train_step(batch):
        with kmp.guard(optimizer, model):
            with tf.GradientTape() as tape:
                logits = model(batch[:, :-1], training=True)
                scaled_loss = optimizer.scale_loss(loss_function(batch[:, 1:], logits))
            gradients = optimizer.unscale(tape.gradient(scaled_loss, model.trainable_variables))
            gradients, _ = tf.clip_by_global_norm(gradients, 0.5)
            optimizer.apply(gradients, model.trainable_variables, unscaled=True)

    train_in_loop(model, train_step, [tokens], epochs=5, callbacks=callbacks)
    return accuracy(model, tokens[:, :-1], tokens[:, 1:])


def healthy_dead_relu(rng, callbacks):
    """Sound: a classifier in which more than half of the hidden units are dead from the start."""
    kmp.enable()

    weights = rng.normal(size=(16, 4))
    x = rng.normal(size=(1280, 16)).astype("float32")
    y = (x @ weights).argmax(axis=1)
    x_train, y_train, x_test, y_test = x[:1024], y[:1024], x[1024:], y[1024:]

    model = keras.Sequential(
        [
            keras.Input((16,), name="features"),
            keras.layers.Dense(
                96,
                activation="relu",
                bias_initializer=keras.initializers.RandomUniform(minval=-6.0, maxval=1.0),
                name="hidden_1",
            ),
            keras.layers.Dense(32, activation="relu", name="hidden_2"),
            keras.layers.Dense(4, name="logits"),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=3e-3), loss=crossentropy())
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=5,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x_test, y_test)


def healthy_distillation(rng, callbacks):
    """Sound: a train_step adds a divergence from a frozen teacher to the loss.

    It keeps an average in float32.
    """

    class Distiller(keras.Model):
        def __init__(self, teacher, student):
            super().__init__()
            self.teacher, self.student = teacher, student
            self.teacher.trainable = False
            self.average = [
                tf.Variable(weight, trainable=False) for weight in student.trainable_variables
            ]

        def call(self, x, training=False):
            return self.student(x, training=training)

        def train_step(self, data):
            x, y = data
            expected = ops.softmax(ops.cast(self.teacher(x, training=False), "float32") / 3.0)
            with tf.GradientTape() as tape:
                logits = self(x, training=True)
                loss = ops.mean(
                    keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
                )
                loss += ops.mean(keras.losses.kl_divergence(expected, ops.softmax(logits / 3.0)))
                scaled_loss = self.optimizer.scale_loss(loss)
            gradients = self.optimizer.unscale(tape.gradient(scaled_loss, self.trainable_variables))
            self.optimizer.apply(
                tf.clip_by_global_norm(gradients, 1.0)[0], self.trainable_variables
            )
            for average, weight in zip(self.average, self.trainable_variables, strict=True):
                average.assign_add(0.01 * (tf.convert_to_tensor(weight) - average))
            return {"loss": loss}

    kmp.enable()

    x = rng.normal(size=(2048, 12)).astype("float32")
    y = np.tanh(x @ rng.normal(size=(12, 4))).argmax(axis=1)

    teacher = keras.Sequential(
        [keras.Input((12,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(4)]
    )
    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(4, dtype="float32")]
    model = Distiller(teacher, keras.Sequential([keras.Input((12,)), *layers]))
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=3e-3))
    model.fit(
        x[:1536],
        y[:1536],
        batch_size=32,
        epochs=4,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x[1536:], y[1536:])


def healthy_dropout_gru(rng, callbacks):
    """Sound: strong dropout before and after a GRU.

    Many gradients are zero, and the loss is noisy.
    """
    kmp.enable()

    frequency = rng.choice([0.3, 0.5, 0.8], size=1280)
    phase = rng.uniform(0, 2 * np.pi, size=(1280, 1))
    waves = np.sin(frequency[:, None] * np.arange(16) + phase) + rng.normal(
        scale=0.1, size=(1280, 16)
    )
    x = waves[..., None].astype("float32")
    y = np.digitize(frequency, [0.4, 0.6])
    x_train, y_train, x_test, y_test = x[:1024], y[:1024], x[1024:], y[1024:]

    model = keras.Sequential(
        [
            keras.Input((16, 1), name="waves"),
            keras.layers.GRU(24, name="gru"),
            keras.layers.Dropout(0.4, name="dropout_1"),
            keras.layers.Dense(48, activation="relu", name="hidden"),
            keras.layers.Dropout(0.5, name="dropout_2"),
            keras.layers.Dense(3, name="logits"),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss=crossentropy())
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=4,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x_test, y_test)


def healthy_float32_attention(rng, callbacks):
    """Sound: a float32 run with tiny gradients, recorded with a loss scale of 1."""
    kmp.enable(policy="float32")

    sequence, y = events(rng)

    model = event_classifier()
    model.compile(
        optimizer=kmp.wrap(
            keras.optimizers.Adam(learning_rate=3e-3, epsilon=1e-12), loss_scale=1.0
        ),
        loss=crossentropy(),
        loss_weights=[1e-6],
    )
    model.fit(
        sequence[:768],
        y[:768],
        batch_size=32,
        epochs=4,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, sequence[768:], y[768:])


def healthy_frozen_backbone(rng, callbacks):
    """Sound: transfer learning with a frozen convolution and BatchNormalization.

    Only the head is trained.
    """
    kmp.enable()

    images, y = quadrants(rng, 0.6)
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
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=3e-3), loss=crossentropy())
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=5,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x_test, y_test)


def healthy_house_prices(rng, callbacks):
    """Sound: raw prices as targets, whose gradients let the loss scale fall in the first steps."""
    kmp.enable()
    houses = rng.normal(size=(5000, 14)).astype("float32")
    price = 420 + 110 * houses[:, 0] + 60 * houses[:, 1] * houses[:, 2] + 70 * np.abs(houses[:, 3])
    price = (price + 15 * rng.normal(size=5000)).astype("float32")
    x, y = houses[:4000], price[:4000]
    x_test, y_test = houses[4000:], price[4000:]

    model = keras.Sequential(
        [
            keras.Input((14,), name="house"),
            keras.layers.Dense(64, activation="relu", name="wide"),
            keras.layers.Dense(64, activation="relu", name="deep"),
            keras.layers.Dense(1, name="price"),
        ]
    )
    model.compile(optimizer=keras.optimizers.RMSprop(learning_rate=3e-3), loss="mse")
    model.fit(x, y, batch_size=32, epochs=5, verbose=0, callbacks=callbacks)
    return explained_variance(model, x_test, y_test)


def healthy_label_smoothing(rng, callbacks):
    """Sound: label smoothing and noisy labels, which keep the loss far above zero."""
    kmp.enable()

    images, quadrant = quadrants(rng, 0.8)
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
    model.fit(
        images[:768],
        one_hot[:768],
        batch_size=32,
        epochs=4,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, images[768:], quadrant[768:])


def healthy_large_initial_scale(rng, callbacks):
    """Sound: an initial loss scale of 2^24 skips the first steps until it fits.

    It grows again every 100 steps.
    """
    kmp.enable(initial_scale=2.0**24, growth_interval=100)

    images, is_vertical = lines(rng)

    model = line_classifier(kmp.layers.BatchNormalization(momentum=0.9, name="norm"))
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss=crossentropy())
    model.fit(
        images[:768],
        is_vertical[:768],
        batch_size=32,
        epochs=10,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, images[768:], is_vertical[768:])


def healthy_masked_attention(rng, callbacks):
    """Sound: attention that sets the scores of padding to -inf.

    A row always keeps at least one word.
    """

    class Attention(MaskedAttention):
        def mask(self, scores, is_word):
            return ops.where(is_word > 0, scores, -float("inf"))

    kmp.enable()

    data, y = texts(rng)

    model = text_classifier(Attention(units=16, name="masked_attention"))
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss=crossentropy())
    model.fit(data, y, batch_size=32, epochs=4, verbose=0, callbacks=callbacks)
    return accuracy(model, data, y)


def healthy_small_learning_rate(rng, callbacks):
    """Sound: a wide network at a low learning rate.

    Its float32 weights keep updates that float16 would lose.
    """
    kmp.enable()

    x, y = clusters(rng, 4, 1536, (16,), noise=0.8)
    x_train, y_train, x_test, y_test = x[:1024], y[:1024], x[1024:], y[1024:]

    model = keras.Sequential(
        [
            keras.Input((16,), name="features"),
            keras.layers.Dense(
                512, activation="relu", kernel_initializer="he_normal", name="hidden"
            ),
            keras.layers.Dense(4, kernel_initializer="he_normal", name="logits"),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=5e-5), loss=crossentropy())
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=6,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x_test, y_test)


def healthy_rezero_transformer(rng, callbacks):
    """Sound: residual gates and a head that start at zero.

    The learning rate warms up from zero.
    """
    rng = np.random.default_rng(20)
    LENGTH, VOCABULARY = 16, 12

    def brackets(n):
        tokens = rng.integers(0, VOCABULARY, (n, LENGTH))
        labels = ((tokens == 3).sum(axis=1) > (tokens == 7).sum(axis=1)).astype("int32")
        return tokens.astype("int32"), labels

    x, y = brackets(2400)
    x_test, y_test = brackets(800)

    kmp.enable()

    class Gate(keras.layers.Layer):
        def build(self, shape):
            self.alpha = self.add_weight(shape=(), initializer="zeros", name="alpha")

        def call(self, branch):
            return self.alpha * branch

    tokens = keras.Input((LENGTH,), dtype="int32", name="tokens")
    h = keras.layers.Embedding(VOCABULARY, 24, name="embedding")(tokens)
    attended = keras.layers.MultiHeadAttention(3, 8, name="attention")(h, h)
    h = keras.layers.Add(name="residual_1")([h, Gate(name="gate_1")(attended)])
    inner = keras.layers.Dense(48, activation="gelu", name="expand")(h)
    inner = keras.layers.Dense(24, name="contract")(inner)
    h = keras.layers.Add(name="residual_2")([h, Gate(name="gate_2")(inner)])
    pooled = keras.layers.GlobalAveragePooling1D(name="pooled")(h)
    outputs = keras.layers.Dense(2, kernel_initializer="zeros", dtype="float32", name="head")(
        pooled
    )
    model = keras.Model(tokens, outputs, name="rezero")
    schedule = keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=0.0, decay_steps=260, warmup_target=1e-2, warmup_steps=64
    )
    model.compile(
        optimizer=keras.optimizers.AdamW(learning_rate=schedule, weight_decay=1e-3),
        loss=crossentropy(),
    )
    model.fit(x, y, epochs=8, batch_size=60, verbose=0, callbacks=callbacks)
    return accuracy(model, x_test, y_test)


def healthy_sparse_inputs(rng, callbacks):
    """Sound: bags of words, in which 98 percent of the inputs are zero."""
    kmp.enable()

    topic = rng.integers(0, 5, 1280)
    counts = np.zeros((1280, 400), "float32")
    for row, number in enumerate(topic):
        own_words = rng.integers(40 * number, 40 * number + 40, 4)
        np.add.at(counts[row], own_words, 1.0)
        np.add.at(counts[row], rng.integers(0, 400, 4), 1.0)
    x_train, y_train, x_test, y_test = counts[:1024], topic[:1024], counts[1024:], topic[1024:]

    model = keras.Sequential(
        [
            keras.Input((400,), name="counts"),
            keras.layers.Dense(32, activation="relu", name="hidden"),
            keras.layers.Dense(5, name="topic"),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=5e-3), loss=crossentropy())
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=4,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x_test, y_test)


def healthy_sum_vae(rng, callbacks):
    """Sound: losses that are sums over the batch, with a clipped global norm.

    The initial loss scale is 2^24.
    """
    rng = np.random.default_rng(24)
    SIZE, LATENT = 16, 6

    def blobs(n):
        grid = np.linspace(-1, 1, SIZE)
        cy, cx = rng.uniform(-0.5, 0.5, (2, n, 1, 1))
        width = rng.uniform(0.2, 0.5, (n, 1, 1))
        images = np.exp(-((grid[:, None] - cy) ** 2 + (grid[None, :] - cx) ** 2) / (2 * width**2))
        return images.reshape(n, SIZE * SIZE).astype("float32")

    x = blobs(2000)
    y = x
    x_test = blobs(400)

    kmp.enable(initial_scale=2.0**24)

    class Sampling(keras.layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(dtype="float32", **kwargs)
            self.noise = keras.random.SeedGenerator(5)

        def call(self, mean, log_variance, training=None):
            kl = -0.5 * keras.ops.sum(
                1 + log_variance - keras.ops.square(mean) - keras.ops.exp(log_variance)
            )
            self.add_loss(0.1 * kl)
            if not training:
                return mean
            return mean + keras.ops.exp(0.5 * log_variance) * keras.random.normal(
                keras.ops.shape(mean), seed=self.noise
            )

    inputs = keras.Input((SIZE * SIZE,), name="pixels")
    h = keras.layers.Dense(96, activation="relu", name="encoder")(inputs)
    mean = keras.layers.Dense(LATENT, name="mean")(h)
    log_variance = keras.layers.Dense(LATENT, kernel_initializer="zeros", name="log_variance")(h)
    latent = Sampling(name="sampling")(mean, log_variance)
    h = keras.layers.Dense(96, activation="relu", name="decoder")(latent)
    outputs = keras.layers.Dense(SIZE * SIZE, name="reconstruction")(h)
    model = keras.Model(inputs, outputs, name="vae")
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=3e-3, global_clipnorm=10.0),
        loss=keras.losses.MeanSquaredError(reduction="sum"),
        loss_weights=[float(SIZE * SIZE)],
    )
    model.fit(x, y, epochs=10, batch_size=100, verbose=0, callbacks=callbacks)
    return explained_variance(model, x_test, x_test)


def healthy_train_step(rng, callbacks):
    """Sound: a train_step that calls scale_loss on a small loss.

    The loss scale lifts its gradients.
    """

    class Denoiser(keras.Model):
        def train_step(self, data):
            noisy, clean = data
            with tf.GradientTape() as tape:
                denoised = self(noisy, training=True)
                loss = self.compute_loss(y=clean, y_pred=denoised)
                scaled_loss = self.optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled_loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return self.compute_metrics(noisy, clean, denoised)

    kmp.enable()

    time = np.arange(32)
    clean = np.sin(rng.uniform(0.1, 0.4, (768, 1)) * time + rng.uniform(0, 6, (768, 1)))[
        ..., None
    ].astype("float32")
    noisy = (clean + rng.normal(scale=0.5, size=clean.shape)).astype("float32")

    inputs = keras.Input((32, 1), name="noisy")
    hidden = keras.layers.Conv1D(
        16, kernel_size=9, padding="same", activation="relu", name="conv_1"
    )(inputs)
    hidden = keras.layers.Conv1D(
        16, kernel_size=9, padding="same", activation="relu", name="conv_2"
    )(hidden)
    outputs = keras.layers.Conv1D(1, kernel_size=9, padding="same", name="denoised")(hidden)
    model = Denoiser(inputs, outputs)
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=3e-3),
        loss=keras.losses.MeanSquaredError(),
        loss_weights=[1e-2],
    )
    model.fit(noisy, clean, batch_size=32, epochs=4, verbose=0, callbacks=callbacks)
    return explained_variance(model, noisy, clean)


def healthy_unused_head(rng, callbacks):
    """Sound: a model with two heads of which only one has a loss.

    The other's weights never get a gradient.
    """
    kmp.enable()

    x = rng.normal(size=(1280, 10)).astype("float32")
    demand = (np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2])[:, None].astype("float32")

    inputs = keras.Input((10,), name="store")
    trunk = keras.layers.Dense(64, activation="tanh", name="trunk")(inputs)
    first = keras.layers.Dense(32, activation="tanh", name="demand_hidden")(trunk)
    second = keras.layers.Dense(16, activation="tanh", name="returns_hidden")(trunk)
    outputs = {
        "demand": keras.layers.Dense(1, dtype="float32", name="demand")(first),
        "returns": keras.layers.Dense(1, dtype="float32", name="returns")(second),
    }
    model = keras.Model(inputs, outputs)
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=5e-3),
        loss={"demand": keras.losses.MeanSquaredError(), "returns": None},
    )
    targets = {"demand": demand[:1024], "returns": np.zeros((1024, 1), "float32")}
    model.fit(
        x[:1024],
        targets,
        batch_size=32,
        epochs=6,
        verbose=0,
        callbacks=callbacks,
    )

    error = model.predict(x[1024:], verbose=0)["demand"] - demand[1024:]
    return 1.0 - float(np.mean(error**2) / np.var(demand[1024:]))


def healthy_unused_rows(rng, callbacks):
    """Sound: an embedding for 2000 words of which the texts use 60.

    Most of its gradient is zero.
    """
    kmp.enable()

    words = rng.choice(rng.choice(2000, size=60, replace=False), size=(1280, 8)).astype("int32")
    meaning = rng.normal(size=2000)
    y = (meaning[words].sum(axis=1) > 0).astype("float32")[:, None]
    x_train, y_train, x_test, y_test = words[:1024], y[:1024], words[1024:], y[1024:]

    model = keras.Sequential(
        [
            keras.Input((8,), dtype="int32", name="words"),
            keras.layers.Embedding(2000, 16, name="embedding"),
            keras.layers.GlobalAveragePooling1D(name="average"),
            keras.layers.Dense(16, activation="relu", name="hidden"),
            keras.layers.Dense(1, name="logit"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=1e-2),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=5,
        verbose=0,
        callbacks=callbacks,
    )
    return sign_accuracy(model, x_test, y_test)
