import keras
import numpy as np
import pytest
from conftest import another_thread, compiled_model, small_model

import kmp
from kmp.backend.keras_internals import defining_class

# What `enable` replaces, and `disable` restores even while something is in use.
STOCK_BUILD = keras.Model._maybe_symbolic_build


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
    assert (optimizer.initial_scale, optimizer.rule.growth_interval, optimizer.rule.hysteresis) == (
        64.0,
        7,
        2,
    )
    assert isinstance(optimizer.inner_optimizer, keras.optimizers.Adam)
    kmp.enable("float16", growth_interval=5)
    assert policy() == "float16"
    rule = compiled_model("adam").optimizer.rule
    assert (rule.initial_scale, rule.growth_interval, rule.hysteresis) == (2.0**15, 5, 1)


def test_disable_restores_the_policy_and_keras_methods():
    keras.config.set_dtype_policy("mixed_bfloat16")
    kmp.enable()
    kmp.enable("float32")
    assert keras.Model._maybe_symbolic_build is not STOCK_BUILD
    kmp.disable()
    assert policy() == "mixed_bfloat16"
    assert keras.Model._maybe_symbolic_build is STOCK_BUILD
    kmp.disable()
    assert policy() == "mixed_bfloat16"


def test_handle_is_a_context_manager_that_nests_and_exits_on_an_exception():
    with kmp.enable("mixed_bfloat16") as outer:
        assert "in force" in repr(outer)
        inner = kmp.enable(keras.DTypePolicy("mixed_float16"), loss_scale=8.0)
        assert repr(inner) == "<kmp.enable('mixed_float16', loss_scale=8.0) in force>"
        assert "replaced" in repr(outer)
        keras.config.set_dtype_policy("float32")  # as keras.backend.clear_session() does
        with pytest.raises(RuntimeError), inner:
            raise RuntimeError
        assert (policy(), "off" in repr(inner)) == ("mixed_bfloat16", True)
        inner.disable()
        assert policy() == "mixed_bfloat16"
    assert policy() == "float32"
    assert keras.Model._maybe_symbolic_build is STOCK_BUILD


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
            assert (
                call(lambda: keras.layers.Dense(1, dtype="mixed_bfloat16").dtype_policy.name)
                == "mixed_bfloat16"
            )
            call(keras.config.set_dtype_policy, "mixed_bfloat16")
            policies = (call(policy), in_new_thread(policy), policy())
            assert policies == ("mixed_bfloat16", "mixed_float16", "mixed_float16")
        assert (policy(), in_new_thread(policy)) == ("float32", "float32")


def test_context_in_a_thread_ends_there_and_leaves_later_calls_of_other_threads_active():
    handle = in_new_thread(kmp.enable)
    assert (policy(), keras.Model._maybe_symbolic_build is STOCK_BUILD) == ("mixed_float16", False)
    with kmp.enable("mixed_bfloat16"):
        handle.disable()
        assert (policy(), in_new_thread(policy)) == ("mixed_bfloat16", "mixed_bfloat16")
    assert (policy(), keras.Model._maybe_symbolic_build is STOCK_BUILD) == ("float32", True)


def test_contexts_in_two_threads_each_have_their_own_policy(enabled):
    def policy_and_interval():
        return policy(), kmp.wrap("sgd").rule.growth_interval

    with another_thread() as call:
        call(kmp.enable, "float16", growth_interval=7)
        assert policy_and_interval() == ("mixed_float16", 2000)
        with kmp.enable("float32"):
            assert call(policy_and_interval) == ("float16", 7)


def test_keras_without_the_state_of_the_policy_is_not_supported(monkeypatch):
    monkeypatch.delattr("keras.src.backend.common.global_state.get_global_attribute")
    with (
        pytest.warns(UserWarning, match="has no .*get_global_attribute.*Update kmp"),
        pytest.raises(
            RuntimeError, match=f"does not support Keras {keras.__version__}: update kmp"
        ),
    ):
        kmp.enable()
    monkeypatch.undo()
    assert (policy(), keras.Model._maybe_symbolic_build) == ("float32", STOCK_BUILD)


X, Y = np.ones((8, 4), "float32"), np.zeros((8, 1), "float32")


@keras.saving.register_keras_serializable("tests")
class AddsLoss(keras.layers.Layer):
    """Adds a loss in its compute dtype; a layer with an activity regularizer is float32."""

    def call(self, x):
        self.add_loss(keras.ops.mean(x) * 3)
        return x


def model_that_adds_losses():
    layers = [AddsLoss(), keras.layers.ActivityRegularization(l1=0.25)]
    model = keras.Sequential(
        [keras.Input((4,)), *layers, keras.layers.Dense(1, kernel_initializer="zeros")]
    )
    model.compile("sgd", "mse", jit_compile=False)
    return model


def trained_loss(model):
    return model.fit(X, Y, verbose=0).history["loss"]


@pytest.mark.parametrize("name", ["mixed_float16", "mixed_bfloat16"])
def test_losses_added_in_16_bits_are_cast_to_float32_where_stock_keras_fails(name, tmp_path):
    expected = trained_loss(model_that_adds_losses())
    with kmp.enable(name):
        model = model_that_adds_losses()
    if name == "mixed_float16":  # a loaded model is known by kmp's optimizer
        model.optimizer.build(model.trainable_variables)
        model.save(tmp_path / "model.keras")
        assert trained_loss(keras.models.load_model(tmp_path / "model.keras")) == expected
    assert trained_loss(model) == expected  # after the block, too
    keras.config.set_dtype_policy(name)
    with pytest.raises(TypeError, match="Cannot convert a list"):
        trained_loss(model_that_adds_losses())


