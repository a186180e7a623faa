"""A skipped step leaves the state of the layers unchanged, in `fit` and under `kmp.guard`."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MODES, OverflowsBackward, assert_equal, small_data, take_step, values
from keras import ops

import kmp
from kmp.backend.keras_internals import sublayers
from kmp.backend.state_rollback import state_restored

pytestmark = pytest.mark.usefixtures("enabled")


class Codebook(keras.Layer):
    """A custom layer whose forward pass updates a float state and an integer state."""

    def build(self, shape):
        self.mean = self.add_weight(
            shape=shape[-1:], trainable=False, initializer="zeros", name="mean"
        )
        self.calls = self.add_weight(
            shape=(), trainable=False, initializer="zeros", dtype="int64", name="calls"
        )

    def call(self, x, training=None):
        if training:
            self.mean.assign(0.5 * self.mean + 0.5 * ops.cast(ops.mean(x, axis=0), self.mean.dtype))
            self.calls.assign_add(1)
        return x


def frozen_except_the_last_layer():
    inner = keras.Sequential([keras.layers.Dense(4), keras.layers.BatchNormalization()])
    inner.build((None, 4))
    inner.trainable = False
    inner.layers[-1].trainable = True
    return inner


def spectral_normalization(**arguments):
    return keras.layers.SpectralNormalization(keras.layers.Dense(4, **arguments), **arguments)


FROZEN = {"trainable": False}
LAYERS = {
    "BatchNormalization": lambda: [keras.layers.BatchNormalization()],
    "SpectralNormalization": lambda: [spectral_normalization()],
    "trainable": lambda: [keras.layers.BatchNormalization(), spectral_normalization(), Codebook()],
    "frozen": lambda: [
        spectral_normalization(**FROZEN),
        frozen_except_the_last_layer(),
        keras.layers.Reshape((1, 4)),
        keras.layers.LSTM(4, stateful=True, **FROZEN),
    ],
}
no_float16_epsilon = pytest.mark.filterwarnings(
    # Keras' SpectralNormalization casts beyond float16's range
    "ignore:overflow encountered in cast:RuntimeWarning"
)
CORRUPT_VALUES = {"backward": 64.0, "forward": np.nan}


def make(name, **arguments):
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(4),
        OverflowsBackward(),
        *LAYERS[name](),
        keras.layers.Dense(2),
        kmp.layers.Softmax(),
    ]
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


def fit(model, corrupt_value=None):
    model.fit(*batch(corrupt_value), verbose=0, batch_size=8)


def state(model):
    """All float state: weights, states of stateful RNNs and moments of the optimizer."""
    rnn_states = [
        state
        for layer in model.layers
        if getattr(layer, "stateful", False)
        for state in layer.states
    ]
    return floats(model) + values([*rnn_states, *model.optimizer.inner_optimizer.variables])


@no_float16_epsilon
@pytest.mark.parametrize("name", ["trainable", "frozen"])
def test_step_skipped_by_fit_leaves_state_unchanged_and_predictions_finite(name):
    model = make(name, jit_compile=False)
    fit(model)
    for skipped, corrupt_value in enumerate(CORRUPT_VALUES.values(), start=1):
        before, weights = state(model), floats(model)
        fit(model, corrupt_value)
        assert_equal(before, state(model))
        assert model.optimizer.snapshot().overflow_count == skipped
        assert np.isfinite(model(batch()[0])).all()
        fit(model)
        assert not all(
            np.array_equal(old, new) for old, new in zip(weights, floats(model), strict=True)
        )


@no_float16_epsilon
@pytest.mark.parametrize("run_step", ["eager", "graph"], indirect=True)
def test_step_skipped_in_a_guarded_loop_leaves_state_unchanged(run_step):
    model = make("trainable")
    optimizer, loss_function = kmp.wrap("adam"), keras.losses.SparseCategoricalCrossentropy()
    optimizer.build(model.trainable_variables)

    @run_step
    def step(x, y):
        with kmp.guard(optimizer, model):
            take_step(
                optimizer,
                model.trainable_variables,
                lambda: loss_function(y, model(x, training=True)),
            )

    step(*map(tf.constant, batch()))
    for corrupt_value in CORRUPT_VALUES.values():
        before = floats(model)
        step(*map(tf.constant, batch(corrupt_value)))
        assert_equal(before, floats(model))
        step(*map(tf.constant, batch()))
        assert not any(
            np.array_equal(old, new) for old, new in zip(before[:2], floats(model)[:2], strict=True)
        )


def unbuilt_layers():
    first = [keras.layers.Dense(4), OverflowsBackward(), keras.layers.BatchNormalization()]
    return [*first, keras.layers.Dense(2), kmp.layers.Softmax()]


class Subclassed(keras.Model):
    """A model without variables until its first step."""

    def __init__(self):
        super().__init__()
        self.parts = unbuilt_layers()

    def call(self, x, training=None):
        for layer in self.parts:
            x = (
                layer(x, training=training)
                if isinstance(layer, keras.layers.BatchNormalization)
                else layer(x)
            )
        return x


UNBUILT = {
    "subclassed": Subclassed,
    "sequential": lambda: keras.Sequential(unbuilt_layers()),
    "nested": lambda: keras.Sequential(
        [keras.layers.Dropout(0.0), keras.Sequential(unbuilt_layers())]
    ),
}


@pytest.mark.parametrize(
    ("name", "mode", "corruption"),
    [
        ("subclassed", "steps_per_execution", "backward"),
        ("sequential", "graph", "backward"),
        ("nested", "eager", "forward"),
    ],
)
def test_skipped_first_step_of_an_unbuilt_model_leaves_initial_state(name, mode, corruption):
    model = UNBUILT[name]()
    model.compile("sgd", "sparse_categorical_crossentropy", **MODES[mode])
    fit(model, CORRUPT_VALUES[corruption])
    assert model.optimizer.snapshot().overflow_count == 1
    (layer,) = [x for x in sublayers(model) if isinstance(x, keras.layers.BatchNormalization)]
    np.testing.assert_array_equal(layer.moving_mean, np.zeros(4))
    np.testing.assert_array_equal(layer.moving_variance, np.ones(4))
    fit(model)
    assert not np.array_equal(layer.moving_mean, np.zeros(4))


class TensorFlowState(keras.Layer):
    """Updates variables of TensorFlow in its forward pass, one that it creates there."""

    def __init__(self):
        super().__init__()
        self.mean = tf.Variable(0.0, trainable=False)
        self.means = {"a": tf.Variable([1.0])}
        self.module = tf.Module()
        self.module.mean = tf.Variable(2.0)
        self.calls = tf.Variable(0, dtype="int64")
        self.constant = tf.Variable("text")

    def build(self, shape):
        self.late = tf.Variable(tf.fill(shape[-1:], 3.0))

    def call(self, x, training=None):
        if training:
            self.calls.assign_add(1)
            for state in self.states():
                state.assign(0.5 * state + tf.reduce_mean(tf.cast(x, "float32")))
        return x

    def states(self):
        return [self.mean, self.means["a"], self.module.mean, self.late]


@pytest.mark.parametrize(
    ("mode", "is_built"),
    [
        ("eager", True),
        ("graph", False),
        ("compiled step", True),
        ("xla", False),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in [("eager", False), ("graph", True), ("compiled step", False), ("xla", True)]
        ),
    ],
)
def test_variables_of_tensorflow_in_a_layer_are_restored(mode, is_built):
    layer = TensorFlowState()
    inputs = [keras.Input((4,))] if is_built else []
    layers = [keras.layers.Dense(4), layer, OverflowsBackward(), kmp.layers.Softmax()]
    model = keras.Sequential([*inputs, *layers])
    optimizer = kmp.LossScaleOptimizer("sgd", jit_compile=mode == "compiled step")
    model.compile(optimizer, "sparse_categorical_crossentropy", **MODES[mode])
    fit(model, np.nan)
    expected = [0.0, [1.0], 2.0, [3.0] * 4]
    assert_equal([state.numpy() for state in layer.states()], expected)
    fit(model)
    means = [float(tf.reduce_mean(state)) for state in layer.states()]
    assert np.isfinite(means).all()
    assert means[0] != 0.0


def test_variables_of_tensorflow_are_restored_on_several_replicas(two_replicas):
    class State(keras.Layer):
        def __init__(self):
            super().__init__()
            self.mean = tf.Variable([2.0])
            self.constant = tf.Variable([2.0], aggregation=tf.VariableAggregation.SUM)
            self.any_shape = tf.Variable([2.0], shape=tf.TensorShape(None))

        def call(self, x):
            self.mean.assign(0.5 * self.mean + tf.reduce_mean(tf.cast(x, "float32")))
            return x * tf.cast(self.constant, x.dtype)

    with two_replicas.scope():
        state = State()
        layers = [keras.Input((4,)), state, keras.layers.Dense(3), kmp.layers.Softmax()]
        model = keras.Sequential(layers)
        model.compile("sgd", "sparse_categorical_crossentropy")
    fit(model, np.nan)
    assert model.optimizer.snapshot().overflow_count == 1
    for variable in (state.mean, state.constant):
        for value in two_replicas.experimental_local_results(variable):
            np.testing.assert_array_equal(value, [2.0])
    fit(model)
    assert state.mean.numpy() != 2.0


class TwoOptimizers(keras.Model):
    """Has an optimizer for its first layer, whose gradients overflow, and one for its last."""

    def __init__(self, first):
        super().__init__()
        self.net, self.own, self.first = make("BatchNormalization"), kmp.wrap("adam"), first

    def train_step(self, data):
        x, y = data
        inner = self.net.optimizer
        optimizers = (self.own, inner) if self.first == "own" else (inner, self.own)
        for optimizer, layer in zip(
            optimizers, (self.net.layers[0], self.net.layers[-2]), strict=True
        ):

            def loss_of():
                return self.net.compute_loss(y=y, y_pred=self.net(x, training=True))

            loss = take_step(optimizer, layer.trainable_variables, loss_of)
        return {"loss": loss}


@pytest.mark.parametrize("first", ["own", "inner"])
def test_optimizers_in_attributes_and_of_compiled_models_inside_a_model_are_guarded(first):
    model = TwoOptimizers(first)
    model.compile(None, run_eagerly=True)
    optimizers = model.own, model.net.optimizer
    before = values(model.net.layers[2].non_trainable_variables)
    fit(model, 64.0)
    assert [optimizer.snapshot().overflow_count for optimizer in optimizers] == [
        first == "own",
        first == "inner",
    ]
    assert_equal(before, values(model.net.layers[2].non_trainable_variables))


def test_frozen_weights_are_not_copied():
    backbone = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(4), keras.layers.BatchNormalization()]
    )
    model = keras.Sequential(
        [keras.Input((4,)), backbone, keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    )
    backbone.trainable = False
    optimizer = kmp.wrap("sgd")

    @tf.function
    def step():
        with kmp.guard(optimizer, model):
            pass

    read = {variable.name for variable in step.get_concrete_function().graph.variables}
    weights = {weight.path for weight in model.weights if f"{weight.path}:0" in read}
    assert {path.split("/")[-1] for path in weights} == {"moving_mean", "moving_variance"}
    assert len(weights) == 4


class Unfreezes(keras.Sequential):
    """Sets `trainable` in its training step, as GANs do for their discriminator."""

    def train_step(self, data):
        self.layers[2].trainable = True
        return super().train_step(data)


def test_state_is_restored_if_trainable_changes_in_the_step():
    model = Unfreezes(make("BatchNormalization").layers)
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    model.layers[2].trainable = False
    before = floats(model)
    fit(model, 64.0)
    assert_equal(before, floats(model))


class AppliesTwice(keras.Sequential):
    """Applies two steps per batch, of which the second overflows."""

    def train_step(self, data):
        for x in (data[0], ops.full_like(data[0], 64.0)):

            def loss_of(x=x):
                return self.compute_loss(y=data[1], y_pred=self(x, training=True))

            loss = take_step(self.optimizer, self.trainable_variables, loss_of)
        return {"loss": loss}


@no_float16_epsilon
def test_normalized_kernel_keeps_an_applied_step_if_another_step_is_skipped():
    model = AppliesTwice(make("SpectralNormalization").layers)
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    before = model.layers[2].layer.kernel.numpy()
    fit(model)
    assert (model.optimizer.snapshot().step, model.optimizer.snapshot().overflow_count) == (2, 1)
    assert not np.array_equal(before, model.layers[2].layer.kernel)


@no_float16_epsilon
def test_guard_in_a_guarded_eager_step_restores_the_weights_that_its_function_assigns():
    layers = make("SpectralNormalization").layers
    model, optimizer = keras.Sequential(layers), kmp.LossScaleOptimizer("sgd")
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x, y):
        with kmp.guard(optimizer, model):

            def loss_of():
                probabilities = model(x, training=True)
                losses = keras.losses.sparse_categorical_crossentropy(y, probabilities)
                return keras.ops.mean(losses)

            take_step(optimizer, model.trainable_variables, loss_of)

    x, y = map(tf.convert_to_tensor, batch(64.0))
    before = floats(model)
    with kmp.guard(kmp.LossScaleOptimizer("sgd"), model):  # takes no step
        step(x, y)
    assert optimizer.snapshot().overflow_count == 1
    assert_equal(before, floats(model))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (
            ("adam", keras.layers.Dense(1)),
            "`optimizer` must be a kmp.LossScaleOptimizer, as.*'adam'",
        ),
        (
            (kmp.LossScaleOptimizer("sgd"), "layer"),
            "`layers` must be models or layers. Received: layers='layer'",
        ),
        (
            (kmp.LossScaleOptimizer("sgd"),),
            "`layers` must hold the models or layers.*Received: none",
        ),
    ],
)
def test_guard_with_invalid_arguments_raises(arguments, match):
    with pytest.raises((TypeError, ValueError), match=match), kmp.guard(*arguments):
        pass


class CustomMetrics(keras.Sequential):
    """Has metrics only after its own `compile`, as Keras' GAN examples do."""

    @property
    def metrics(self):
        return [self.loss_metric]


