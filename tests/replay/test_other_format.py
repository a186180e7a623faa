import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import assert_equal, sequential, values
from keras import layers
from models import Cube
from passes import passes_of

import kmp
from kmp.callbacks.batch_replayer import CRITERIA
from kmp.replay import StepContext, replay_batch

ROWS = 8


def replayed(model, x=None, y=None, *, compares_formats=True):
    x = np.linspace(0, 1, 4 * ROWS, dtype="float32").reshape(ROWS, 4) if x is None else x
    y = np.zeros((len(x), 1), "float32") if y is None else y
    context = StepContext(1, model.optimizer.initial_scale, compares_formats=compares_formats)
    return replay_batch(passes_of(model, (x, y)), context, CRITERIA)[0]


def model_in(policy, *hidden, **options):
    """Returns a model that computes in a policy, but for its last layer."""
    with kmp.enable(policy, initial_scale=8.0):
        head = layers.Dense(1, kernel_initializer="ones", dtype="float32", name="head")
        return sequential(*(make() for make in hidden), head, **options)


def outputs_and_gradients(policy, weights, x, y):
    """Returns those of two dense layers in Keras alone, with the gradients by layer."""
    keras.config.set_dtype_policy(policy)
    model = sequential(layers.Dense(16, "tanh"), layers.Dense(1, dtype="float32"))
    keras.config.set_dtype_policy("float32")
    model.set_weights(weights)
    with tf.GradientTape() as tape:
        outputs = model(x, training=True)
        loss = tf.reduce_mean(tf.square(outputs - y))
    gradients = tape.gradient(loss, [each.value for each in model.trainable_variables])
    flat = [np.ravel(each) for each in gradients]
    return np.asarray(outputs), [np.concatenate(flat[:2]), np.concatenate(flat[2:])]


@pytest.mark.parametrize(
    ("own", "other"), [("float16", "bfloat16"), ("bfloat16", "float16")], ids=["own16", "own_b16"]
)
def test_errors_are_those_of_the_same_model_in_each_format(own, other):
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(32, 4)).astype("float32")
    y = numbers.normal(size=(32, 1)).astype("float32")
    with kmp.enable(f"mixed_{own}"):
        model = sequential(layers.Dense(16, "tanh"), layers.Dense(1, dtype="float32"))
    found = replayed(model, x, y)
    assert found.other_format.format == other
    weights = [np.asarray(weight) for weight in model.trainable_variables]
    exact = outputs_and_gradients("float32", weights, x, y)
    for name, compared in ((own, found.comparison), (other, found.other_format.comparison)):
        outputs, gradients = outputs_and_gradients(f"mixed_{name}", weights, x, y)
        varying = np.linalg.norm(exact[0] - exact[0].mean(axis=0))
        error = np.linalg.norm(outputs - exact[0]) / varying
        assert compared.output_error == pytest.approx(error, rel=1e-3)
        of_layers = {each.layer: each.error for each in compared.gradients}
        # float16 has a loss scale in the replay, with which it flushes nothing.
        for layer, of_format, of_float32 in zip(model.layers, gradients, exact[1], strict=True):
            error = np.linalg.norm(of_format - of_float32) / np.linalg.norm(of_float32)
            assert of_layers[layer.path] == pytest.approx(error, rel=0.1)


def test_layer_and_operation_that_leave_the_range_of_float16_are_found():
    model = model_in("mixed_bfloat16", functools.partial(Cube, name="cube"))
    found = replayed(model, np.full((ROWS, 4), 50.0, "float32"))
    assert (found.is_finite, found.other_format.is_finite) == (True, False)
    assert found.other_format.comparison is None
    overflow = found.other_format.overflow
    first = overflow.operations[0]
    assert (first.layer.rpartition("/")[2], first.operation) == ("cube", "Mul")
    assert (first.value, first.dtype, first.is_backward) == ("inf", "float16", False)
    assert overflow.outputs[0] == first.layer


def test_float16_model_that_overflows_is_tried_in_bfloat16():
    model = model_in("mixed_float16", functools.partial(Cube, name="cube"))
    found = replayed(model, np.linspace(1, 50, 4 * ROWS, dtype="float32").reshape(ROWS, 4))
    assert not found.is_finite
    assert found.other_format.is_finite
    assert 0 < found.other_format.comparison.output_error < 0.02


def test_bfloat16_loses_positions_that_float16_has():
    shifted = functools.partial(layers.Lambda, lambda x: x - 1000.0)
    positions = 1000.0 + np.arange(4.0 * ROWS, dtype="float32").reshape(ROWS, 4)
    of_float16 = replayed(model_in("mixed_float16", shifted), positions)
    assert of_float16.output_error == 0  # it has all integers up to 2048
    assert of_float16.other_format.comparison.output_error > 0.05
    of_bfloat16 = replayed(model_in("mixed_bfloat16", shifted), positions)
    assert of_bfloat16.output_error == of_float16.other_format.comparison.output_error
    assert of_bfloat16.other_format.comparison.output_error == 0


@pytest.mark.parametrize(("target", "log2_scale"), [(0.0, 15), (1e5, -4)])
def test_float16_has_the_largest_loss_scale_that_its_gradients_allow(target, log2_scale):
    model = model_in("mixed_bfloat16", functools.partial(layers.Dense, 1, name="hidden"))
    x, y = np.full((ROWS, 4), 1e-2, "float32"), np.full((ROWS, 1), target, "float32")
    # The largest gradient, of the bias, is twice the target: 2^2 times below the maximum.
    found = replayed(model, x, y)
    assert found.loss_scale == 1.0
    assert found.other_format.is_finite
    assert np.log2(found.other_format.loss_scale) == log2_scale
    assert max(each.error for each in found.other_format.comparison.gradients) < 0.01


class WithoutScaling(keras.Sequential):
    """A model whose training step is written without `scale_loss`, which bfloat16 allows."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {}


def test_step_that_scales_no_loss_has_no_gradients_in_float16():
    with kmp.enable("mixed_bfloat16"):
        model = WithoutScaling([keras.Input((4,)), layers.Dense(8), layers.Dense(1)])
        model.compile("sgd", "mse")
    found = replayed(model)
    assert found.comparison.gradients
    other = found.other_format
    assert (other.loss_scale, other.comparison.gradients) == (1.0, [])
    assert 0 < other.comparison.output_error < found.comparison.output_error


def test_bfloat16_has_no_loss_scale():
    found = replayed(model_in("mixed_float16", functools.partial(layers.Dense, 2)))
    assert (found.loss_scale, found.other_format.loss_scale) == (8.0, 1.0)


def test_batch_is_not_passed_in_another_format_if_there_is_none():
    in_float32 = model_in("float32", functools.partial(layers.Dense, 2))
    in_both = model_in(
        "mixed_float16",
        functools.partial(layers.Dense, 2),
        functools.partial(layers.Dense, 2, dtype="mixed_bfloat16"),
    )
    for model in (in_float32, in_both):
        assert replayed(model).other_format is None
    not_asked = replayed(
        model_in("mixed_float16", functools.partial(layers.Dense, 2)), compares_formats=False
    )
    assert not_asked.other_format is None


def test_pass_in_another_format_changes_nothing_of_the_model():
    hidden = functools.partial(layers.Dense, 4), layers.BatchNormalization
    model = model_in("mixed_bfloat16", *hidden)
    before = values(model.variables)
    assert replayed(model).other_format.is_finite
    assert_equal(model.variables, before)
    assert model.layers[0].dtype_policy.name == "mixed_bfloat16"
