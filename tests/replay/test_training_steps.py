"""Replays of training steps of the user's own."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import values
from keras import ops
from passes import passes_of
from test_batch_replay import named

import kmp
from kmp.callbacks.batch_replayer import CRITERIA
from kmp.diagnosis.soundness import error_origin, is_harmful, lost_states
from kmp.replay import StepContext, replay_batch

pytestmark = pytest.mark.usefixtures("enabled")
X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = X[:, :1] + 0.1


class Own(keras.Sequential):
    """Trains with a loss of its own."""

    def loss_of(self, y, outputs):
        return ops.mean(ops.square(ops.cast(outputs, "float32") - y))

    def scaled(self, loss):
        return self.optimizer.scale_loss(loss)

    def update(self, gradients):
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self(x, training=True))
            scaled = self.scaled(loss)
        self.update(tape.gradient(scaled, self.trainable_variables))
        return {"loss": loss}


class Clipped(Own):
    def update(self, gradients):
        gradients = self.optimizer.unscale(gradients)
        self.optimizer.apply(tf.clip_by_global_norm(gradients, 1e-3)[0], self.trainable_variables)


class Penalized(Own):
    """Differentiates twice."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                total = tf.reduce_sum(tf.cast(self(x, training=True), "float32"))
            norm = tf.reduce_mean(tf.square(inner.gradient(total, x)))
            scaled = self.scaled(self.loss_of(y, self(x, training=True)) + norm)
        self.update(tape.gradient(scaled, self.trainable_variables))
        return {"norm": norm}


class AddedAfterScaling(Own):
    def scaled(self, loss):
        return super().scaled(loss) + 0.5 * loss


class ClippedBeforeUnscaling(Own):
    def update(self, gradients):
        self.optimizer.apply(tf.clip_by_global_norm(gradients, 1.0)[0], self.trainable_variables)


class ClippedThenUnscaled(Own):
    def update(self, gradients):
        gradients = self.optimizer.unscale(tf.clip_by_global_norm(gradients, 1.0)[0])
        self.optimizer.apply(gradients, self.trainable_variables)


class Normalized(Own):
    def update(self, gradients):
        norm = tf.linalg.global_norm(gradients)
        self.optimizer.apply([each / norm for each in gradients], self.trainable_variables)


class DividedTwice(Own):
    def update(self, gradients):
        gradients = [each / self.optimizer.loss_scale for each in gradients]
        self.optimizer.apply(gradients, self.trainable_variables)


class DividedByHand(Own):
    def update(self, gradients):
        gradients = [each / self.optimizer.loss_scale for each in gradients]
        self.optimizer.apply(gradients, self.trainable_variables, unscaled=True)


class TargetsInFloat16(Own):
    def loss_of(self, y, outputs):
        error = ops.cast(y + 4800.0, outputs.dtype) - ops.cast(4800.0, outputs.dtype) - outputs
        return ops.mean(ops.square(ops.cast(error, "float32")))


class OverflowingLoss(Own):
    def loss_of(self, y, outputs):
        return ops.mean(ops.cast(ops.exp(outputs * 0 + 12.0), "float32")) * 1e-6


class InFunction(Own):
    """Computes its step in a function, which must not be traced in a replay."""

    @tf.function
    def train_step(self, data):
        return super().train_step(data)


class Denoiser(Own):
    """Draws noise and its level in each step, as a diffusion model does."""

    def train_step(self, data):
        x = data[0]
        noise = tf.random.normal(tf.shape(x)) + tf.cast(
            tf.random.uniform(tf.shape(x), dtype="float16"), "float32"
        )
        noise += tf.random.truncated_normal(tf.shape(x))
        level = tf.cast(tf.random.uniform((tf.shape(x)[0], 1), 0, 10, tf.int32), "float32") / 10
        return super().train_step((x + level * noise, noise[:, :1]))


class TwoOptimizers(Own):
    def train_step(self, data):
        x, y = data
        for optimizer, layer in zip((self.first, self.second), self.layers, strict=True):
            variables = layer.trainable_variables
            with tf.GradientTape() as tape:
                loss = self.loss_of(y, self(x, training=True))
                scaled = optimizer.scale_loss(
                    self.second_loss(loss) if optimizer is self.second else loss
                )
            optimizer.apply(tape.gradient(scaled, variables), variables)
        return {}

    def second_loss(self, loss):
        return loss


class UnscaledTogether(TwoOptimizers):
    """Unscales the gradients of both optimizers before it applies any."""

    def train_step(self, data):
        x, y = data
        updates = []
        for optimizer, layer in zip((self.first, self.second), self.layers, strict=True):
            variables = layer.trainable_variables
            with tf.GradientTape() as tape:
                scaled = optimizer.scale_loss(self.loss_of(y, self(x, training=True)))
            updates.append(
                (optimizer, optimizer.unscale(tape.gradient(scaled, variables)), variables)
            )
        for optimizer, gradients, variables in updates:
            optimizer.apply(gradients, variables)
        return {}


