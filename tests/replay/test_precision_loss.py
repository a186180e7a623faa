from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import sequential
from keras import layers, ops
from test_batch_replay import Penalty, named, replayed

import kmp
from kmp.diagnosis.soundness import (
    are_harmful,
    error_origin,
    is_harmful,
    is_harmful_gradient,
    lost_states,
)
from kmp.records.replay import GradientError
from kmp.replay.output_errors import relative_error

pytestmark = pytest.mark.usefixtures("enabled")
ROWS = 32
NORMAL = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")


def root_mean_square(x):
    """Divides by the root of a mean of squares, which overflows to Inf: the output is 0."""
    return x / ops.sqrt(ops.mean(ops.square(x), axis=-1, keepdims=True) + 1e-3)


def phase(x):
    """Returns the time of the day, whose hours float16 rounds away in large numbers."""
    return ops.sin(x * (2 * np.pi / 24))


@pytest.mark.parametrize(
    ("function", "low", "high", "is_of_inputs"),
    [(root_mean_square, 300, 5000, False), (phase, 48_000, 49_000, True)],
)
def test_error_of_a_finite_pass_is_measured_where_it_is_born_and_its_layer_is_found(
    function, low, high, is_of_inputs
):
    x = np.random.default_rng(0).uniform(low, high, (ROWS, 4)).astype("float32")
    lossy = layers.Lambda(function, name="lossy")
    result = replayed(
        sequential(lossy, layers.Dense(4, name="hidden"), layers.Dense(1, name="head")), x
    )
    assert result.is_finite
    assert is_harmful(result)
    assert named(result.float32_layers) == ["lossy"]
    errors = {named([each.layer])[0]: each for each in result.layer_errors}
    assert errors["lossy"].new_error > 0.1
    assert (errors["lossy"].input_error > 0.5 * errors["lossy"].new_error) == is_of_inputs
    assert max(each.new_error or 0.0 for name, each in errors.items() if name != "lossy") < 0.01


def test_index_of_a_rounded_number_is_the_origin_and_the_layers_before_it_are_found():
    """float16 keeps every 16th number above 2^14, which the first layer alone hardly shows."""
    inputs = keras.Input((2,))
    number = layers.Lambda(lambda x: x[:, 1], name="number")(inputs)
    index = layers.Lambda(lambda x: ops.cast(x - 30000, "int32"), name="index")(number)
    row = layers.Embedding(400, 4, embeddings_initializer="normal", name="rows")(index)
    other = layers.Lambda(lambda x: x[:, :1], name="other")(inputs)
    joined = layers.Concatenate(name="joined")([row, other])
    model = keras.Model(inputs, layers.Dense(1, name="head")(joined))
    model.compile("sgd", "mse")
    numbers = 30000 + np.random.default_rng(0).integers(0, 400, ROWS)
    x = np.stack([np.ones(ROWS), numbers], axis=1).astype("float32")
    result = replayed(model, x)
    assert error_origin(result).layer == "index"
    assert sorted(result.float32_layers) == ["index", "number"]


def difference(x):
    return x * 1000 - x * 999.5


def vanishing(x):
    return ops.cast(1000 + 0.1 * ops.cast(x, "float32"), x.dtype) - 1000


def sine(x):
    return ops.sin(x * 3000)


def doubt(x):
    return ops.log(1.001 - ops.sigmoid(9 + 2 * x))


def small_terms(x):
    return (ops.ones_like(x) * 512 + x / 16 - 512) * 16


def steep(x):
    return ops.clip(ops.tan(x * 1000), -3, 3)


def certainty(x):
    return ops.log(1.0005 - ops.erf(2.5 + x / 2))


def growth(x):
    return ops.power(ops.cast(1 + ops.cast(x, "float32") / 2000, x.dtype), 2000)


def distance(x):
    return tf.math.squared_difference(1000 + x, 1000.1 + 0 * x)


def small_growth(x):
    return 3000 * (ops.exp(x / 3000) - 0.999)


def rounded_up(x):
    return ops.cast(ops.cast(x * 3000 + 7000, "int32") % 7, x.dtype)


