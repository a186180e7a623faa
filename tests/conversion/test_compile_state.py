import keras
import models
import numpy as np
import pytest
from conftest import assert_equal

import kmp
from kmp.backend.keras_internals import optimizer_state


def custom_loss(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_true - y_pred))


class CustomMetric(keras.metrics.MeanSquaredError):
    pass


def compiled(**arguments):
    keras.utils.set_random_seed(0)
    model, batch = models.autoencoder()
    model.compile(**{"optimizer": keras.optimizers.Adam(0.01), "loss": "mse"} | arguments)
    return model, batch


def trained(**arguments):
    model, batch = compiled(**arguments)
    model.fit(batch, batch, verbose=0, epochs=2)
    return model, batch


@pytest.mark.parametrize("optimizer_class", [keras.optimizers.Adam, keras.optimizers.Nadam, keras.optimizers.Adafactor])
def test_optimizer_state_is_copied_both_ways_and_all_models_train_on(optimizer_class):
    (model, batch), (reference, _) = (trained(optimizer=optimizer_class(0.01)) for _ in range(2))
    converted = kmp.convert(model)
    assert isinstance(converted.optimizer, kmp.LossScaleOptimizer)
    restored, inner = kmp.to_float32(converted), converted.optimizer.inner_optimizer
    assert inner is not model.optimizer
    for optimizer in (inner, restored.optimizer):
        assert type(optimizer) is optimizer_class
        assert_equal(optimizer_state(optimizer), optimizer_state(model.optimizer))
    assert type(kmp.convert(model, "mixed_bfloat16").optimizer) is optimizer_class  # which needs no loss scale
    converted.fit(batch, batch, verbose=0)
    assert (int(inner.iterations.numpy()), int(model.optimizer.iterations.numpy())) == (3, 2)
    for trainee in (reference, model, restored):
        keras.utils.set_random_seed(1)
        trainee.fit(batch, batch, verbose=0)
        assert_equal(trainee.weights, reference.weights)


def test_loss_scale_uses_the_settings_of_enable():
    with kmp.enable(initial_scale=1024.0):
        assert kmp.convert(compiled()[0]).optimizer.rule.initial_scale == 1024.0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"initial_scale": 256.0, "growth_interval": 7}, {"initial_scale": 256.0, "growth_interval": 7}),
        ({"loss_scale": 8.0}, {"loss_scale": 8.0}),
        ({"loss_scale": 1.0}, {}),  # which recorded a float32 run
    ],
    ids=str,
)
def test_loss_scale_of_a_float32_model_keeps_its_settings_except_a_fixed_scale_of_1(settings, expected):
    model, _ = compiled(optimizer=kmp.LossScaleOptimizer("adam", **settings, name="mine", jit_compile=True))
    optimizer = kmp.convert(model).optimizer
    assert optimizer.rule == kmp.LossScaleOptimizer("adam", **expected).rule
    assert (optimizer.name, optimizer.jit_compile) == ("mine", True)


def test_warning_names_the_class_of_an_error_without_a_message():
    class Mute(keras.metrics.MeanSquaredError):
        def get_config(self):
            raise NotImplementedError

    model, _ = compiled(metrics=[Mute()])
    with pytest.warns(UserWarning, match="Call its `compile` yourself: NotImplementedError"):
        kmp.convert(model)


def test_unregistered_losses_and_metrics_are_kept():
    model, batch = compiled(loss=custom_loss, metrics=[CustomMetric(name="custom"), custom_loss])
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
    model, _ = compiled(optimizer=optimizer, loss=lambda y_true, y_pred: keras.ops.mean(y_pred))
    converted = kmp.convert(model)
    assert converted.compiled
    assert float(converted.optimizer.inner_optimizer.learning_rate) == 0.5


def test_uncompiled_model_stays_uncompiled_and_an_overridden_compile_raises_a_warning():
    assert not kmp.convert(models.autoencoder()[0]).compiled
    model, _ = models.gan()
    model.compile(generator=keras.optimizers.Adam(), discriminator=keras.optimizers.Adam())
    with pytest.warns(UserWarning, match="Gan 'gan.*' is not compiled. Call its `compile` yourself"):
        assert not kmp.convert(model).compiled


def test_optimizer_built_on_different_variables_starts_with_fresh_state():
    model, _ = trained()
    model.layers[1].trainable = False
    with pytest.warns(UserWarning, match="starts with fresh state"):
        converted = kmp.convert(model)
    assert int(converted.optimizer.inner_optimizer.iterations.numpy()) == 0
