import logging
from functools import partial

import keras
import numpy as np
import pytest
from conftest import another_thread, compiled_model, small_data, small_model

import kmp
from kmp.policy import hardware_support

STOCK_COMPILE = keras.Model.compile


def policy():
    return keras.config.dtype_policy().name


def in_new_thread(function):
    with another_thread() as call:
        return call(function)


def test_enable_sets_the_policy_and_compile_wraps_with_the_settings_of_the_last_call():
    kmp.enable(initial_scale=64.0, growth_interval=7, hysteresis=2)
    assert policy() == "mixed_float16"
    optimizer = compiled_model("adam").optimizer
    assert type(optimizer) is kmp.LossScaleOptimizer
    assert (optimizer.initial_scale, optimizer.rule.growth_interval, optimizer.rule.hysteresis) == (64.0, 7, 2)
    assert isinstance(optimizer.inner_optimizer, keras.optimizers.Adam)
    kmp.enable(growth_interval=5)
    rule = compiled_model("adam").optimizer.rule
    assert (rule.initial_scale, rule.growth_interval, rule.hysteresis) == (2.0**15, 5, 1)


def test_disable_restores_the_policy_and_keras_methods():
    keras.config.set_dtype_policy("mixed_bfloat16")
    kmp.enable()
    kmp.enable("float32")
    assert keras.Model.compile is not STOCK_COMPILE
    kmp.disable()
    assert policy() == "mixed_bfloat16"
    assert keras.Model.compile is STOCK_COMPILE
    kmp.disable()
    assert policy() == "mixed_bfloat16"


def test_handle_is_a_context_manager_that_nests_and_exits_on_an_exception():
    with kmp.enable("mixed_bfloat16") as outer:
        assert "in force" in repr(outer)
        inner = kmp.enable("mixed_float16", loss_scale=8.0)
        assert "in force" in repr(inner)
        assert "replaced" in repr(outer)
        keras.config.set_dtype_policy("float32")  # as keras.backend.clear_session() does
        assert "in force, but Keras' policy is 'float32' here" in repr(inner)
        with pytest.raises(RuntimeError), inner:
            raise RuntimeError
        assert (policy(), "off" in repr(inner)) == ("mixed_bfloat16", True)
        inner.disable()
        assert policy() == "mixed_bfloat16"
    assert policy() == "float32"
    assert keras.Model.compile is STOCK_COMPILE


def test_policy_survives_clear_session(enabled):
    keras.backend.clear_session()
    assert keras.layers.Dense(1).compute_dtype == "float16"
    keras.config.set_dtype_policy("float32")
    assert keras.layers.Dense(1).compute_dtype == "float32"
    keras.backend.clear_session()
    assert (policy(), keras.layers.Dense(1).compute_dtype) == ("mixed_float16", "float16")
    enabled.disable()
    assert (policy(), keras.layers.Dense(1).compute_dtype) == ("float32", "float32")


def test_policy_applies_to_threads_that_had_another_one_before_and_yields_to_one_set_later():
    with another_thread() as call:
        assert call(policy) == "float32"
        with kmp.enable():
            assert call(policy) == "mixed_float16"
            assert call(lambda: keras.layers.Dense(1, dtype="mixed_bfloat16").dtype_policy.name) == "mixed_bfloat16"
            call(keras.config.set_dtype_policy, "mixed_bfloat16")
            policies = (call(policy), in_new_thread(policy), policy())
            assert policies == ("mixed_bfloat16", "mixed_float16", "mixed_float16")
        assert (policy(), in_new_thread(policy)) == ("float32", "float32")


def test_context_in_a_thread_ends_there_and_leaves_later_calls_of_other_threads_active():
    handle = in_new_thread(kmp.enable)
    assert (policy(), keras.Model.compile is STOCK_COMPILE) == ("mixed_float16", False)
    with kmp.enable("mixed_bfloat16"):
        handle.disable()
        assert (policy(), in_new_thread(policy)) == ("mixed_bfloat16", "mixed_bfloat16")
    assert (policy(), keras.Model.compile is STOCK_COMPILE) == ("float32", True)


def test_contexts_in_two_threads_each_have_their_own_policy(enabled):
    def policy_and_interval():
        return policy(), kmp.wrap("sgd").rule.growth_interval

    with another_thread() as call:
        call(kmp.enable, "mixed_bfloat16", growth_interval=7)
        assert policy_and_interval() == ("mixed_float16", 2000)
        with kmp.enable("float32"):
            assert call(policy_and_interval) == ("mixed_bfloat16", 7)