def total(x):
    steps = ops.repeat(1 + 0.2 * x[..., None], 4096, -1)
    return ops.cumsum(steps, -1)[..., -1] / 4096


SECOND_OF_A_KIND = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("function", "operation", "kind"),
    [
        (difference, "Sub", "cancellation"),
        pytest.param(vanishing, "Sub", "cancellation", marks=SECOND_OF_A_KIND),
        (sine, "Sin", "phase"),
        pytest.param(steep, "Tan", "phase", marks=SECOND_OF_A_KIND),
        (growth, "Pow", "amplification"),
        pytest.param(distance, "SquaredDifference", "amplification", marks=SECOND_OF_A_KIND),
        (doubt, "Sigmoid", "saturation"),
        pytest.param(certainty, "Erf", "saturation", marks=SECOND_OF_A_KIND),
        (small_terms, "AddV2", "lost_terms"),
        pytest.param(small_growth, "Exp", "lost_terms", marks=SECOND_OF_A_KIND),
        pytest.param(total, "Cumsum", "lost_terms", marks=SECOND_OF_A_KIND),
        (rounded_up, "Cast", "index"),
    ],
)
def test_operation_that_loses_most_of_a_lossy_layer_is_classified(function, operation, kind):
    first = layers.Dense(4, kernel_initializer="identity", name="first")
    lossy = layers.Lambda(function, name="lossy")
    x = NORMAL.astype("float16").astype("float32")
    result = replayed(sequential(first, lossy, layers.Dense(1, name="head")), x)
    assert named(result.float32_layers) == ["lossy"]
    (found,) = [each for each in result.overflow.lossy if named([each.layer]) == ["lossy"]]
    assert (found.operation, found.kind, found.dtype) == (operation, kind, "float16")


def test_operation_with_scalars_in_bfloat16_is_classified():
    kmp.enable("mixed_bfloat16")
    first = layers.Dense(4, kernel_initializer="identity", name="first")
    parts = first, layers.Lambda(difference, name="lossy"), layers.Dense(1, name="head")
    result = replayed(sequential(*parts, optimizer=kmp.wrap("sgd", loss_scale=1.0)), NORMAL)
    (found,) = [each for each in result.overflow.lossy if named([each.layer]) == ["lossy"]]
    assert (found.operation, found.kind, found.dtype) == ("Sub", "cancellation", "bfloat16")


def test_dropout_and_losses_that_layers_add_are_no_errors():
    parts = layers.Dense(8, "relu"), layers.Dropout(0.5), Penalty(ops.mean), layers.Dense(1)
    result = replayed(sequential(*parts), NORMAL)
    assert result.comparison is not None
    assert not is_harmful(result)
    assert result.output_error < 0.004
    assert result.loss == pytest.approx(result.float32_loss, rel=0.01)
    assert all(0.98 < error.kept < 1.02 for error in result.gradient_errors)


def test_gradient_error_is_harmful_above_the_sampling_noise_or_if_it_is_systematic():
    assert not is_harmful_gradient(GradientError("a", error=0.5, kept=1.0, norm=1.0, noise=2.0))
    assert is_harmful_gradient(GradientError("a", error=0.5, kept=1.0, norm=1.0, noise=0.1))
    assert is_harmful_gradient(GradientError("a", error=1.0, kept=0.0, norm=1.0, noise=0.9))
    # The noise is an estimate, and rounding that is as large only adds as much again.
    assert not is_harmful_gradient(GradientError("a", error=1.1, kept=0.9, norm=1.0, noise=0.8))
    assert not is_harmful_gradient(GradientError("a", error=0.45, kept=0.71, norm=1.0, noise=0.75))
    assert not is_harmful_gradient(GradientError("a", error=0.1, kept=1.0, norm=1.0, noise=0.01))
    lost = GradientError("a", error=1.0, kept=0.0, norm=1e-2, noise=0.1, largest_norm=1.0)
    assert is_harmful_gradient(lost)
    assert not are_harmful(0.0, [replace(lost, norm=1e-4)])  # converged
    small, noticed = (
        GradientError("a", error=error, kept=1.0, norm=1.0, noise=2.0) for error in (0.05, 0.2)
    )
    assert not are_harmful(0.3, [small])  # such as an error of a mean that the loss does not notice
    assert are_harmful(0.3, [small, noticed])
    assert not are_harmful(0.01, [noticed])
    assert are_harmful(0.3, [])
    assert not are_harmful(0.1, [])


