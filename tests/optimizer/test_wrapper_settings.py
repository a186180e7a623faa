"""Settings of the inner optimizer are read and set on the wrapper, `model.optimizer`."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import assert_equal, compiled_model, fit, optimizer_for

import kmp

SETTINGS = {
    "weight_decay": 0.1,
    "clipnorm": 0.5,
    "clipvalue": 0.5,
    "global_clipnorm": 0.5,
    "use_ema": True,
}
SETTINGS |= {"ema_momentum": 0.5, "ema_overwrite_frequency": 3, "gradient_accumulation_steps": 2}
SETTINGS |= {"beta_1": 0.5, "epsilon": 1e-3}


@pytest.mark.parametrize("build", [True, False])
def test_setting_is_read_from_and_set_on_the_inner_optimizer(build):
    inner = keras.optimizers.Adam()
    optimizer = optimizer_for(keras.Variable([1.0]), inner=inner, build=build)
    for name, value in SETTINGS.items():
        assert getattr(optimizer, name) == getattr(inner, name) != value
        setattr(optimizer, name, value)
        assert getattr(optimizer, name) == getattr(inner, name) == value
        assert name not in vars(optimizer)


@pytest.mark.parametrize(
    "option", [{"clipvalue": 0.25}, {"gradient_accumulation_steps": 2}, {"use_ema": True}]
)
def test_setting_that_is_set_before_the_first_step_trains_as_the_argument_does(option):
    weights = []
    for sets in (True, False):
        optimizer = kmp.LossScaleOptimizer(
            keras.optimizers.SGD(1.0, **{} if sets else option), loss_scale=8.0
        )
        for name, value in option.items() if sets else ():
            setattr(optimizer, name, value)
        variable = keras.Variable([1.0, 2.0])
        for _ in range(4):
            optimizer.scale_loss(1.0)
            optimizer.apply([tf.constant([8.0, 2.0])], [variable])
        weights.append(np.asarray(variable))
    np.testing.assert_array_equal(*weights)


class Ruled(keras.optimizers.SGD):
    """An optimizer whose attributes have the names of the wrapper's."""

    def __init__(self):
        super().__init__(1.0)
        self.rule = self.counters = self.sampler = self.inner_optimizer = "its own"
        self.step_counter = self.dynamic_scale = self.initial_scale = "its own"


def test_inner_optimizer_keeps_attributes_with_the_names_of_the_wrapper():
    inner, variable = Ruled(), keras.Variable([1.0])
    optimizer = kmp.LossScaleOptimizer(inner, loss_scale=8.0)
    optimizer.scale_loss(1.0)
    optimizer.apply([tf.constant([8.0])], [variable])
    assert float(variable[0]) == 0.0
    names = (
        "rule",
        "counters",
        "sampler",
        "inner_optimizer",
        "step_counter",
        "dynamic_scale",
        "initial_scale",
    )
    assert {getattr(inner, name) for name in names} == {"its own"}
    assert optimizer.inner_optimizer is inner


@pytest.mark.parametrize(
    "name",
    [
        "initial_scale",
        "growth_interval",
        "dynamic_growth_steps",
        "hysteresis",
        "rule",
        "jit_compile",
    ],
)
def test_setting_of_the_loss_scale_cannot_be_changed_without_effect(name):
    optimizer = kmp.LossScaleOptimizer("adam")
    with pytest.raises(
        AttributeError, match=f"`{name}` cannot be changed: create a new kmp.LossScaleOptimizer"
    ):
        setattr(optimizer, name, 1)


def test_excluded_variables_do_not_decay(enabled):
    model = compiled_model(keras.optimizers.SGD(1e-6, weight_decay=1e5), run_eagerly=True)
    model.optimizer.exclude_from_weight_decay(var_names=["bias"])
    before = model.get_weights()
    fit(model, batches=1)
    moved = [np.abs(new - old).max() for old, new in zip(before, model.get_weights(), strict=True)]
    assert [value > 1e-2 for value in moved] == [True, False, True, False]


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="Keras 3.12 has none")
def test_learning_rate_callbacks_work_with_a_multi_optimizer(enabled):
    optimizers = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
    optimizers[".*bias"] = keras.optimizers.Adam(0.01)
    model = compiled_model(keras.optimizers.MultiOptimizer(optimizers), run_eagerly=True)
    fit(model, batches=2)
    before = model.get_weights()
    fit(
        model, batches=2, callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.0)]
    )
    assert_equal(before, model.get_weights())


def test_scale_factor_of_the_inner_optimizer_is_the_fixed_loss_scale():
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.SGD(1.0, loss_scale_factor=64.0))
    assert optimizer.rule == kmp.scaling.FixedScale(64.0)
    variable = keras.Variable([1.0])
    optimizer.scale_loss(1.0)
    optimizer.apply([tf.constant([64.0])], [variable])
    np.testing.assert_array_equal(variable, [0.0])
    with pytest.raises(AttributeError, match="`loss_scale_factor` cannot be changed"):
        optimizer.loss_scale_factor = 8.0
    for arguments in ({"loss_scale": 8.0}, {"growth_interval": 5}):
        with pytest.raises(ValueError, match="has one loss scale|no other settings"):
            kmp.wrap(keras.optimizers.SGD(1.0, loss_scale_factor=64.0), **arguments)


# Keras' losses have that dtype then.
@pytest.mark.filterwarnings("ignore:The loss was computed in float16")
@pytest.mark.parametrize("floatx", ["float64", "float16", "bfloat16"])
def test_other_floatx_trains(floatx):
    before = keras.config.floatx()
    keras.config.set_floatx(floatx)
    try:
        with kmp.enable(loss_scale=64.0):
            model = compiled_model("adam", run_eagerly=True)
            fit(model, batches=2)
        assert model.optimizer.snapshot().overflow_count == 0
    finally:
        keras.config.set_floatx(before)
