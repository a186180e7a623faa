"""One pass over a batch, in float32 or in the precision of the model."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import sequential

from kmp.guarding.model_optimizers import all_optimizers_of
from kmp.replay import Passes, TrainStep

pytestmark = pytest.mark.usefixtures("enabled")
X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")


def passes_of(model):
    variables = {variable.path: variable for variable in model.trainable_variables}
    run = functools.partial(type(model).train_step, model)
    data = tf.constant(X), tf.constant(X[:, :1])
    return Passes(model, data, TrainStep(run, all_optimizers_of(model)), variables)


def test_quantized_layer_computes_in_float32_with_its_quantized_weights():
    model = sequential(keras.layers.Dense(6), keras.layers.Dense(1, dtype="float32"))
    model.layers[0].quantize("int4")
    model.layers[0].enable_lora(2)
    passes = passes_of(model)
    exact, own = passes.in_float32(), passes.in_own_precision()
    assert exact.marks.computing_in_16_bits == set()
    assert own.marks.computing_in_16_bits == {model.name, model.layers[0].path}
    assert own.loss == pytest.approx(exact.loss, rel=0.01)
    assert own.loss != exact.loss


def test_pass_leaves_the_methods_and_policies_of_the_model():
    model = sequential(keras.layers.Dense(6), keras.layers.Dense(1))
    owners = [model.optimizer, model.optimizer.inner_optimizer, model, *model.layers]
    before = [dict(vars(owner)) for owner in owners]
    passes_of(model).in_float32(measure=True, watch=True)
    assert [vars(owner).keys() for owner in owners] == [each.keys() for each in before]
    assert [layer.compute_dtype for layer in model.layers] == ["float16", "float16"]
    assert not tf.config.functions_run_eagerly()


def test_operation_of_a_graph_is_marked_and_may_compute_in_float32():
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(4, kernel_initializer="identity")(inputs)
    model = keras.Model(inputs, hidden * 1e6)
    scale = model.operations[-1]
    inference = TrainStep(functools.partial(model, training=False), optimizers=())
    passes = Passes(model, X, inference, variables={}, operations={"scale": scale})
    exact, own = passes.in_float32(), passes.in_own_precision()
    assert (list(own.marks.nonfinite), list(exact.marks.nonfinite)) == (["scale"], [])
    changed = passes.in_own_precision([scale], reference=exact)
    assert list(changed.marks.nonfinite) == []
    assert 0 < changed.marks.errors["scale"] < 0.01
    assert "call" not in vars(scale)


def test_gradient_of_a_kernel_that_the_layer_assigns_is_that_of_the_assigned_one():
    normalized = keras.layers.SpectralNormalization(keras.layers.Dense(6, use_bias=False))
    model = sequential(normalized, keras.layers.Dense(1, use_bias=False))
    weights = model.get_weights()
    gradient, last_gradient = passes_of(model).in_float32().gradients.values()
    assert all(map(np.array_equal, model.get_weights(), weights))

    kernel, last_kernel = normalized.normalized_weights()[1], model.layers[1].kernel.value
    assert not np.allclose(kernel, normalized.layer.kernel, rtol=0.01)
    with tf.GradientTape() as tape:
        tape.watch([kernel, last_kernel])
        loss = tf.reduce_mean((X @ kernel @ last_kernel - X[:, :1]) ** 2)
    expected, last_expected = tape.gradient(loss, [kernel, last_kernel])
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(last_gradient, last_expected, rtol=1e-4, atol=1e-7)
