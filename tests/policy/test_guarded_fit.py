import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import assert_equal, compiled_model, small_data, small_model, take_step, without_replays
from keras import ops

import kmp

pytestmark = pytest.mark.usefixtures("enabled")


def data_with_nan(*nan_batches, batches=20):
    x, y = small_data(batches)
    for batch in nan_batches:
        x[batch * 8 + 3] = np.nan
    return x, y


def fit(model, data, **arguments):
    return model.fit(*data, batch_size=8, shuffle=False, verbose=0, **arguments).history


class RecordLosses(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])


def test_nan_loss_is_in_the_logs_of_its_own_batch_and_not_in_the_metrics_of_the_epoch(compile_mode):
    x, y = data_with_nan(0, 5, 19)
    keep = np.repeat([batch not in (0, 5, 19) for batch in range(20)], 8)
    histories, recorders = [], [RecordLosses(), RecordLosses()]
    for data, recorder in zip([(x, y), (x[keep], y[keep])], recorders, strict=True):
        keras.utils.set_random_seed(0)
        metrics = ["accuracy", keras.metrics.SparseCategoricalCrossentropy(name="crossentropy")]
        model = compiled_model("sgd", metrics=metrics, **compile_mode)
        histories.append(fit(model, data, callbacks=[recorder]))
    for key in ("loss", "accuracy", "crossentropy"):
        np.testing.assert_allclose(histories[0][key], histories[1][key], rtol=1e-5)
    per_call = compile_mode.get("steps_per_execution", 1)
    assert set(np.flatnonzero(np.isnan(recorders[0].losses))) == {0, 5 // per_call, 19 // per_call}
    assert np.isfinite(recorders[1].losses).all()


def test_losses_of_several_outputs_are_guarded():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, [keras.layers.Dense(1, name="a")(inputs), keras.layers.Dense(1, name="b")(inputs)])
    model.compile("sgd", ["mse", "mse"])
    x, _ = data_with_nan(4)
    history = fit(model, (x, [np.ones((len(x), 1))] * 2), epochs=2)
    assert np.isfinite([history[name] for name in ("loss", "a_loss", "b_loss")]).all()


