"""A skipped step leaves the state of the layers unchanged: in `fit`, and in a custom loop with `kmp.guard`."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MODES, OverflowsBackward, small_data, values
from keras import ops

import kmp
from kmp.backend import state_restored, sublayers
from kmp.policy import guarding

pytestmark = pytest.mark.usefixtures("enabled")


@keras.saving.register_keras_serializable("tests")
class Codebook(keras.Layer):
    """A custom layer whose forward pass updates a float state and an integer state."""

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[-1:], trainable=False, initializer="zeros", name="mean")
        self.calls = self.add_weight(shape=(), trainable=False, initializer="zeros", dtype="int64", name="calls")

    def call(self, x, training=None):
        if training:
            self.mean.assign(0.5 * self.mean + 0.5 * ops.cast(ops.mean(x, axis=0), self.mean.dtype))
            self.calls.assign_add(1)
        return x


LAYERS = {
    "BatchNormalization": lambda: [keras.layers.BatchNormalization()],
    "renorm": lambda: [keras.layers.BatchNormalization(renorm=True)],
    "kmp": lambda: [kmp.layers.BatchNormalization()],
    "SpectralNormalization": lambda: [keras.layers.SpectralNormalization(keras.layers.Dense(8))],
    "custom": lambda: [Codebook()],
    "nested": lambda: [keras.Sequential([keras.Sequential([keras.layers.BatchNormalization()])])],
    "stateful": lambda: [keras.layers.Reshape((1, 4)), keras.layers.LSTM(4, stateful=True)],
}
no_float16_epsilon = pytest.mark.filterwarnings(
    "ignore:overflow encountered in cast:RuntimeWarning"  # Keras' SpectralNormalization casts beyond float16's range
)
CORRUPT_VALUES = {"backward": 64.0, "forward": np.nan}


def make(name, **arguments):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(4), OverflowsBackward(), *LAYERS[name](), keras.layers.Dense(2), kmp.layers.Softmax()]
    model = keras.Sequential([keras.Input((4,), batch_size=8), *layers])
    model.compile("sgd", "sparse_categorical_crossentropy", **arguments)
    return model


def floats(model):
    return [value for value in values(model.weights) if value.dtype.kind == "f"]


def batch(corrupt_value=None):
    x, y = small_data(1)
    if corrupt_value is not None:
        x[3] = corrupt_value
    return x, y


CASES = [(name, mode) for name in LAYERS for mode in (MODES if name in ("BatchNormalization", "custom") else ["graph"])]


@no_float16_epsilon
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_step_skipped_by_fit_leaves_state_unchanged_and_predictions_finite(name, mode):
    if name == "renorm" and "renorm" not in inspect.signature(keras.layers.BatchNormalization).parameters:
        pytest.skip("this Keras has no renorm")
    model = make(name, **MODES[mode])
    model.fit(*batch(), verbose=0, batch_size=8)
    for skipped, corrupt_value in enumerate(CORRUPT_VALUES.values(), start=1):
        before, moments = floats(model), values(model.optimizer.inner_optimizer.variables)
        model.fit(*batch(corrupt_value), verbose=0, batch_size=8)
        for old, new in zip(before, floats(model), strict=True):
            np.testing.assert_array_equal(old, new)
        for old, new in zip(moments, values(model.optimizer.inner_optimizer.variables), strict=True):
            np.testing.assert_array_equal(old, new)
        assert model.optimizer.snapshot().overflow_count == skipped
        assert np.isfinite(model.predict(batch()[0], verbose=0, batch_size=8)).all()
        model.fit(*batch(), verbose=0, batch_size=8)
        assert not all(np.array_equal(old, new) for old, new in zip(before, floats(model), strict=True))


@no_float16_epsilon
@pytest.mark.parametrize("name", ["BatchNormalization", "SpectralNormalization", "custom"])
def test_step_skipped_in_a_guarded_loop_leaves_state_unchanged(name, run_step):
    model = make(name)
    optimizer, loss_function = kmp.wrap("adam"), keras.losses.SparseCategoricalCrossentropy()
    optimizer.build(model.trainable_variables)

    @run_step
    def step(x, y):
        with kmp.guard(optimizer, model):
            with tf.GradientTape() as tape:
                scaled = optimizer.scale_loss(loss_function(y, model(x, training=True)))
            optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)

    step(*map(tf.constant, batch()))
    for corrupt_value in CORRUPT_VALUES.values():
        before = floats(model)
        step(*map(tf.constant, batch(corrupt_value)))
        for old, new in zip(before, floats(model), strict=True):
            np.testing.assert_array_equal(old, new)
        step(*map(tf.constant, batch()))
        assert not any(np.array_equal(old, new) for old, new in zip(before[:2], floats(model)[:2], strict=True))


class Subclassed(keras.Model):
    """A model without variables until its first step."""

    def __init__(self):
        super().__init__()
        self.dense, self.normalization, self.head = (
            keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(2),
        )  # fmt: skip
        self.softmax, self.overflows = kmp.layers.Softmax(), OverflowsBackward()

    def call(self, x, training=None):
        return self.softmax(self.head(self.normalization(self.overflows(self.dense(x)), training=training)))


def sequential():
    layers = [keras.layers.Dense(4), OverflowsBackward(), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    return keras.Sequential([*layers, kmp.layers.Softmax()])


def nested_sequential():
    return keras.Sequential([keras.layers.Dropout(0.0), sequential()])


# Every pair of a model, a mode and a corruption.
UNBUILT_CASES = [
    (make_unbuilt, mode, list(CORRUPT_VALUES)[(i + j) % 2])
    for i, make_unbuilt in enumerate([Subclassed, sequential, nested_sequential])
    for j, mode in enumerate(MODES)
]


@pytest.mark.parametrize(("make_unbuilt", "mode", "corruption"), UNBUILT_CASES)
def test_skipped_first_step_of_an_unbuilt_model_leaves_initial_state(make_unbuilt, mode, corruption):
    model = make_unbuilt()
    model.compile("sgd", "sparse_categorical_crossentropy", **MODES[mode])
    model.fit(*batch(CORRUPT_VALUES[corruption]), verbose=0, batch_size=8)
    assert model.optimizer.snapshot().overflow_count == 1
    (layer,) = [x for x in sublayers(model) if isinstance(x, keras.layers.BatchNormalization)]
    np.testing.assert_array_equal(layer.moving_mean, np.zeros(4))
    np.testing.assert_array_equal(layer.moving_variance, np.ones(4))
    model.fit(*batch(), verbose=0, batch_size=8)
    assert not np.array_equal(layer.moving_mean, np.zeros(4))


class TwoOptimizers(keras.Model):
    """Trains with two optimizers, as GANs do."""

    def __init__(self):
        super().__init__()
        self.net = make("BatchNormalization")
        self.first, self.second = kmp.wrap("sgd"), kmp.wrap("adam")

    def train_step(self, data):
        x, y = data
        half = len(self.net.trainable_variables) // 2
        with tf.GradientTape() as tape:
            loss = ops.mean(keras.losses.sparse_categorical_crossentropy(y, self.net(x, training=True)))
            scaled = self.first.scale_loss(loss)
            self.second.scale_loss(loss)
        gradients = tape.gradient(scaled, self.net.trainable_variables)
        self.first.apply(gradients[:half], self.net.trainable_variables[:half])
        self.second.apply(gradients[half:], self.net.trainable_variables[half:])
        return {"loss": loss}


def test_model_with_several_optimizers_is_guarded():
    model = TwoOptimizers()
    model.compile(None)
    model.fit(*batch(), verbose=0)
    before = values(model.net.layers[2].non_trainable_variables)
    model.fit(*batch(64.0), verbose=0)
    assert model.first.snapshot().overflow_count == 1
    for old, new in zip(before, values(model.net.layers[2].non_trainable_variables), strict=True):
        np.testing.assert_array_equal(old, new)


def test_frozen_weights_are_not_copied():
    backbone = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.BatchNormalization()])
    model = keras.Sequential([keras.Input((4,)), backbone, keras.layers.BatchNormalization(), keras.layers.Dense(2)])
    backbone.trainable = False
    names = {variable.path.split("/")[-1] for variable in guarding._states([model])}
    assert names == {"moving_mean", "moving_variance"}


def frozen_spectral():
    return [keras.layers.SpectralNormalization(keras.layers.Dense(8), trainable=False)]


def spectral_around_frozen():
    return [keras.layers.SpectralNormalization(keras.layers.Dense(8, trainable=False))]


def frozen_stateful():
    return [keras.layers.Reshape((1, 4)), keras.layers.LSTM(4, stateful=True, trainable=False)]


def frozen_except_last_layer():
    inner = keras.Sequential([keras.layers.Dense(4), keras.layers.BatchNormalization()])
    inner.build((None, 4))
    inner.trainable = False
    inner.layers[-1].trainable = True
    return [inner]


@no_float16_epsilon
@pytest.mark.parametrize("layers", [frozen_spectral, spectral_around_frozen, frozen_stateful, frozen_except_last_layer])
def test_state_updates_of_frozen_layers_are_restored(layers, monkeypatch):
    monkeypatch.setitem(LAYERS, "frozen", layers)
    model = make("frozen")

    def state():
        stateful = [layer for layer in model.layers if getattr(layer, "stateful", False)]
        return floats(model) + [variable.numpy() for layer in stateful for variable in layer.states]

    for skipped, corrupt_value in enumerate(CORRUPT_VALUES.values(), start=1):
        model.fit(*batch(), verbose=0, batch_size=8)
        before = state()
        model.fit(*batch(corrupt_value), verbose=0, batch_size=8)
        assert model.optimizer.snapshot().overflow_count == skipped
        for old, new in zip(before, state(), strict=True):
            np.testing.assert_array_equal(old, new)


class Unfreezes(keras.Sequential):
    """Sets `trainable` in its training step, as GANs do for their discriminator."""

    def train_step(self, data):
        self.layers[2].trainable = True
        return super().train_step(data)


def test_state_is_restored_if_trainable_changes_in_the_step():
    model = Unfreezes(make("BatchNormalization").layers)
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.layers[2].trainable = False
    for _ in range(3):
        model.fit(*batch(), verbose=0, batch_size=8)
    before = floats(model)
    model.fit(*batch(64.0), verbose=0, batch_size=8)
    for old, new in zip(before, floats(model), strict=True):
        np.testing.assert_array_equal(old, new)


class AppliesTwice(keras.Sequential):
    """Applies two steps per batch, of which the second overflows."""

    def train_step(self, data):
        for x in (data[0], ops.full_like(data[0], 64.0)):
            with tf.GradientTape() as tape:
                loss = ops.mean(keras.losses.sparse_categorical_crossentropy(data[1], self(x, training=True)))
                scaled = self.optimizer.scale_loss(loss)
            self.optimizer.apply(tape.gradient(scaled, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@no_float16_epsilon
def test_normalized_kernel_keeps_an_applied_step_if_another_step_is_skipped():
    model = AppliesTwice(make("SpectralNormalization").layers)
    model.compile("sgd", "sparse_categorical_crossentropy")
    before = model.layers[2].layer.kernel.numpy()
    model.fit(*batch(), verbose=0, batch_size=8)
    assert (model.optimizer.snapshot().step, model.optimizer.snapshot().overflow_count) == (2, 1)
    assert not np.array_equal(before, model.layers[2].layer.kernel)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MobileNetV3Small", "EfficientNetB0"])
def test_applications_predict_the_same_after_a_skipped_step(name):
    model = getattr(keras.applications, name)(
        weights=None, input_shape=(32, 32, 3), classes=2, classifier_activation=None
    )
    model = keras.Sequential([model, kmp.layers.Softmax()])
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    random = np.random.default_rng(0)
    x, y = random.normal(size=(4, 32, 32, 3)).astype("float32"), np.array([0, 1, 0, 1])
    corrupt = x.copy()
    corrupt[1] = np.inf
    model.fit(x, y, verbose=0, batch_size=4)
    before = model.predict(x, verbose=0)
    model.fit(corrupt, y, verbose=0, batch_size=4)
    assert model.optimizer.snapshot().nonfinite_loss_count == 1
    assert np.isfinite(before).all()
    np.testing.assert_array_equal(model.predict(x, verbose=0), before)


@pytest.mark.parametrize(
    ("arguments", "error_class", "match"),
    [
        (("adam", keras.layers.Dense(1)), TypeError, "`optimizer` must be a kmp.LossScaleOptimizer. Received.*'adam'"),
        ((kmp.LossScaleOptimizer("sgd"), "layer"), TypeError, "`layers` must be models or layers. Received: 'layer'"),
        ((kmp.LossScaleOptimizer("sgd"),), ValueError, "`layers` must hold the models or layers.*Received: none"),
    ],
)
def test_guard_with_invalid_arguments_raises(arguments, error_class, match):
    with pytest.raises(error_class, match=match), kmp.guard(*arguments):
        pass


def test_state_is_restored_if_custom_metrics_exist_only_after_compile():
    class Gan(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def compile(self, optimizer):
            super().compile()
            self.custom_optimizer, self.loss_metric = optimizer, keras.metrics.Mean(name="loss")

        @property
        def metrics(self):
            return [self.loss_metric]

        def call(self, x):
            return self.dense(x)

    uncompiled, compiled = Gan(), Gan()
    compiled.compile("sgd")
    for model in (uncompiled, compiled):
        model(np.ones((2, 3)))
        before = model.dense.kernel.numpy()
        with state_restored(model):
            model.dense.kernel.assign(before + 1)
            if model is compiled:
                model.loss_metric.update_state(3.0)
        np.testing.assert_array_equal(model.dense.kernel, before)
    assert float(compiled.loss_metric.result()) == 0.0