def test_gradients_that_fell_with_those_of_all_layers_have_converged():
    def error(layer, norm, largest_norm):
        return GradientError(layer, 0.3, 0.7, norm, noise=0.1, largest_norm=largest_norm)

    late = error("attention", 1e-6, 5e-4)
    assert are_harmful(0.0, [late, replace(error("head", 1e-2, 1.0), error=0.0)])
    assert not are_harmful(0.0, [late, error("head", 1e-4, 1.0)])
    # As those of a loss that float16 flushes, and that is never trained.
    assert are_harmful(0.0, [replace(late, largest_norm=1e-6), error("head", 1e-4, 1.0)])


class Gate(layers.Layer):
    """Clips the gradient, which is multiplied by the loss scale."""

    def call(self, x):
        clip = tf.custom_gradient(
            lambda x: (tf.identity(x), lambda gradient: tf.clip_by_value(gradient, -1e-3, 1e-3))
        )
        return clip(x)


def test_gradient_function_that_clips_scaled_gradients_is_found():
    x = NORMAL
    model = sequential(
        layers.Dense(4, name="first"),
        Gate(name="gate"),
        layers.Dense(1, name="last", dtype="float32"),
    )
    result = replayed(model, x, x[:, :1] + 3.0)
    assert named(result.unscaled.layers) == ["first"]


class Noise(layers.Layer):
    def call(self, x):
        return x + ops.cast(tf.random.normal(tf.shape(x)), x.dtype)


def test_layers_that_draw_random_numbers_are_measured_on_those_of_their_call():
    parts = [Noise(name="first"), layers.Dense(4), Noise(name="second"), layers.Dense(1)]
    result = replayed(sequential(*parts), NORMAL)
    assert result.comparison is not None
    assert not is_harmful(result)
    assert max(each.new_error or 0.0 for each in result.layer_errors) < 0.01
    assert result.unscaled is None


class Safe(layers.Layer):
    """Computes in the dtype of its variables, float32 under a mixed policy."""

    def call(self, x):
        return ops.log(ops.mean(ops.square(ops.cast(x, self.dtype)), -1, keepdims=True))


def test_layer_that_casts_to_the_dtype_of_its_variables_is_not_harmed():
    result = replayed(sequential(Safe(name="safe"), layers.Dense(1)), 1000 + 100 * NORMAL)
    assert (result.is_finite_in_float32, is_harmful(result), result.float32_layers) == (
        True,
        False,
        [],
    )


def test_layer_with_the_name_of_its_model_is_found():
    inputs = keras.Input((4,))
    model = keras.Model(
        inputs, layers.Dense(1)(layers.Lambda(root_mean_square, name="lossy")(inputs)), name="lossy"
    )
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).uniform(300, 5000, (ROWS, 4)).astype("float32")
    assert replayed(model, x).float32_layers == ["lossy"]


