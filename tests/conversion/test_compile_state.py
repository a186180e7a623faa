import keras
import models
import numpy as np
import pytest

import kmp
from kmp.backend.keras_internals import optimizer_state


def custom_loss(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_true - y_pred))


class CustomMetric(keras.metrics.MeanSquaredError):
    pass


def trained(**arguments):
    keras.utils.set_random_seed(0)
    model, batch = models.autoencoder()
    model.compile(**{"optimizer": keras.optimizers.Adam(0.01), "loss": "mse"} | arguments)
    model.fit(batch, batch, verbose=0, epochs=2)
    return model, batch


def test_optimizer_state_is_copied_and_wrapped_in_a_loss_scale_optimizer():
    model, batch = trained()
    converted = kmp.convert(model)
    assert isinstance(converted.optimizer, kmp.LossScaleOptimizer)
    inner = converted.optimizer.inner_optimizer
    assert inner is not model.optimizer
    for copy, original in zip(inner.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(copy, original)
    converted.fit(batch, batch, verbose=0)
    assert (int(inner.iterations.numpy()), int(model.optimizer.iterations.numpy())) == (3, 2)


@pytest.mark.parametrize("optimizer_class", [keras.optimizers.Nadam, keras.optimizers.Adafactor])
def test_optimizer_state_outside_its_variables_is_copied(optimizer_class):
    model, batch = trained(optimizer=optimizer_class(0.01))
    converted = kmp.convert(model)
    restored = kmp.to_float32(converted)
    for optimizer in (converted.optimizer.inner_optimizer, restored.optimizer):
        for copy, original in zip(optimizer_state(optimizer), optimizer_state(model.optimizer), strict=True):
            np.testing.assert_array_equal(copy, original)
    model.fit(batch, batch, verbose=0)
    restored.fit(batch, batch, verbose=0)
    for copy, original in zip(restored.weights, model.weights, strict=True):
        np.testing.assert_array_equal(copy, original)


def test_bfloat16_adds_no_loss_scale_and_to_float32_removes_it():
    model, _ = trained()
    assert type(kmp.convert(model, "mixed_bfloat16").optimizer) is keras.optimizers.Adam
    restored = kmp.to_float32(kmp.convert(model))
    assert type(restored.optimizer) is keras.optimizers.Adam
    assert int(restored.optimizer.iterations.numpy()) == 2


def test_loss_scale_uses_the_settings_of_enable():
    model, _ = trained()
    with kmp.enable(initial_scale=1024.0):
        assert kmp.convert(model).optimizer.rule.initial_scale == 1024.0


def test_fixed_scale_of_1_that_recorded_a_float32_run_becomes_a_dynamic_scale():
    model, _ = trained(optimizer=kmp.LossScaleOptimizer("adam", loss_scale=1.0))
    assert kmp.convert(model).optimizer.rule == kmp.LossScaleOptimizer("adam").rule
    model, _ = trained(optimizer=kmp.LossScaleOptimizer("adam", loss_scale=1.0, name="mine", jit_compile=True))
    assert (kmp.convert(model).optimizer.name, kmp.convert(model).optimizer.jit_compile) == ("mine", True)
    model, _ = trained(optimizer=kmp.LossScaleOptimizer("adam", loss_scale=8.0))
    assert kmp.convert(model).optimizer.rule.initial_scale == 8.0


def test_warning_names_the_class_of_an_error_without_a_message():
    class Mute(keras.metrics.MeanSquaredError):
        def get_config(self):
            raise NotImplementedError

    model, _ = trained(metrics=[Mute()])
    with pytest.warns(UserWarning, match="Call its `compile` yourself: NotImplementedError"):
        kmp.convert(model)


def test_unregistered_losses_and_metrics_are_kept():
    model, batch = trained(loss=custom_loss, metrics=[CustomMetric(name="custom"), custom_loss])
    converted = kmp.convert(model)
    assert set(converted.fit(batch, batch, verbose=0).history) == {"loss", "custom", "custom_loss"}
    assert converted.loss is custom_loss


def test_losses_and_metrics_with_the_same_name_keep_their_closures():
    def times(factor):
        def loss(y_true, y_pred):
            return factor * keras.ops.mean((y_true - y_pred) ** 2, axis=-1)

        return loss

    inputs = keras.Input((4,))
    model = keras.Model(inputs, [keras.layers.Dense(2)(inputs), keras.layers.Dense(2)(inputs)])
    model.compile("adam", loss=[times(1.0), times(1000.0)], metrics=[[times(3.0)], [times(5.0)]])
    x, y = np.ones((4, 4), "float32"), [np.ones((4, 2), "float32")] * 2
    np.testing.assert_allclose(kmp.convert(model).evaluate(x, y, verbose=0), model.evaluate(x, y, verbose=0), rtol=1e-2)


def test_unregistered_learning_rate_schedule_is_kept():
    class ConstantSchedule(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.5

        def get_config(self):
            return {}

    optimizer = keras.optimizers.SGD(ConstantSchedule())
    model, _ = trained(optimizer=optimizer, loss=lambda y_true, y_pred: keras.ops.mean(y_pred))
    converted = kmp.convert(model)
    assert converted.compiled
    assert float(converted.optimizer.inner_optimizer.learning_rate) == 0.5


def test_loss_scale_of_a_float32_model_keeps_its_settings():
    model, _ = trained(optimizer=kmp.LossScaleOptimizer("adam", initial_scale=256.0, growth_interval=7))
    rule = kmp.convert(model).optimizer.rule
    assert (rule.initial_scale, rule.growth_interval) == (256.0, 7)


def test_uncompiled_model_stays_uncompiled():
    assert not kmp.convert(models.autoencoder()[0]).compiled


def test_overridden_compile_raises_a_warning():
    model, _ = models.gan()
    model.compile(generator=keras.optimizers.Adam(), discriminator=keras.optimizers.Adam())
    with pytest.warns(UserWarning, match="Gan 'gan.*' is not compiled. Call its `compile` yourself"):
        converted = kmp.convert(model)
    assert not converted.compiled


def test_optimizer_built_on_different_variables_starts_with_fresh_state():
    model, _ = trained()
    model.layers[1].trainable = False
    with pytest.warns(UserWarning, match="starts with fresh state"):
        converted = kmp.convert(model)
    assert int(converted.optimizer.inner_optimizer.iterations.numpy()) == 0


def test_conversion_does_not_affect_further_training_of_the_original():
    reference, batch = trained()
    model, _ = trained()
    kmp.convert(model)
    for trainee in (reference, model):
        keras.utils.set_random_seed(1)
        trainee.fit(batch, batch, verbose=0)
    for weight, expected in zip(model.weights, reference.weights, strict=True):
        np.testing.assert_allclose(weight, expected)