def test_keras_without_the_state_of_the_policy_is_not_supported(monkeypatch):
    monkeypatch.delattr("keras.src.backend.common.global_state.get_global_attribute")
    with pytest.raises(RuntimeError, match=f"does not support Keras {keras.__version__}: update kmp"):
        kmp.enable()


def test_dtype_policy_and_numpy_scalars_are_accepted_as_arguments():
    with kmp.enable(keras.DTypePolicy("mixed_float16"), growth_interval=100.0, jit_compile=np.bool_(True)) as handle:
        assert repr(handle).startswith("<kmp.enable('mixed_float16', growth_interval=100.0, jit_compile=True)")
        assert compiled_model().optimizer.rule.growth_interval == 100


@pytest.mark.parametrize("name", ["mixed_float16", "float16", "mixed_bfloat16", "float32"])
def test_models_train_without_a_warning_and_get_a_loss_scale_if_they_compute_in_float16(name):
    kmp.enable(name)
    model = compiled_model()
    needs_scale = name in ("mixed_float16", "float16")
    assert type(model.optimizer) is (kmp.LossScaleOptimizer if needs_scale else keras.optimizers.SGD)
    model.fit(*small_data(), verbose=0)
    assert model.layers[0].kernel.dtype == ("float16" if name == "float16" else "float32")
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


class AddsLoss(keras.layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(x) * 3)
        return x


@pytest.mark.parametrize("name", ["mixed_float16", "mixed_bfloat16"])
def test_losses_added_in_16_bits_are_cast_to_float32_where_stock_keras_fails(name):
    def loss_history():
        layers = [AddsLoss(), keras.layers.ActivityRegularization(l1=0.25)]
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile("sgd", "mse", jit_compile=False)
        return model.fit(np.ones((8, 4)), np.zeros((8, 1)), verbose=0).history["loss"]

    float32_history = loss_history()
    with kmp.enable(name):
        assert loss_history() == float32_history
    keras.config.set_dtype_policy(name)
    with pytest.raises(TypeError, match="Cannot convert a list"):
        loss_history()


@pytest.mark.parametrize("name", ["mixed_float16", "float16"])
def test_added_losses_are_float32_in_a_custom_loop_and_float16_when_disabled(name, run_step):
    with kmp.enable(name):
        dense = keras.layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l2")
        model = keras.Sequential([keras.Input((4,)), AddsLoss(), dense])

        @run_step
        def losses(x):
            model(x)
            return model.losses

        in_loop = losses(keras.ops.ones((2, 4)))
    assert [loss.dtype.name for loss in in_loop] == ["float32"] * 3
    model(keras.ops.ones((2, 4)))
    assert "float16" in {loss.dtype.name for loss in model.losses}


def test_optimizer_of_a_model_with_one_nested_float16_layer_is_wrapped():
    kmp.enable("float32")
    nested = keras.Sequential([keras.layers.TimeDistributed(keras.layers.Dense(2, dtype="mixed_float16"))])
    model = keras.Sequential([keras.Input((3, 4)), nested])
    model.compile("sgd", "mse")
    assert isinstance(model.optimizer, kmp.LossScaleOptimizer)


def test_compile_does_not_wrap_without_auto_scale_loss_or_an_already_wrapped_optimizer(enabled):
    assert type(compiled_model("sgd", auto_scale_loss=False).optimizer) is keras.optimizers.SGD
    wrapped = kmp.LossScaleOptimizer("sgd", loss_scale=2.0)
    assert compiled_model(wrapped).optimizer is wrapped
    model = small_model()
    model.compile(None, "mse")
    assert model.optimizer is None


def test_compile_replaces_keras_loss_scale_optimizer_and_keeps_its_settings(enabled):
    stock = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=8.0, dynamic_growth_steps=3)
    optimizer = compiled_model(stock).optimizer
    assert type(optimizer) is kmp.LossScaleOptimizer
    assert optimizer.inner_optimizer is stock.inner_optimizer
    assert (optimizer.rule.initial_scale, optimizer.rule.growth_interval) == (8.0, 3)


def test_compile_keeps_a_built_keras_loss_scale_optimizer_and_training_warns(enabled):
    stock, model = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), small_model()
    stock.build(model.trainable_variables)
    model.compile(stock, "sparse_categorical_crossentropy")
    assert model.optimizer is stock
    with pytest.warns(UserWarning, match="without kmp's loss scale, with keras.LossScaleOptimizer") as caught:
        model.fit(*small_data(), verbose=0)
    assert [warning.filename for warning in caught if warning.category is UserWarning] == [__file__]