def test_state_of_a_model_whose_metrics_do_not_exist_yet_is_restored():
    model = CustomMetrics([keras.Input((3,)), keras.layers.Dense(1)])
    before = values(model.weights)
    with state_restored(model):
        model.layers[0].kernel.assign_add(np.ones((3, 1)))
    assert_equal(model.weights, before)


class NormalizesInBranch(keras.layers.Dense):
    """Assigns its kernel in a branch, and its bias in a loop of the graph."""

    def call(self, x):
        def halve(count):
            self.bias.assign(0.5 * self.bias)
            return [count + 1]

        def reset():
            self.kernel.assign(tf.zeros_like(self.kernel.value))
            return tf.constant(True)

        tf.cond(tf.reduce_any(tf.math.is_nan(x)), reset, lambda: tf.constant(False))
        tf.while_loop(lambda count: count < 2, halve, [tf.constant(0)])
        return super().call(x)


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_weights_that_a_branch_or_loop_assigns_are_restored(mode):
    layer = NormalizesInBranch(4, bias_initializer="ones")
    model = keras.Sequential([keras.Input((4,)), layer, kmp.layers.Softmax()])
    model.compile("sgd", "sparse_categorical_crossentropy", **MODES[mode])
    before = model.get_weights()
    fit(model, np.nan)
    assert model.optimizer.snapshot().overflow_count == 1
    assert_equal(model.get_weights(), before)
