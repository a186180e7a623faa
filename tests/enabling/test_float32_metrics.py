"""Metrics compute in float32 under `enable`, whatever code updates them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import kmp

X = np.ones((8, 4), "float32")
Y = np.full((8, 1), 1000.0, "float32")
FAR = 1000.0**2  # the squared error of a model that predicts 0, above the largest float16


class OwnSteps(keras.Model):
    """Updates the compiled metrics itself, as in Keras' guide."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self.update(y, y_pred, loss)

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        return self.update(y, y_pred, self.compute_loss(y=y, y_pred=y_pred))

    def update(self, y, y_pred, loss):
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return self.get_metrics_result()


class OwnComputeMetrics(keras.Model):
    """Updates a metric of its own in `compute_metrics`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.error = keras.metrics.MeanSquaredError(name="mse")

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.error.update_state(y, y_pred, sample_weight)
        return self.get_metrics_result()


class Endpoint(keras.layers.Layer):
    """Updates a metric of its inputs."""

    def __init__(self):
        super().__init__()
        self.error = keras.metrics.MeanSquaredError(name="mse")

    def call(self, y_pred, y):
        self.error.update_state(y, y_pred)
        return y_pred


def zeros(features=1):
    return keras.layers.Dense(features, kernel_initializer="zeros")


def model_of(cls, **options):
    inputs = keras.Input((4,))
    model = cls(inputs, zeros()(inputs))
    metrics = ["mse"] if cls is not OwnComputeMetrics else None
    model.compile(keras.optimizers.SGD(1e-9), "mse", metrics=metrics, **options)
    return model


MODES = {
    "eager": {"run_eagerly": True},
    "graph": {"jit_compile": False},
    "several steps": {"jit_compile": False, "steps_per_execution": 2},
    "xla": {"jit_compile": True},
}


@pytest.mark.parametrize(
    ("cls", "mode"),
    [
        (OwnSteps, "eager"),
        (OwnSteps, "several steps"),
        (OwnSteps, "xla"),
        (OwnComputeMetrics, "graph"),
    ],
)
def test_code_of_a_model_updates_metrics_in_float32(enabled, cls, mode):
    model = model_of(cls, **MODES[mode])
    logs = model.fit(X, Y, batch_size=4, verbose=0).history
    assert logs["mse"] == pytest.approx([FAR], rel=1e-3)
    assert model.evaluate(X, Y, verbose=0, return_dict=True)["mse"] == pytest.approx(FAR, rel=1e-3)


def test_model_compiled_under_enable_updates_metrics_in_float32_after_it():
    with kmp.enable():
        model = model_of(OwnSteps, run_eagerly=True)
    logs = model.fit(X, Y, verbose=0).history
    assert logs["mse"] == pytest.approx([FAR], rel=1e-3)


def test_metrics_of_a_model_loaded_without_enable_are_updated_in_float32(tmp_path):
    with kmp.enable():
        inputs = keras.Input((4,))
        model = keras.Model(inputs, zeros()(inputs))
        model.compile("sgd", "mse", metrics=["mse"], run_eagerly=True)
        model.save(tmp_path / "model.keras")
    del model
    loaded = keras.models.load_model(tmp_path / "model.keras")
    logs = loaded.evaluate(X, Y, verbose=0, return_dict=True)
    assert logs["mse"] == pytest.approx(FAR, rel=1e-3)


def test_own_test_step_updates_a_top_k_metric(enabled):
    inputs = keras.Input((4,))
    model = OwnSteps(inputs, zeros(10)(inputs))
    top = keras.metrics.SparseTopKCategoricalAccuracy(10, name="top")
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=[top], run_eagerly=True)
    logs = model.evaluate(X, np.ones(8, int), verbose=0, return_dict=True)
    assert logs["top"] == 1.0


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_layer_updates_a_metric_in_float32(enabled, mode):
    inputs, targets = keras.Input((4,)), keras.Input((1,))
    model = keras.Model([inputs, targets], Endpoint()(zeros()(inputs), targets))
    model.compile(keras.optimizers.SGD(1e-9), "mse", **MODES[mode])
    logs = model.fit([X, Y], Y, batch_size=4, verbose=0).history
    assert logs["mse"] == pytest.approx([FAR], rel=1e-3)


HALF = tf.constant([[1000.0], [0.0]], "float16")


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("values", [HALF, HALF.numpy(), tf.cast(HALF, "bfloat16")])
def test_loop_updates_a_metric_in_float32(enabled, in_graph, values):
    metric = keras.metrics.MeanSquaredError()

    def update():
        return metric(ops.zeros((2, 1)), values)

    if in_graph:
        update = tf.function(update)
    assert float(update()) == pytest.approx(FAR / 2)


def test_sum_of_a_metric_that_a_layer_updates_is_not_rounded_to_16_bits(enabled):
    class Counting(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.rows = keras.metrics.Sum(name="rows")

        def call(self, x):
            self.rows.update_state(ops.ones((1,)))
            return x * ops.cast(self.rows.result() - 4095.0, x.dtype)

    layer = Counting()
    layer.rows.update_state(4096.0)  # float16 has no 4097
    np.testing.assert_array_equal(layer(X), np.full(X.shape, 2.0))
    assert float(layer.rows.result()) == 4097.0


class Seen(keras.metrics.Metric):
    """Remembers the arguments that it gets."""

    def update_state(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs

    def result(self):
        return 0.0


def test_only_16_bit_floats_among_nested_arguments_are_cast(enabled):
    metric, half = Seen(), ops.ones((2, 1), "float16")
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]], dtype="float16")
    sparse = tf.sparse.from_dense(half)
    others = [np.array(["a"]), np.array([object()]), ops.ones(1, "bool"), ops.ones(1, "int8"), None]
    metric.update_state({"a": [half, ragged]}, others, sample_weight=(sparse, 2.0))
    (first, second), weights = metric.args[0]["a"], metric.kwargs["sample_weight"]
    assert [each.dtype.name for each in (first, second, weights[0])] == ["float32"] * 3
    assert isinstance(second, tf.RaggedTensor)
    assert second.to_list() == [[1.0], [2.0, 3.0]]
    assert all(got is given for got, given in zip(metric.args[1], others, strict=True))
    assert weights[1] == 2.0


def test_metric_fills_the_list_that_it_is_given(enabled):
    class Collecting(Seen):
        def update_state(self, y_pred, collected):
            collected["outputs"].append(y_pred)
            collected["rows"] = len(y_pred)

    collected = {"outputs": []}
    for rows in (2, 1):
        Collecting().update_state(HALF[:rows], collected)
        assert collected["rows"] == rows
    assert [each.dtype.name for each in collected["outputs"]] == ["float32"] * 2


def test_containers_without_16_bit_values_are_those_of_the_caller(enabled):
    seen = []  # an attribute of a metric would be a copy

    class Passing(Seen):
        def update_state(self, *args):
            seen.extend(args)

    filled, half = {"a": []}, ops.ones(1, "float16")
    Passing().update_state({"both": (half, filled)}, [half, filled["a"]], filled)
    assert seen[0]["both"][0].dtype.name == "float32"
    assert seen[0]["both"][1] is seen[2] is filled
    assert seen[1][1] is filled["a"]


def test_mask_of_a_cast_output_is_kept(enabled):
    output = ops.array([[1000.0], [0.0]], "float16")
    output._keras_mask = ops.array([False, True])
    metric = keras.metrics.MeanSquaredError()
    assert float(metric(ops.zeros((2, 1)), output)) == 0.0


def test_metric_in_16_bits_on_purpose_gets_what_it_is_given(enabled):
    metric = Seen(dtype="float16")
    metric.update_state(ops.ones(1, "float16"))
    assert metric.args[0].dtype.name == "float16"


def test_metrics_outside_of_enable_are_those_of_keras():
    metric, half = Seen(), ops.ones(1, "float16")
    with kmp.enable():
        model = model_of(OwnSteps)
    metric.update_state(half)
    assert metric.args[0] is half
    assert metric not in model.metrics
