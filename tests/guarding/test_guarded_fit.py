import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import (
    MODES,
    assert_equal,
    compiled_model,
    fit_data,
    small_data,
    small_model,
    take_step,
    without_replays,
)
from keras import ops

import kmp

pytestmark = pytest.mark.usefixtures("enabled")


def data_with_nan(*nan_batches, batches=20):
    x, y = small_data(batches)
    for batch in nan_batches:
        x[batch * 8 + 3] = np.nan
    return x, y


@pytest.mark.parametrize("mode", ["graph", "xla", "steps_per_execution"])
def test_nan_loss_is_in_the_logs_of_its_own_batch_and_not_in_the_metrics_of_the_epoch(mode):
    metrics = ["accuracy", keras.metrics.SparseCategoricalCrossentropy(name="crossentropy")]
    model = compiled_model("sgd", metrics=metrics, **MODES[mode])
    (x, y), initial, losses = data_with_nan(0, 5, 19), model.get_weights(), []
    if mode == "graph":  # with a smaller last batch, the step does not know the number of rows
        x, y = np.concatenate([x, x[8:11]]), np.concatenate([y, y[8:11]])
    recorder = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses.append(logs["loss"])
    )
    history = fit_data(model, (x, y), callbacks=[recorder])
    per_call = MODES[mode].get("steps_per_execution", 1)
    assert set(np.flatnonzero(np.isnan(losses))) == {0, 5 // per_call, 19 // per_call}
    model.set_weights(initial)
    is_clean = ~np.isin(np.arange(len(x)) // 8, (0, 5, 19))
    expected = fit_data(model, (x[is_clean], y[is_clean]))
    for key in ("loss", "accuracy", "crossentropy"):
        np.testing.assert_allclose(history[key], expected[key], rtol=1e-5)


class SharpnessAware(keras.Model):
    """Takes its gradients at weights that the step has moved, and moves them back."""

    def scaled_gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.optimizer.scale_loss(ops.mean(ops.square(y - self(x, training=True))))
        return tape.gradient(loss, self.trainable_variables)

    def train_step(self, data):
        gradients = self.optimizer.unscale(self.scaled_gradients(*data))
        moves = [0.05 * gradient / tf.linalg.global_norm(gradients) for gradient in gradients]
        for weight, move in zip(self.trainable_variables, moves, strict=True):
            weight.assign_add(move)
        gradients = self.scaled_gradients(*data)
        for weight, move in zip(self.trainable_variables, moves, strict=True):
            weight.assign_sub(move)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"move": tf.linalg.global_norm(moves)}


def test_weights_that_a_train_step_moves_are_restored_if_it_is_skipped():
    inputs = keras.Input((4,))
    model = SharpnessAware(
        inputs, keras.layers.Dense(1, dtype="float32")(keras.layers.Dense(8, "relu")(inputs))
    )
    model.compile(kmp.LossScaleOptimizer("sgd", initial_scale=2.0**24), jit_compile=False)
    weights = model.get_weights()
    x, _ = small_data(20)
    fit_data(model, (x[:8], x[:8, :1] * 100))
    assert model.optimizer.snapshot().overflow_count == 1
    assert_equal(weights, model.get_weights())
    fit_data(model, (x, x[:, :1]))
    assert model.optimizer.snapshot().overflow_count < 20
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


def test_terminate_on_nan_stops_training_before_and_after_kmps_callbacks():
    model, stop, callbacks = (
        compiled_model(jit_compile=False),
        keras.callbacks.TerminateOnNaN(),
        without_replays(),
    )
    for steps, ordered in ((3, [*callbacks, stop]), (6, [stop, *callbacks])):
        fit_data(model, data_with_nan(2, batches=4), epochs=2, callbacks=ordered)
        assert model.optimizer.snapshot().step == steps


def test_terminate_on_nan_ignores_an_overflow_of_the_gradients_alone():
    optimizer = kmp.LossScaleOptimizer("sgd", initial_scale=2.0**28)
    # Which has a loss that kmp puts into the logs.
    model = compiled_model(optimizer, **MODES["steps_per_execution"])
    history = fit_data(model, small_data(), callbacks=[keras.callbacks.TerminateOnNaN()])
    snapshot = model.optimizer.snapshot()
    assert (snapshot.step, snapshot.nonfinite_loss_count, 0 < snapshot.overflow_count < 20) == (
        20,
        0,
        True,
    )
    assert 2.0**12 < snapshot.loss_scale < 2.0**28
    assert np.isfinite(history["loss"][0])
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


def test_evaluation_and_train_on_batch_report_a_nonfinite_loss_of_their_own_batches():
    model = compiled_model(steps_per_execution=8, run_eagerly=True)
    data = x, y = data_with_nan(1, batches=2)
    assert np.isnan(fit_data(model, data, validation_data=data)["val_loss"][0])
    stop = keras.callbacks.TerminateOnNaN()
    assert len(fit_data(model, small_data(2), epochs=2, callbacks=[stop])["loss"]) == 2
    losses = [float(model.train_on_batch(x[i : i + 8], y[i : i + 8])) for i in (0, 8, 0)]
    assert np.isnan(losses).tolist() == [False, True, False]


class CustomTrainStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.net = small_model()

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data

        def loss_of():
            return self.compute_loss(x=x, y=y, y_pred=self(x))

        self._loss_tracker.update_state(take_step(self.optimizer, self.trainable_weights, loss_of))
        return {"loss": self._loss_tracker.result()}


class CustomLossLog(CustomTrainStep):
    """Logs losses that are not in any metric of the model."""

    def train_step(self, data):
        super().train_step(data)
        self._loss_tracker.reset_state()
        return {"loss": float("nan"), "other_loss": float("nan")}


def test_custom_training_step_is_guarded_and_a_nan_loss_that_it_logs_is_kept():
    for model_class in (CustomTrainStep, CustomLossLog):
        model = model_class()
        model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
        loss = fit_data(model, data_with_nan(1, batches=3))["loss"][0]
        assert np.isnan(loss) == (model_class is CustomLossLog)
        assert model.optimizer.snapshot().nonfinite_loss_count == 1


def test_model_recompiled_without_kmp_behaves_as_in_keras():
    model = compiled_model()
    kmp.disable()
    model.compile("sgd", "sparse_categorical_crossentropy", auto_scale_loss=False, run_eagerly=True)
    assert np.isnan(fit_data(model, data_with_nan(1, batches=3))["loss"][0])


@pytest.mark.parametrize(
    ("enables", "steps_per_execution", "callbacks"),
    [(True, 1, list), (False, 4, list), (False, 1, kmp.callbacks.defaults)],
    ids=["after disable", "without enable", "without enable, with callbacks"],
)
def test_model_compiled_with_kmps_optimizer_is_guarded_without_enable(
    enables, steps_per_execution, callbacks
):
    if not enables:
        kmp.disable()
        keras.config.set_dtype_policy("mixed_float16")
    optimizer = "sgd" if enables else kmp.LossScaleOptimizer("sgd")
    model = compiled_model(optimizer, steps_per_execution=steps_per_execution, run_eagerly=True)
    kmp.disable()
    assert np.isfinite(
        fit_data(model, data_with_nan(1, batches=4), callbacks=callbacks())["loss"][0]
    )
    assert (
        model.optimizer.snapshot().overflow_count,
        model.optimizer.snapshot().nonfinite_loss_count,
    ) == (1, 1)


def test_guarded_model_can_be_saved_cloned_and_loaded_as_a_guarded_model(tmp_path):
    model, data = (
        compiled_model("adam", metrics=["accuracy"], run_eagerly=True),
        data_with_nan(1, batches=2),
    )
    fit_data(model, data)
    model.save(tmp_path / "model.keras")
    x, _ = small_data()
    loaded, cloned = (
        keras.models.load_model(tmp_path / "model.keras"),
        keras.models.clone_model(model),
    )
    cloned.set_weights(model.get_weights())
    for other in (loaded, cloned):
        np.testing.assert_array_equal(other(x), model(x))
    assert type(loaded.optimizer) is kmp.LossScaleOptimizer
    assert np.isfinite(fit_data(loaded, data)["loss"][0])
    assert loaded.optimizer.snapshot().overflow_count == 2


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_epoch_without_a_finite_batch_has_a_nan_loss_also_if_its_length_is_unknown():
    model = compiled_model("sgd", metrics=["accuracy"], jit_compile=False)
    x, y = data_with_nan(*range(20))
    assert np.isnan(fit_data(model, (x, y))["loss"]).all()
    assert np.isfinite(fit_data(model, data_with_nan())["loss"]).all()
    # Such data ends with a step that gets no batch; if it reset the metrics, the mean would be 0.
    batches = (part for part in zip(np.split(x, 20), np.split(y, 20), strict=True))
    assert np.isnan(model.fit(batches, shuffle=False, verbose=0).history["loss"]).all()


@pytest.mark.parametrize("set_first", [True, False])
def test_training_step_set_on_the_instance_is_kept_and_trains_its_own_variables(set_first):
    model, other, losses = small_model(), keras.Variable([1.0]), iter([2.0, np.nan, 2.0])

    def step(data):
        return {"loss": take_step(model.optimizer, [other], lambda: ops.sum(other * next(losses)))}

    if set_first:
        model.train_step = step
    model.compile(keras.optimizers.SGD(0.25), "sparse_categorical_crossentropy", run_eagerly=True)
    if not set_first:
        model.train_step = step
    fit_data(model, small_data(3))
    assert (float(other[0]), model.optimizer.snapshot().overflow_count) == (0.0, 1)


class CountsTraces(keras.optimizers.SGD):
    traces = 0

    def apply(self, grads, trainable_variables=None):
        self.traces += not tf.executing_eagerly()  # a replay is eager
        super().apply(grads, trainable_variables)


@pytest.mark.parametrize("callbacks", [list, kmp.callbacks.defaults])
def test_step_is_traced_once(callbacks):
    model, optimizer = small_model(), CountsTraces()
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    fit_data(model, small_data(4), callbacks=callbacks())
    assert optimizer.traces == 1


class AuxiliaryHead(keras.Model):
    """Has a second output in training, from a layer that a call for inference does not build."""

    def __init__(self):
        super().__init__()
        self.main, self.auxiliary = keras.layers.Dense(1), keras.layers.Dense(1)

    def build(self, shape):
        self.built = True

    def call(self, x, training=None):
        layers = (self.main, self.auxiliary) if training else (self.main,)
        outputs = [ops.cast(layer(x), "float32") for layer in layers]
        return outputs if training else outputs[0]


@pytest.mark.parametrize("is_built", [True, False])
def test_layer_that_runs_only_in_training_is_trained_and_guarded_metrics_are_those_of_its_outputs(
    is_built,
):
    model, (x, _) = AuxiliaryHead(), data_with_nan(1, batches=2)
    model(x, training=is_built)
    model.compile(
        "sgd", ["mse", "mae"], metrics=[["mae"], ["mae"]], run_eagerly=is_built, jit_compile=False
    )
    history = fit_data(model, (x, [np.zeros((16, 1)), np.full((16, 1), 9.0)]))
    assert model.optimizer.counters.by_variable.shape == (2, 4)
    # Both are finite, without the second batch.
    assert abs(history["mae_1"][0] - history["mae"][0]) > 1.0


def test_metric_that_starts_at_infinity_and_has_a_bool_leaves_the_batch_with_a_nan_loss_out():
    class Lowest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="lowest")
            self.lowest = self.add_variable((), keras.initializers.Constant(np.inf))
            self.has_begun = self.add_variable((), "zeros", dtype="bool")

        def update_state(self, y, prediction, sample_weight=None):
            self.lowest.assign(ops.minimum(self.lowest, ops.min(prediction)))
            self.has_begun.assign(True)

        def result(self):
            return self.lowest.value

    model = compiled_model(metrics=[Lowest()])
    assert fit_data(model, data_with_nan(0, batches=5))["lowest"][0] > 0


