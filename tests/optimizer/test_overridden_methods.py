"""Every method of the user's optimizer that a run in float32 calls is called under `enable`."""

import contextlib
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import take_step

import kmp

BASE = keras.optimizers.SGD
METHODS = [
    name
    for name in dir(BASE)
    if not name.startswith("__") and inspect.isfunction(inspect.getattr_static(BASE, name))
]
DATA = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")


def recording(name, method, called):
    def call(*args, **kwargs):
        called.add(name)
        return method(*args, **kwargs)

    return call


def overridden(called):
    methods = {name: recording(name, getattr(BASE, name), called) for name in METHODS}
    return type("Own", (BASE,), methods)(0.1, momentum=0.9, global_clipnorm=1.0)


def replaced(called):
    optimizer = BASE(0.1, momentum=0.9, global_clipnorm=1.0)
    for name in METHODS:
        vars(optimizer)[name] = recording(name, getattr(optimizer, name), called)
    return optimizer


def called_by_fit(make, policy):
    called = set()
    with kmp.enable(policy) if policy else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(make(called), "mse")
        model.fit(*DATA, verbose=0)
    return called


@pytest.mark.parametrize("make", [overridden, replaced])
def test_methods_of_a_plain_run_are_called(make):
    plain = called_by_fit(make, None)
    assert {"apply", "apply_gradients", "scale_loss", "update_step"} <= plain
    for policy in ("float32", "mixed_float16"):  # without and with a loss scale
        assert plain - called_by_fit(make, policy) == set()


class Clipped(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars):
        clipped = [(tf.clip_by_norm(gradient, 0.01), each) for gradient, each in grads_and_vars]
        return super().apply_gradients(clipped)


def test_apply_gradients_gets_unscaled_gradients():
    weight = keras.Variable([1.0, 1.0])
    optimizer = kmp.wrap(Clipped(1.0), initial_scale=1024.0)
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(100 * tf.reduce_sum(weight.value))
    gradient = tape.gradient(loss, weight.value)
    assert optimizer.apply_gradients([(gradient, weight)]) is optimizer.iterations
    np.testing.assert_allclose(weight, [1 - 0.01 / 2**0.5] * 2, rtol=1e-6)


def test_a_loop_that_calls_apply_does_not_call_apply_gradients():
    """As with a plain optimizer."""
    weight = keras.Variable([1.0, 1.0])
    optimizer = kmp.wrap(Clipped(1.0))
    take_step(optimizer, [weight], lambda: 100 * tf.reduce_sum(weight.value))
    np.testing.assert_allclose(weight, [-99.0, -99.0])


def test_scale_loss_of_the_user_comes_before_the_loss_scale():
    class Halved(keras.optimizers.SGD):
        def scale_loss(self, loss):
            return super().scale_loss(loss) / 2

    weight = keras.Variable([1.0])
    optimizer = kmp.wrap(Halved(1.0))
    take_step(optimizer, [weight], lambda: 3 * tf.reduce_sum(weight.value))
    np.testing.assert_allclose(weight, [-0.5])


def test_an_overridden_apply_gradients_is_not_called_in_a_skipped_step():
    weight = keras.Variable([1.0])
    optimizer = kmp.wrap(Clipped(1.0))
    optimizer.scale_loss(1.0)
    optimizer.apply_gradients([(tf.constant([np.inf]), weight)])
    assert float(weight[0]) == 1.0
    assert optimizer.snapshot().overflow_count == 1