class SecondFails(TwoOptimizers):
    """Takes the root of a negative number in the step of the second optimizer."""

    def second_loss(self, loss):
        return tf.sqrt(-1.0 - loss)


class Follows(keras.Model):
    """Moves a layer that is not called towards another one, as reinforcement learning does."""

    def __init__(self, dtype, rate, distance):
        super().__init__()
        self.own, self.head = keras.layers.Dense(8, name="own"), keras.layers.Dense(1)
        self.slow = keras.layers.Dense(8, dtype=dtype, name="slow", trainable=False)
        self.slow.build((None, 4))
        self(X)
        self.slow.set_weights([distance + each for each in self.own.get_weights()])
        self.rate = rate
        self.compile("sgd")

    def call(self, x):
        return self.head(self.own(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(ops.cast(self(x, training=True), "float32") - y))
            scaled = self.optimizer.scale_loss(loss)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, variables), variables)
        for slow, own in zip(self.slow.variables, self.own.variables, strict=True):
            difference = own - tf.cast(slow, "float32")
            slow.assign(1.0 * slow + tf.cast(self.rate * difference, slow.dtype))
        return {}


class NotScaled(Own):
    def scaled(self, loss):
        return loss


def own_model(kind, *layers, **options):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, name="hidden"), *layers, keras.layers.Dense(1, name="head")]
    model = kind([keras.Input((4,)), *layers], name="own")
    model.compile("sgd", **options)
    if issubclass(kind, TwoOptimizers):
        model.first, model.second = kmp.wrap("sgd"), kmp.wrap("sgd")
    return model


def replayed(model, loss_scale=1024.0, data=(X, Y)):
    passes = passes_of(model, data, kind="user")
    return replay_batch(passes, StepContext(1, loss_scale), CRITERIA)[0]


@pytest.mark.parametrize("kind", [Clipped, Penalized, InFunction, TwoOptimizers, UnscaledTogether])
def test_sound_step_is_compared_with_its_gradients_and_changes_nothing(kind):
    model = own_model(kind)
    before = values(model.variables)
    result = replayed(model)
    assert (result.is_finite, result.is_forward_only, is_harmful(result)) == (True, False, False)
    assert result.loss == pytest.approx(result.float32_loss, rel=0.01)
    assert {named([error.layer])[0] for error in result.gradient_errors} == {"hidden", "head"}
    assert all(0.98 < error.kept < 1.02 for error in result.gradient_errors)
    assert (result.unscaled.layers, result.float32_layers) == ([], [])
    np.testing.assert_equal(values(model.variables), before)
    # A function of the step was not traced without its update.
    model.train_step((tf.constant(X), tf.constant(Y)))
    assert not np.array_equal(values(model.trainable_variables)[0], before[0])


@pytest.mark.parametrize(
    ("dtype", "rate", "distance", "is_lost"),
    [
        ("float16", 0.01, 1e-3, True),
        ("float16", 1.0, 1e-3, False),  # a copy of the weights
        ("float16", 0.01, 3.0, False),  # steps of 0.03, which float16 has
        ("mixed_float16", 0.01, 1e-3, False),
    ],
)
def test_network_in_float16_that_follows_another_one_loses_its_updates(
    dtype, rate, distance, is_lost
):
    keras.utils.set_random_seed(0)
    model = Follows(dtype, rate, distance)
    before = values(model.variables)
    result = replayed(model)
    # Its bias is small enough for float16 to have the steps.
    assert named([each.path for each in lost_states(result)]) == ["kernel"] * is_lost
    assert {each.dtype for each in lost_states(result)} <= {"float16"}
    assert named(result.float32_layers) == ["slow"] * is_lost
    np.testing.assert_equal(values(model.variables), before)


def test_forward_pass_of_a_second_network_is_not_backward():
    found = replayed(own_model(SecondFails)).operations[0]
    assert (found.operation, found.value, found.is_backward) == ("Sqrt", "nan", False)


def test_step_that_draws_random_numbers_is_compared_on_the_same_ones_and_draws_on_as_before():
    model = own_model(Denoiser)
    tf.random.set_seed(1)
    expected = [tf.random.normal((3,)).numpy() for _ in range(2)]
    tf.random.set_seed(1)
    drawn = [tf.random.normal((3,)).numpy()]
    result = replayed(model)
    drawn.append(tf.random.normal((3,)).numpy())
    np.testing.assert_array_equal(drawn, expected)
    assert result.comparison is not None
    assert result.output_error < 0.01
    assert result.loss == pytest.approx(result.float32_loss, rel=0.01)


