"""Trainings in bfloat16 and float32, which need no loss scale, are replayed and repaired too."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import sequential
from keras import layers, ops

import kmp
from kmp.callbacks import Monitor, defaults

ROWS = 128


class Cancels(keras.layers.Layer):
    """Returns its inputs; in 16 bits, nothing of them is left."""

    def call(self, x):
        return (x + 4096.0) - 4096.0


class LogOfRest(keras.layers.Layer):
    """Takes the logarithm of 1 - p, where p is clipped to a number that is 1 in bfloat16."""

    def call(self, x):
        p = ops.minimum(ops.sigmoid(20.0 * x), 1.0 - 1e-4)
        return x + 1e-3 * ops.log(1.0 - p)


class Root(keras.layers.Layer):
    """Has an infinite slope at 0."""

    def call(self, x):
        return ops.sqrt(ops.relu(x))


def model_with(layer, policy="mixed_bfloat16", **options):
    """Returns a model with a layer of a class between two others."""
    with kmp.enable(policy):
        return sequential(
            layers.Dense(4, kernel_initializer="identity", name="first"),
            layer(**options),
            layers.Dense(1, dtype="float32", name="head"),
            optimizer=keras.optimizers.SGD(1e-3),
            jit_compile=False,
        )


def train(model, callbacks, x=None, epochs=1):
    if x is None:
        x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    model.fit(
        x,
        x[:, :1] * 0 + 1,
        batch_size=8,
        epochs=epochs,
        verbose=0,
        shuffle=False,
        callbacks=callbacks,
    )


def repaired_layers(run):
    return [path.rpartition("/")[2] for row in run.rows for path in row.fallback or ()]


def test_layer_that_bfloat16_ruins_is_set_to_float32_while_the_training_runs(tmp_path):
    model = model_with(Cancels, name="cancels")
    with pytest.warns(UserWarning, match="kmp set .*cancels' to float32") as warned:
        train(model, defaults(tmp_path / "run"))
    (text,) = [str(each.message) for each in warned if "kmp set" in str(each.message)]
    assert "and the training continues. " in text  # at no loss scale
    assert "To make this change permanent:" in text
    assert "kmp.layers.Float32(Cancels(..., name='cancels'))" in text
    assert model.get_layer("cancels").compute_dtype == "float32"
    assert model.get_layer("first").compute_dtype == "bfloat16"
    run = kmp.load_run(tmp_path / "run")
    assert repaired_layers(run) == ["cancels"]
    first, proof = (replay for _, replay in run.replays[:2])
    assert first.output_error > 0.5 > proof.output_error
    assert "of a batch agree with those in float32" in str(kmp.advise(run))  # they were finite
    assert run.last("loss_scale") == model.optimizer.snapshot().loss_scale == 1.0


def test_replay_in_the_other_format_does_not_warn_of_what_it_rounds():
    with kmp.enable("mixed_bfloat16"):
        ids = keras.Input((1,))
        rounded = keras.layers.Flatten()(ids)
        rows = keras.layers.Embedding(3000, 4)(rounded)
        model = keras.Model(ids, keras.layers.Flatten(name="row")(rows))
        model.compile("sgd", "mse")
    x = np.arange(64.0).reshape(64, 1)
    with pytest.warns(UserWarning, match="indices for 3000 rows as bfloat16") as warned:
        model.fit(x, np.zeros((64, 4)), verbose=0, callbacks=[Monitor(repair=False)])
    assert not [each for each in warned if "as float16" in str(each.message)]


def test_layer_that_is_nan_in_bfloat16_is_set_to_float32_while_the_training_runs():
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    x[64:, 0] = 3.0
    model, monitor = model_with(LogOfRest, name="rest"), Monitor(every_n_steps=1)
    with pytest.warns(UserWarning, match=r"rest' to float32, and the training continues\. "):
        train(model, [monitor], x)
    snapshot = model.optimizer.snapshot()
    assert (snapshot.step, snapshot.loss_scale) == (16, 1.0)
    assert 1 <= snapshot.overflow_count <= 4
    assert repaired_layers(monitor.run) == ["rest"]


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32"])
def test_zeros_in_gradients_are_no_reason_for_a_replay_where_nothing_underflows(policy):
    x = np.ones((ROWS, 4), "float32")
    x[64:] = -1.0  # the units are dead
    monitor = Monitor(every_n_steps=1)
    model = model_with(layers.ReLU, policy)
    train(model, [monitor], x)
    shares = [sample.histogram.zero_fraction for sample in monitor.run.samples]
    assert max(shares[:8]) < 0.1
    assert min(shares[8:]) > 0.5
    expected = [1, 4, 8, 16] if policy == "mixed_bfloat16" else []
    assert [step for step, _ in monitor.run.replays] == expected


def test_first_skipped_step_in_float32_is_replayed_and_names_the_operation():
    x = np.random.default_rng(0).uniform(0.5, 1, size=(ROWS, 4)).astype("float32")
    x[0, 2] = 0.0
    monitor = Monitor(every_n_steps=1)
    train(model_with(Root, "float32", name="root"), [monitor], x)
    ((step, replay),) = monitor.run.replays
    assert (step, monitor.run.last("overflow_count")) == (1, 1)
    assert not replay.is_finite_in_float32
    assert replay.loss is not None
    assert {found.layer.rpartition("/")[2] for found in replay.operations} == {"root"}
    assert (replay.comparison, replay.search) == (None, None)


def test_model_with_weights_in_bfloat16_is_watched():
    with kmp.enable("mixed_bfloat16"):
        keras.config.set_dtype_policy("bfloat16")
        model = sequential(layers.Dense(4), layers.Dense(1), optimizer=keras.optimizers.SGD(1e-5))
    monitor = Monitor(every_n_steps=4)
    train(model, [monitor])
    assert monitor.run.settings.variable_dtypes == ["bfloat16"]
    assert [step for step, _ in monitor.run.comparisons] == [1, 4, 8, 16]
    assert [found.cause for found in kmp.advise(monitor.run).problems] == ["lost_updates"]


class PlainStep(keras.Model):
    """Has a `train_step` that scales no loss, as none is needed."""

    def __init__(self, hidden):
        super().__init__(name="plain")
        self.hidden = hidden
        self.first = layers.Dense(4, kernel_initializer="identity", name="first")
        self.head = layers.Dense(1, dtype="float32", name="head")

    def call(self, x):
        return self.head(self.hidden(self.first(x)))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


@pytest.mark.parametrize(("layer", "is_harmful"), [(Cancels, True), (layers.ReLU, False)])
def test_gradients_of_a_step_that_scales_no_loss_are_compared(layer, is_harmful):
    with kmp.enable("mixed_bfloat16"):
        model, monitor = PlainStep(layer(name="hidden")), Monitor(repair=False)
        model.compile(keras.optimizers.SGD(1e-3), jit_compile=False)
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    model.fit(x, x[:, :1], batch_size=64, verbose=0, callbacks=[monitor])  # 32 are replayed
    replay = monitor.run.replays[0][1]
    assert (replay.is_finite, replay.is_forward_only, replay.loss) == (True, False, None)
    largest = max(error.error for error in replay.gradient_errors)
    assert largest > 0.5 if is_harmful else largest < 0.1
    assert replay.float32_layers == (["plain/hidden"] if is_harmful else [])