class ForwardsCompileArguments(keras.Sequential):
    def compile(self, *args, **kwargs):
        super().compile(*args, **kwargs)


@pytest.mark.parametrize("model_class", [keras.Sequential, ForwardsCompileArguments])
def test_compile_wraps_the_optimizer_given_by_position_and_the_default_one(enabled, model_class):
    model = model_class([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mae", None, ["mse"], None, True, 3)
    assert type(model.optimizer.inner_optimizer) is keras.optimizers.SGD
    assert (model.loss, model.run_eagerly, model.steps_per_execution) == ("mae", True, 3)
    model.compile(loss="mse")
    assert isinstance(model.optimizer, kmp.LossScaleOptimizer)
    with pytest.raises(TypeError, match="multiple values for argument 'loss'"):
        model.compile("sgd", "mse", loss="mae")


def test_settings_of_wrap_override_the_active_ones():
    kmp.enable(growth_interval=500)
    optimizer = kmp.wrap("adam", initial_scale=8.0)
    assert (optimizer.initial_scale, optimizer.rule.growth_interval) == (8.0, 500)
    assert kmp.wrap("sgd", loss_scale=1024.0).rule == kmp.scaling.FixedScale(1024.0)
    assert kmp.wrap("sgd", dynamic_growth_steps=7).rule.growth_interval == 7
    assert kmp.wrap("sgd", loss_scale="dynamic").rule.growth_interval == 500
    kmp.enable(loss_scale=64.0)
    assert kmp.wrap("sgd").rule == kmp.scaling.FixedScale(64.0)
    assert kmp.wrap("sgd", initial_scale=8.0).rule.initial_scale == 8.0
    assert kmp.wrap(optimizer) is optimizer
    with pytest.raises(TypeError, match="scaled twice"):
        kmp.wrap(optimizer, growth_interval=4)
    with pytest.raises(ValueError, match="`optimizer` must be the name of an optimizer.*nosuch"):
        kmp.wrap("nosuch")


@pytest.mark.parametrize("patch_target", ["defining class", "model"])
def test_disable_keeps_a_later_patch_of_compile_by_another_library(monkeypatch, patch_target):
    compile_class = next(cls for cls in keras.Model.__mro__ if "compile" in vars(cls))
    patched_class = compile_class if patch_target == "defining class" else keras.Model
    monkeypatch.setattr(compile_class, "compile", compile_class.compile)
    kmp.enable()
    kmp_compile, calls = patched_class.compile, []

    def other_compile(self, *args, **kwargs):
        calls.append(self)
        kmp_compile(self, *args, **kwargs)

    monkeypatch.setattr(patched_class, "compile", other_compile, raising=False)
    kmp.disable()
    assert patched_class.compile is other_compile
    keras.config.set_dtype_policy("mixed_float16")
    model = small_model()
    model.compile("sgd", "mse")
    assert calls == [model]
    assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer


@pytest.mark.parametrize("value", ["half", "", None, 16, "mixed_float8"])
def test_unknown_policy_raises_and_changes_nothing(value):
    with pytest.raises((ValueError, TypeError), match="`policy` must be one of 'mixed_float16'"):
        kmp.enable(value)
    assert (policy(), keras.Model.compile) == ("float32", STOCK_COMPILE)


@pytest.mark.parametrize("call", [kmp.enable, partial(kmp.wrap, "sgd")])
@pytest.mark.parametrize(
    ("name", "value"),
    [("initial_scale", -1), ("growth_interval", 0), ("loss_scale", np.nan), ("scale", 2), ("hysteresis", "1")],
)
def test_invalid_setting_raises_and_changes_nothing(call, name, value):
    with pytest.raises((ValueError, TypeError), match=name):
        call(**{name: value})
    assert (policy(), keras.Model.compile) == ("float32", STOCK_COMPILE)


def test_enable_logs_the_hardware_support_once(monkeypatch, caplog):
    monkeypatch.setattr(hardware_support, "_logged", set())
    monkeypatch.setattr(hardware_support, "hardware", lambda: hardware_support.Hardware(()))
    with caplog.at_level(logging.INFO, "kmp"):
        kmp.enable()
        kmp.enable()
        kmp.enable("float32")
    assert [record.name for record in caplog.records] == ["kmp"]
    assert "no GPU" in caplog.text