def test_loss_that_does_not_go_through_scale_loss_is_not_known():
    with pytest.raises(RuntimeError, match="does not pass its loss to scale_loss"):
        replayed(own_model(NotScaled))


def test_loss_that_is_not_scaled_is_found():
    result = replayed(own_model(AddedAfterScaling))
    assert sorted(named(result.unscaled.layers)) == ["head", "hidden"]
    assert not result.unscaled.are_all


@pytest.mark.parametrize(
    "kind",
    [Normalized, DividedTwice],  # not known to be a mistake; and the graph of the step shows it
)
def test_change_of_scaled_gradients_that_is_no_clipping_has_no_name(kind):
    unscaled = replayed(own_model(kind)).unscaled
    assert (unscaled.are_all, unscaled.change) == (True, "")


def test_clipping_of_scaled_gradients_is_known_with_its_factor():
    exact = replayed(own_model(Own))
    norm = np.hypot.reduce([each.norm for each in exact.gradient_errors])
    for kind in (ClippedBeforeUnscaling, ClippedThenUnscaled):
        unscaled = replayed(own_model(kind)).unscaled
        assert (unscaled.are_all, unscaled.change) == (True, "clipped")
        assert unscaled.times == pytest.approx(1024.0 * norm, rel=0.01)  # clipped to 1


def test_gradients_that_a_step_divides_by_the_loss_scale_once_are_compared():
    result = replayed(own_model(DividedByHand))
    assert (result.unscaled.layers, is_harmful(result)) == ([], False)


def test_loss_that_rounds_the_targets_or_overflows_needs_the_last_layer_in_float32():
    result = replayed(own_model(TargetsInFloat16))
    assert (result.is_finite, is_harmful(result)) == (True, True)
    assert result.output_error < 0.01
    assert result.loss != pytest.approx(result.float32_loss, rel=0.1)
    overflowing = replayed(own_model(OverflowingLoss))
    assert (overflowing.loss, overflowing.operations[0].operation) == (None, "Exp")
    assert named(result.float32_layers) == named(overflowing.float32_layers) == ["head"]


def test_tensor_that_a_layer_keeps_is_that_of_the_pass():
    class Divergence(keras.layers.Layer):
        def call(self, x):
            self.divergence = ops.mean(ops.square(ops.cast(x, "float32")))
            return x

    class WithDivergence(Own):
        def loss_of(self, y, outputs):
            return super().loss_of(y, outputs) + self.layers[1].divergence

    result = replayed(own_model(WithDivergence, Divergence()))
    assert not is_harmful(result)
    assert result.unscaled.layers == []


def test_replay_leaves_nothing_in_what_a_step_keeps():
    class Remembers(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.history, self.last, self.dtypes = [], {}, set()

        def call(self, x):
            self.history.append(ops.mean(x))
            self.last["x"] = x
            self.dtypes.add(x.dtype.name)
            return x

    model = own_model(Own, Remembers())
    layer = model.layers[1]
    layer(X[:1])  # in float16; of what it keeps, the trace replaces one
    before = list(map(id, layer.history)), id(layer.last["x"]), set(layer.dtypes)
    assert not is_harmful(replayed(model))
    assert (list(map(id, layer.history)), id(layer.last["x"]), set(layer.dtypes)) == before


def test_weights_that_float16_loses_are_found_where_they_do_harm():
    class Whitening(keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(
                shape=(4,), initializer="ones", trainable=False, name="scale"
            )

        def call(self, x):
            return x * self.scale

    layers = Whitening(name="whitening"), keras.layers.BatchNormalization(epsilon=1e-14)
    model = Own([keras.Input((4,)), *layers, keras.layers.Dense(1, name="head")])
    model.compile("sgd")
    model.layers[0].scale.assign([1e-9, 1e-9, 1.0, 1.0])
    result = replayed(model, data=(X * [1e4, 1e4, 1.0, 1.0], X[:, :1]))
    (weight,) = result.batch.lost_weights
    assert (named([weight.path]), weight.zero, weight.infinite) == (["scale"], 0.5, 0.0)
    assert named([error_origin(result).layer]) == ["whitening"]


def test_batch_that_is_no_tuple_is_replayed():
    class Reconstruction(Own):
        def train_step(self, data):
            return super().train_step((data, data[:, :1]))

    assert replayed(own_model(Reconstruction), data=X).gradient_errors


def test_step_without_an_update_is_compared_forward_only():
    class Accumulating(Own):
        def update(self, gradients):
            del gradients

    result = replayed(own_model(Accumulating))
    assert ((result.comparison is not None), result.is_forward_only, result.gradient_errors) == (
        True,
        True,
        [],
    )