def test_added_losses_are_float32_in_a_custom_loop_and_float16_when_disabled():
    with kmp.enable("float16"):
        dense = keras.layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l2")
        model = keras.Sequential([keras.Input((4,)), AddsLoss(), dense])
        model(X)
        assert [loss.dtype.name for loss in model.losses] == ["float32"] * 3
    model(X)
    assert "float16" in {loss.dtype.name for loss in model.losses}


def test_metrics_of_float16_outputs_are_computed_in_float32(enabled):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(10, kernel_initializer="ones")])
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["top_k_categorical_accuracy", "mse"], run_eagerly=True)
    x, y = np.full((32, 8), 64.0), np.eye(10)[np.arange(32) % 10]
    values = model.evaluate(x, y, verbose=0, return_dict=True)
    assert 65504 < values["mse"] < np.inf
    assert values["top_k_categorical_accuracy"] <= 1.0


def test_optimizer_of_a_model_with_one_nested_float16_layer_is_wrapped():
    kmp.enable("float32")
    nested = keras.Sequential(
        [keras.layers.TimeDistributed(keras.layers.Dense(2, dtype="mixed_float16"))]
    )
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


def test_compile_replaces_keras_loss_scale_optimizer_and_keeps_its_settings_unless_it_is_built(
    enabled,
):
    stock = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.5), initial_scale=8.0, dynamic_growth_steps=3
    )
    optimizer = compiled_model(stock).optimizer
    assert type(optimizer) is kmp.LossScaleOptimizer
    assert optimizer.inner_optimizer is stock.inner_optimizer
    assert (optimizer.rule.initial_scale, optimizer.rule.growth_interval) == (8.0, 3)
    built, model = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), small_model()
    built.build(model.trainable_variables)
    model.compile(built, "mse")
    assert model.optimizer is built


def wrapped(compile):
    """Returns a `compile` as of another library that wraps that of Keras."""

    def wrapping(self, *args, **kwargs):
        compile(self, *args, **kwargs)

    return wrapping


class ForwardsCompileArguments(keras.Sequential):
    def compile(self, *args, **kwargs):
        super().compile(*args, **kwargs)


def test_optimizer_by_position_and_the_default_one_are_wrapped_where_others_wrap_compile(
    monkeypatch,
):
    owner = defining_class(keras.Model, "compile")
    monkeypatch.setattr(owner, "compile", wrapped(owner.compile))
    with kmp.enable():
        model = ForwardsCompileArguments([keras.Input((2,)), keras.layers.Dense(1)])
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
    with pytest.raises(ValueError, match="growth_interval=0"):
        kmp.wrap("sgd", growth_interval=0)
    with pytest.raises(ValueError, match="`optimizer` must be the name of an optimizer.*nosuch"):
        kmp.wrap("nosuch")


@pytest.mark.parametrize("patch_target", ["defining class", "model"])
def test_disable_keeps_a_later_patch_of_compile_by_another_library(monkeypatch, patch_target):
    owner = defining_class(keras.Model, "compile")
    patched_class = owner if patch_target == "defining class" else keras.Model
    monkeypatch.setattr(owner, "compile", owner.compile)  # what the test changes is restored
    kmp.enable()
    other_compile = wrapped(patched_class.compile)
    monkeypatch.setattr(patched_class, "compile", other_compile, raising=False)
    kmp.disable()
    assert patched_class.compile is other_compile
    keras.config.set_dtype_policy("mixed_float16")
    model = compiled_model()
    assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer
    assert "train_step" not in vars(model)  # a model without kmp is that of Keras


@pytest.mark.parametrize(
    "argument",
    [{"policy": "half"}, {"policy": None}, {"growth_interval": 0}, {"hysteresis": "1"}],
    ids=str,
)
def test_invalid_argument_raises_and_changes_nothing(argument):
    (name,) = argument
    with pytest.raises((ValueError, TypeError), match=f"`{name}` must be"):
        kmp.enable(**argument)
    assert (policy(), keras.Model._maybe_symbolic_build) == ("float32", STOCK_BUILD)


STOCK = keras.optimizers.LossScaleOptimizer
# The call that sets the loss scale of an optimizer, and one that creates such an optimizer.
SETTINGS_CALLS = {
    "compile": ("kmp.enable", lambda: compiled_model(STOCK(keras.optimizers.SGD()))),
    "stock with settings": (
        "kmp.wrap",
        lambda: compiled_model(STOCK(keras.optimizers.SGD(), initial_scale=8.0)),
    ),
    "wrap with settings": ("kmp.wrap", lambda: compiled_model(kmp.wrap("sgd", growth_interval=5))),
    "class": ("kmp.LossScaleOptimizer", lambda: compiled_model(kmp.LossScaleOptimizer("sgd"))),
    "convert": ("kmp.enable", lambda: kmp.convert(kmp.to_float32(compiled_model("sgd")))),
    "convert wrapped": (
        "kmp.wrap",
        lambda: kmp.convert(compiled_model(kmp.wrap("sgd", growth_interval=5))),
    ),
}


@pytest.mark.parametrize("name", SETTINGS_CALLS)
def test_settings_call_is_the_one_that_sets_the_loss_scale(name):
    call, make = SETTINGS_CALLS[name]
    with kmp.enable(growth_interval=7):
        optimizer = make().optimizer
    assert optimizer.settings_call == call
    assert optimizer.rule.growth_interval == 7 or call != "kmp.enable"
    assert kmp.wrap("sgd").settings_call == "kmp.wrap"  # without `enable`