def test_random_numbers_of_a_layer_of_the_users_own_are_the_same_in_both_passes():
    class OwnDropout(keras.layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.seed = keras.random.SeedGenerator(0)

        def call(self, x):
            return keras.random.dropout(x, 0.5, seed=self.seed)

    result = replayed(sequential(OwnDropout(), layers.Dense(1)), NORMAL)
    assert result.output_error < 0.01
    assert not is_harmful(result)


def test_gradient_that_is_zero_but_for_rounding_is_not_compared():
    parts = [
        layers.BatchNormalization(scale=False),
        layers.Dense(8, use_bias=False),
        layers.BatchNormalization(),
    ]
    result = replayed(sequential(*parts, layers.ReLU(), layers.Dense(1)), NORMAL, NORMAL[:, :1])
    assert result.comparison is not None
    assert not is_harmful(result)


def test_output_error_of_a_large_mean_is_not_harmful():
    head = layers.Dense(1, bias_initializer=keras.initializers.Constant(500.0))
    x = 0.2 * NORMAL
    result = replayed(
        sequential(layers.Dense(8, "relu"), head), x, 500 + 50 * x[:, :1], loss_scale=1.0
    )
    assert result.output_error > 0.05
    assert not is_harmful(result)
    assert result.float32_layers == []


def test_relative_error_is_relative_to_the_variation_between_examples():
    exact = 2000.0 + np.array([[-1.0], [1.0]])
    assert relative_error(exact + 1.0, exact) == pytest.approx(1.0)
    assert relative_error(np.full((2, 3), 1.5), np.ones((2, 3))) == pytest.approx(0.5)
    assert relative_error(np.full((2, 3), np.nan), np.ones((2, 3))) == 1e6
    assert relative_error(np.zeros((2, 0)), np.zeros((2, 0))) == 0.0


class RunningMean(keras.layers.Layer):
    """Subtracts a moving average in float16.

    Keras casts it to float16 before it is updated, or it is in float16 itself.
    """

    def __init__(self, start, momentum=0.995, in_16_bits=False):
        super().__init__(name="running")
        self.start, self.momentum, self.in_16_bits = start, momentum, in_16_bits

    def build(self, shape):
        start = keras.initializers.Constant(self.start)
        dtype = self.compute_dtype if self.in_16_bits else None
        self.mean = self.add_weight(
            shape=(shape[-1],), initializer=start, trainable=False, name="mean", dtype=dtype
        )

    def call(self, x):
        mean = ops.mean(x, axis=0)
        self.mean.assign(self.mean * self.momentum + mean * (1 - self.momentum))
        return x - mean


class PowerIteration(keras.layers.Layer):
    """Divides its inputs by the largest singular value of a matrix, as spectral normalization."""

    def __init__(self, steps, second=0.5):
        super().__init__(name="running")
        self.steps, self.second = steps, second

    def build(self, shape):
        singular = np.full(shape[-1], self.second, "float32")
        singular[0] = 1.0
        axes = np.linalg.qr(np.random.default_rng(0).normal(size=(shape[-1], shape[-1])))[0]
        self.matrix = self.add_weight(shape=(shape[-1], shape[-1]), trainable=False)
        self.matrix.assign((axes * singular) @ axes.T)
        vector = axes[:, :1] + self.second ** (2 * self.steps) * axes[:, 1:2]
        self.vector = self.add_weight(shape=vector.shape, trainable=False, name="mean")
        self.vector.assign(vector)

    def call(self, x):
        matrix = ops.convert_to_tensor(self.matrix)
        vector = ops.matmul(matrix, ops.matmul(matrix, self.vector))
        norm = ops.norm(vector)
        self.vector.assign(vector / norm)
        return x / norm


@pytest.mark.parametrize(
    ("layer", "is_lost"),
    [
        (lambda: RunningMean(-40.0), True),  # a step of 0.01, between numbers that are 0.03 apart
        (lambda: RunningMean(-40.0, in_16_bits=True), True),
        (lambda: RunningMean(-42.0), False),  # there already: what is left is noise
        (lambda: RunningMean(-40.0, momentum=0.0), False),  # the mean of the batch alone
        (lambda: layers.BatchNormalization(name="running"), False),
        (lambda: PowerIteration(1), False),
        (lambda: PowerIteration(20), False),  # converged: what is left of its update is rounding
        (lambda: PowerIteration(200, second=0.98), False),
    ],
)
def test_state_whose_updates_float16_loses_is_told_from_one_that_has_converged(layer, is_lost):
    x = np.random.default_rng(0).normal(-42.0, 1.0, (ROWS, 24)).astype("float32")
    model = sequential(layer(), layers.Dense(1, name="head"), shape=(24,))
    result = replayed(model, x, batch_size=1024)
    assert named(each.path for each in lost_states(result)) == ["mean"] * is_lost
    assert (named(result.float32_layers), is_harmful(result)) == (["running"] * is_lost, is_lost)