class SharpnessAware(keras.Model):
    """Takes its gradients at weights that the step has moved, and moves them back."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.optimizer.scale_loss(ops.mean(ops.square(y - self(x, training=True))))
        gradients = self.optimizer.unscale(tape.gradient(loss, self.trainable_variables))
        moves = [0.05 * gradient / tf.linalg.global_norm(gradients) for gradient in gradients]
        for weight, move in zip(self.trainable_variables, moves, strict=True):
            weight.assign_add(move)
        with tf.GradientTape() as tape:
            loss = self.optimizer.scale_loss(ops.mean(ops.square(y - self(x, training=True))))
        gradients = tape.gradient(loss, self.trainable_variables)
        for weight, move in zip(self.trainable_variables, moves, strict=True):
            weight.assign_sub(move)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"step_loss": loss}


def test_weights_that_a_train_step_moves_are_restored_if_it_is_skipped(compile_mode):
    inputs = keras.Input((4,))
    model = SharpnessAware(inputs, keras.layers.Dense(1, dtype="float32")(keras.layers.Dense(8, "relu")(inputs)))
    model.compile(kmp.LossScaleOptimizer("sgd", initial_scale=2.0**24), **compile_mode)
    weights = model.get_weights()
    x, _ = small_data(1)
    fit(model, (x, x[:, :1] * 100))
    assert model.optimizer.snapshot().overflow_count == 1
    assert_equal(weights, model.get_weights())
    fit(model, (x, x[:, :1]), epochs=20)
    assert model.optimizer.snapshot().overflow_count < 20
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


def test_terminate_on_nan_stops_training_before_and_after_kmps_callbacks(compile_mode):
    model, stop, callbacks = compiled_model(**compile_mode), keras.callbacks.TerminateOnNaN(), without_replays()
    steps = 8 if "steps_per_execution" in compile_mode else 6
    fit(model, data_with_nan(5), epochs=3, callbacks=[*callbacks, stop])
    assert model.optimizer.snapshot().step == steps
    fit(model, data_with_nan(5), epochs=3, callbacks=[stop, *callbacks])
    assert model.optimizer.snapshot().step == 2 * steps


def test_terminate_on_nan_ignores_an_overflow_of_the_gradients_alone(compile_mode):
    model = compiled_model(kmp.LossScaleOptimizer("sgd", initial_scale=2.0**28), **compile_mode)
    history = fit(model, data_with_nan(), callbacks=[keras.callbacks.TerminateOnNaN()])
    snapshot = model.optimizer.snapshot()
    assert (snapshot.step, snapshot.nonfinite_loss_count, 0 < snapshot.overflow_count < 20) == (20, 0, True)
    assert 2.0**12 < snapshot.loss_scale < 2.0**28
    assert np.isfinite(history["loss"][0])
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


def test_evaluation_and_train_on_batch_report_a_nonfinite_loss():
    model = compiled_model()
    history = fit(model, data_with_nan(), validation_data=data_with_nan(1))
    assert np.isfinite(history["loss"][0])
    assert np.isnan(history["val_loss"][0])
    x, y = data_with_nan(1)
    losses = [float(model.train_on_batch(x[i : i + 8], y[i : i + 8])) for i in (0, 8, 16)]
    assert np.isnan(losses).tolist() == [False, True, False]


class CustomTrainStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.net = small_model()

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        loss_of = lambda: self.compute_loss(x=x, y=y, y_pred=self(x))  # noqa: E731
        self._loss_tracker.update_state(take_step(self.optimizer, self.trainable_weights, loss_of))
        return {"loss": self._loss_tracker.result()}


def test_custom_training_step_is_guarded_and_a_nan_loss_that_it_logs_is_kept():
    for model_class in (CustomTrainStep, CustomLossLog):
        model = model_class()
        model.compile("sgd", "sparse_categorical_crossentropy")
        loss = fit(model, data_with_nan(3), callbacks=without_replays())["loss"][0]
        assert np.isnan(loss) == (model_class is CustomLossLog)
        assert model.optimizer.snapshot().nonfinite_loss_count == 1


def test_model_recompiled_without_kmp_behaves_as_in_keras():
    model = compiled_model()
    kmp.disable()
    model.compile("sgd", "sparse_categorical_crossentropy", auto_scale_loss=False)
    assert np.isnan(fit(model, data_with_nan(3))["loss"][0])


@pytest.mark.parametrize(
    ("enables", "steps_per_execution", "callbacks"),
    [(True, 1, list), (False, 4, list), (False, 1, kmp.callbacks.defaults)],
    ids=["after disable", "without enable", "without enable, with callbacks"],
)
def test_model_compiled_with_kmps_optimizer_is_guarded_without_enable(enables, steps_per_execution, callbacks):
    if not enables:
        kmp.disable()
        keras.config.set_dtype_policy("mixed_float16")
    optimizer = "sgd" if enables else kmp.LossScaleOptimizer("sgd")
    model = compiled_model(optimizer, steps_per_execution=steps_per_execution)
    kmp.disable()
    assert np.isfinite(fit(model, data_with_nan(3), callbacks=callbacks())["loss"][0])
    assert (model.optimizer.snapshot().overflow_count, model.optimizer.snapshot().nonfinite_loss_count) == (1, 1)


def test_guarded_model_can_be_saved_cloned_and_loaded_as_a_guarded_model(tmp_path):
    model = compiled_model("adam", metrics=["accuracy"])
    fit(model, data_with_nan(3))
    model.save(tmp_path / "model.keras")
    x, _ = small_data()
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for other in (loaded, keras.models.clone_model(model)):
        other.set_weights(model.get_weights())
        np.testing.assert_array_equal(other(x), model(x))
    assert type(loaded.optimizer) is kmp.LossScaleOptimizer
    assert np.isfinite(fit(loaded, data_with_nan(3))["loss"][0])
    assert loaded.optimizer.snapshot().overflow_count == 2


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_epoch_without_a_finite_batch_has_a_nan_loss_also_if_its_length_is_unknown(compile_mode):
    model = compiled_model("sgd", metrics=["accuracy"], **compile_mode)
    x, y = data_with_nan(*range(20))
    assert np.isnan(fit(model, (x, y))["loss"]).all()
    assert np.isfinite(fit(model, data_with_nan())["loss"]).all()
    # Such data ends with a step that gets no batch; if it reset the metrics, the mean would be 0.
    batches = (part for part in zip(np.split(x, 20), np.split(y, 20), strict=True))
    assert np.isnan(model.fit(batches, shuffle=False, verbose=0).history["loss"]).all()


def test_execution_reports_only_its_own_batches():
    model = compiled_model(steps_per_execution=8)
    fit(model, data_with_nan(19))
    stop = keras.callbacks.TerminateOnNaN()
    assert len(fit(model, data_with_nan(batches=4), epochs=3, callbacks=[stop])["loss"]) == 3
    x, y = data_with_nan(0)
    assert np.isnan(float(model.train_on_batch(x[:8], y[:8])))
    assert np.isfinite([float(model.train_on_batch(x[8:16], y[8:16])) for _ in range(3)]).all()


@pytest.mark.parametrize("set_first", [True, False])
def test_training_step_set_on_the_instance_is_kept(set_first):
    calls = []

    def step(data):
        calls.append(1)
        return keras.Sequential.train_step(model, data)

    model = small_model()
    if set_first:
        model.train_step = step
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    if not set_first:
        model.train_step = step
    history = fit(model, data_with_nan(2), callbacks=without_replays())
    assert len(calls) == 20
    assert np.isfinite(history["loss"][0])


class CustomLossLog(CustomTrainStep):
    """Logs losses that are not in any metric of the model."""

    def train_step(self, data):
        super().train_step(data)
        self._loss_tracker.reset_state()
        return {"loss": float("nan"), "other_loss": float("nan")}


class CountsTraces(keras.optimizers.SGD):
    traces = 0

    def apply(self, grads, trainable_variables=None):
        self.traces += not tf.executing_eagerly()  # a replay is eager
        super().apply(grads, trainable_variables)


@pytest.mark.parametrize("callbacks", [list, kmp.callbacks.defaults])
def test_step_is_traced_once(callbacks):
    model, optimizer = small_model(), CountsTraces()
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    fit(model, data_with_nan(), callbacks=callbacks())
    assert optimizer.traces == 1


class TwoOutputsInTraining(keras.Model):
    def __init__(self):
        super().__init__()
        self.main, self.auxiliary = keras.layers.Dense(1), keras.layers.Dense(1)

    def call(self, x, training=None):
        outputs = [ops.cast(layer(x), "float32") for layer in (self.main, self.auxiliary)]
        return outputs if training else outputs[0]


def test_metrics_are_those_of_the_outputs_in_training():
    model, x = TwoOutputsInTraining(), small_data(8)[0]
    model(x, training=True)
    model.compile("sgd", ["mse", "mae"], metrics=[["mae"], ["mae"]])
    history = model.fit(x, [np.zeros((len(x), 1)), np.full((len(x), 1), 9.0)], verbose=0).history
    assert abs(history["mae_1"][0] - history["mae"][0]) > 1.0


def test_metric_with_python_state_is_computed_eagerly():
    class Collects(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="collects")
            self.seen = []

        def update_state(self, y, prediction, sample_weight=None):
            self.seen.append(prediction)

        def result(self):
            return sum(float(np.sum(each.numpy())) for each in self.seen)

    model = small_model()
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=[Collects()], run_eagerly=True)
    assert np.isfinite(fit(model, small_data(2))["collects"][0])


class AuxiliaryHead(keras.Model):
    """Has a layer that runs only in training, so a call for inference builds the model without it."""

    def __init__(self):
        super().__init__()
        self.net, self.auxiliary = small_model(), keras.layers.Dense(2)

    def build(self, shape):
        self.built = True

    def call(self, x, training=None):
        outputs = self.net(x)
        return outputs + 0.1 * ops.softmax(ops.cast(self.auxiliary(x), "float32")) if training else outputs


def test_layer_that_runs_only_in_training_is_trained():
    model = AuxiliaryHead()
    model(small_data(1)[0])
    model.compile("adam", "sparse_categorical_crossentropy")
    fit(model, data_with_nan())
    assert model.optimizer.counters.overflows_by_variable.shape == (6,)


@pytest.mark.parametrize("hook", ["on_train_begin", "on_epoch_begin"])
def test_layers_that_a_callback_unfreezes_are_trained(hook):
    model = small_model()
    model.layers[0].trainable = False
    model.compile("adam", "sparse_categorical_crossentropy")
    before = model.get_weights()

    def unfreeze(*arguments):
        model.layers[0].trainable = True

    fit(model, data_with_nan(), callbacks=[keras.callbacks.LambdaCallback(**{hook: unfreeze})])
    assert not any(np.array_equal(old, new) for old, new in zip(before, model.get_weights(), strict=True))


def test_training_step_that_is_set_after_compile_trains_its_own_variables():
    model, other = small_model(), keras.Variable([1.0])
    model.compile("sgd", "sparse_categorical_crossentropy")

    def step(data):
        return {"loss": take_step(model.optimizer, [other], lambda: ops.sum(other * 2.0))}

    model.train_step = step
    fit(model, data_with_nan())
    assert float(other[0]) < 1.0


def test_frozen_model_leaves_the_optimizer_unbuilt():
    model = small_model()
    model.trainable = False
    model.compile("sgd", "sparse_categorical_crossentropy")
    with contextlib.suppress(ValueError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(model, data_with_nan())
    assert model.optimizer.counters.overflows_by_variable is None


class AppliesEverySecondTime(kmp.LossScaleOptimizer):
    """Drops the gradients of every other step."""

    calls = 0

    def apply(self, grads, trainable_variables=None, **arguments):
        self.calls += 1
        if self.calls % 2:
            super().apply(grads, trainable_variables, **arguments)


def test_batch_whose_gradients_are_not_applied_is_checked_and_keeps_its_statistics():
    layers = [keras.layers.BatchNormalization(), keras.layers.Dense(2, dtype="float32"), kmp.layers.Softmax()]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(AppliesEverySecondTime("sgd"), "sparse_categorical_crossentropy", run_eagerly=True)
    x, y = data_with_nan(0, batches=2)
    model.train_on_batch(x[:8], y[:8])
    np.testing.assert_array_equal(layers[0].moving_mean, 0.0)
    model.train_on_batch(x[8:], y[8:])
    assert np.any(layers[0].moving_mean.numpy())
    assert np.isfinite(fit(model, data_with_nan(2, 7))["loss"][0])


def test_optimizers_of_compiled_models_inside_a_model_are_guarded():
    class Outer(keras.Model):
        def __init__(self):
            super().__init__()
            layers = [keras.layers.BatchNormalization(), keras.layers.Dense(1, dtype="float32")]
            self.inner = keras.Sequential([keras.Input((4,)), *layers])
            self.inner.compile("sgd")

        def train_step(self, data):
            x, y = data
            loss_of = lambda: ops.mean(ops.square(self.inner(x, training=True) - y))  # noqa: E731
            return {"step_loss": take_step(self.inner.optimizer, self.inner.trainable_variables, loss_of)}

    model = Outer()
    model.compile(loss="mse")
    before = model.inner.get_weights()
    fit(model, (np.full((8, 4), np.nan, "float32"), np.zeros((8, 1), "float32")))
    assert model.inner.optimizer.snapshot().overflow_count == 1
    assert_equal(model.inner.get_weights(), before)