def test_metric_with_python_state_is_computed_eagerly():
    class Sum(keras.metrics.Metric):
        total = 0.0

        def update_state(self, y, prediction, sample_weight=None):
            self.total += float(np.sum(prediction.numpy()))

        def result(self):
            return self.total

    model = compiled_model(metrics=[Sum(name="total")], run_eagerly=True)
    # Of the probabilities.
    np.testing.assert_allclose(fit_data(model, small_data(2))["total"], 16.0, rtol=1e-3)


def test_layers_that_a_callback_unfreezes_are_trained():
    model = small_model()
    model.layers[0].trainable = False
    model.compile("adam", "sparse_categorical_crossentropy", run_eagerly=True)
    before = model.get_weights()

    def unfreeze(*arguments):
        model.layers[0].trainable = True

    fit_data(
        model, small_data(1), callbacks=[keras.callbacks.LambdaCallback(on_epoch_begin=unfreeze)]
    )
    assert not any(
        np.array_equal(old, new) for old, new in zip(before, model.get_weights(), strict=True)
    )


def test_frozen_model_leaves_the_optimizer_unbuilt():
    model = small_model()
    model.trainable = False
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    with contextlib.suppress(ValueError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit_data(model, small_data(1))
    assert model.optimizer.counters.by_variable is None


class AppliesEverySecondTime(kmp.LossScaleOptimizer):
    """Drops the gradients of every other step."""

    calls = 0

    def apply(self, grads, trainable_variables=None, **arguments):
        self.calls += 1
        if self.calls % 2:
            super().apply(grads, trainable_variables, **arguments)


def test_batch_whose_gradients_are_not_applied_is_checked_and_keeps_its_statistics():
    layers = [
        keras.layers.BatchNormalization(),
        keras.layers.Dense(2, dtype="float32"),
        kmp.layers.Softmax(),
    ]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(
        AppliesEverySecondTime("sgd"), "sparse_categorical_crossentropy", run_eagerly=True
    )
    x, y = data_with_nan(0, batches=2)
    model.train_on_batch(x[:8], y[:8])
    np.testing.assert_array_equal(layers[0].moving_mean, 0.0)
    model.train_on_batch(x[8:], y[8:])
    assert np.any(layers[0].moving_mean.numpy())
    assert np.isfinite(fit_data(model, data_with_nan(0, 1, batches=4))["loss"][0])


# Keras, at the end of a generator.
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.parametrize(
    "mode", [{"run_eagerly": True}, {"jit_compile": False}], ids=["eager", "graph"]
)
def test_batch_without_rows_is_skipped_and_is_no_overflow(mode):
    kmp.enable(initial_scale=1024.0)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse", **mode)

    def batches():
        for rows in (8, 0, 8):
            yield np.ones((rows, 4), "float32"), np.ones((rows, 1), "float32")

    signature = (tf.TensorSpec((None, 4)), tf.TensorSpec((None, 1)))
    model.fit(
        tf.data.Dataset.from_generator(batches, output_signature=signature),
        shuffle=False,
        verbose=0,
    )
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    snapshot = model.optimizer.snapshot()
    assert (snapshot.step, snapshot.overflow_count, snapshot.nonfinite_loss_count) == (3, 0, 0)
    assert (snapshot.loss_scale, snapshot.overflows_by_variable) == (1024.0, {})


class IgnoresFirstParts(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs["third"])


def test_overflow_is_counted_if_the_first_parts_of_the_batch_have_rows_without_values():
    model, ones = IgnoresFirstParts(), np.ones((8, 4), "float32")
    model.compile("sgd", "mse", run_eagerly=True)
    inputs = {
        "first": tf.sparse.from_dense(0 * ones),
        "second": np.ones((8, 0), "float32"),
        "third": ones,
    }
    batch = inputs, np.full((8, 1), 1e4, "float32")  # overflows at the scale 2^15
    model.fit(tf.data.Dataset.from_tensors(batch), shuffle=False, verbose=0)
    assert (model.optimizer.snapshot().overflow_count, model.optimizer.snapshot().loss_scale) == (
        1,
        2.0**14,
    )


def test_later_fit_with_batches_of_another_structure_works_with_a_compiled_step():
    kmp.enable(jit_compile=True)
    model = compiled_model(jit_compile=False)
    x, y = small_data(2)
    for weights in ({}, {"sample_weight": np.ones(len(x))}):
        model.fit(x, y, batch_size=8, verbose=0, callbacks=kmp.callbacks.defaults(), **weights)
    assert model.optimizer.snapshot().step == 4


class Sums(keras.Model):
    """Adds up unscaled gradients in variables of its own, and applies them in every second step."""

    def prepare(self, make):
        self.sums = [make(each.shape) for each in self.trainable_variables]
        self.count = tf.Variable(0, trainable=False)

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
            scaled = self.optimizer.scale_loss(loss)
        gradients = self.optimizer.unscale(tape.gradient(scaled, weights))
        for total, gradient in zip(self.sums, gradients, strict=True):
            total.assign_add(gradient)
        self.count.assign_add(1)

        def update():
            self.optimizer.apply([tf.convert_to_tensor(each) for each in self.sums], weights)
            for total in self.sums:
                total.assign(tf.zeros(total.shape))

        tf.cond(self.count % 2 == 0, update, lambda: None)
        return {"own_loss": loss}


MAKES = {
    "tf.Variable": lambda shape: tf.Variable(tf.zeros(shape), trainable=False),
    "keras.Variable": lambda shape: keras.Variable(np.zeros(shape), trainable=False),
}


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}])
def test_sums_of_gradients_recover_from_a_batch_that_overflows(enabled, make, options):
    inputs = keras.Input((4,))
    model = Sums(inputs, keras.layers.Dense(1, dtype="float32")(keras.layers.Dense(4)(inputs)))
    model.prepare(MAKES[make])
    model.compile("sgd", jit_compile=False, **options)
    x = np.ones((48, 4), "float32")
    x[0] = np.inf
    kernel = model.layers[-1].kernel
    before = kernel.numpy()
    model.fit(x, np.ones((48, 1)), batch_size=8, shuffle=False, verbose=0)
    assert model.optimizer.snapshot().overflow_count == 1
    assert all(np.isfinite(np.asarray(each)).all() for each in model.sums)
    assert np.abs(kernel.numpy() - before).max() > 0


class OwnNormalization(keras.layers.BatchNormalization):
    """A class of the user's."""


def test_finite_state_is_restored_beside_one_that_was_not_finite(enabled):
    model = keras.Sequential(
        [keras.Input((4,)), OwnNormalization(), keras.layers.Dense(1, dtype="float32")]
    )
    model.compile("sgd", "mse")
    x = np.ones((8, 4), "float32")
    model.train_on_batch(x, x[:, :1])
    model.layers[0].moving_mean.assign([np.inf] * 4)
    before = model.layers[0].moving_variance.numpy()
    model.train_on_batch(x * np.nan, x[:, :1])
    np.testing.assert_array_equal(model.layers[0].moving_variance, before)
