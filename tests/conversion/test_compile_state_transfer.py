import keras
import models
import numpy as np
import pytest

import kmp
from kmp.backend.keras_internals import optimizer_state


def own_loss(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_true - y_pred))


class OwnMetric(keras.metrics.MeanSquaredError):
    pass


def trained(**arguments):
    keras.utils.set_random_seed(0)
    model, batch = models.autoencoder()
    model.compile(**{"optimizer": keras.optimizers.Adam(0.01), "loss": "mse"} | arguments)
    model.fit(batch, batch, verbose=0, epochs=2)
    return model, batch


def test_optimizer_goes_on_where_it_was_with_a_loss_scale_around_it():
    model, batch = trained()
    converted = kmp.convert(model)
    assert isinstance(converted.optimizer, kmp.LossScaleOptimizer)
    inner = converted.optimizer.inner_optimizer
    assert inner is not model.optimizer
    for mine, its in zip(inner.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(mine, its)
    converted.fit(batch, batch, verbose=0)
    assert (int(inner.iterations.numpy()), int(model.optimizer.iterations.numpy())) == (3, 2)


@pytest.mark.parametrize("kind", [keras.optimizers.Nadam, keras.optimizers.Adafactor])
def test_what_an_optimizer_keeps_beyond_its_variables_goes_along(kind):
    model, batch = trained(optimizer=kind(0.01))
    converted = kmp.convert(model)
    back = kmp.to_float32(converted)
    for optimizer in (converted.optimizer.inner_optimizer, back.optimizer):
        for mine, its in zip(optimizer_state(optimizer), optimizer_state(model.optimizer), strict=True):
            np.testing.assert_array_equal(mine, its)
    model.fit(batch, batch, verbose=0)
    back.fit(batch, batch, verbose=0)
    for mine, its in zip(back.weights, model.weights, strict=True):
        np.testing.assert_array_equal(mine, its)


def test_bfloat16_gets_no_loss_scale_and_the_way_back_takes_it_off():
    model, _ = trained()
    assert type(kmp.convert(model, "mixed_bfloat16").optimizer) is keras.optimizers.Adam
    back = kmp.to_float32(kmp.convert(model))
    assert type(back.optimizer) is keras.optimizers.Adam
    assert int(back.optimizer.iterations.numpy()) == 2


def test_settings_of_enable_are_those_of_the_loss_scale():
    model, _ = trained()
    with kmp.enable(initial_scale=1024.0):
        assert kmp.convert(model).optimizer.rule.initial_scale == 1024.0


def test_a_scale_that_only_recorded_a_float32_run_gives_way_to_one_that_moves():
    model, _ = trained(optimizer=kmp.LossScaleOptimizer("adam", loss_scale=1.0))
    assert kmp.convert(model).optimizer.rule == kmp.LossScaleOptimizer("adam").rule
    model, _ = trained(optimizer=kmp.LossScaleOptimizer("adam", loss_scale=1.0, name="mine", jit_compile=True))
    assert (kmp.convert(model).optimizer.name, kmp.convert(model).optimizer.jit_compile) == ("mine", True)
    model, _ = trained(optimizer=kmp.LossScaleOptimizer("adam", loss_scale=8.0))
    assert kmp.convert(model).optimizer.rule.initial_scale == 8.0


def test_an_error_without_a_text_is_named():
    class Mute(keras.metrics.MeanSquaredError):
        def get_config(self):
            raise NotImplementedError

    model, _ = trained(metrics=[Mute()])
    with pytest.warns(UserWarning, match="compile it as before: NotImplementedError"):
        kmp.convert(model)


def test_losses_and_metrics_that_nobody_registered_carry_over():
    model, batch = trained(loss=own_loss, metrics=[OwnMetric(name="own"), own_loss])
    converted = kmp.convert(model)
    assert set(converted.fit(batch, batch, verbose=0).history) == {"loss", "own", "own_loss"}
    assert converted.loss is own_loss


def test_each_loss_and_metric_keeps_what_it_was_made_with():
    def times(factor):
        def loss(y_true, y_pred):
            return factor * keras.ops.mean((y_true - y_pred) ** 2, axis=-1)

        return loss

    inputs = keras.Input((4,))
    model = keras.Model(inputs, [keras.layers.Dense(2)(inputs), keras.layers.Dense(2)(inputs)])
    model.compile("adam", loss=[times(1.0), times(1000.0)], metrics=[[times(3.0)], [times(5.0)]])
    x, y = np.ones((4, 4), "float32"), [np.ones((4, 2), "float32")] * 2
    np.testing.assert_allclose(kmp.convert(model).evaluate(x, y, verbose=0), model.evaluate(x, y, verbose=0), rtol=1e-2)


def test_schedule_that_nobody_registered_carries_over():
    class Own(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.5

        def get_config(self):
            return {}

    model, _ = trained(optimizer=keras.optimizers.SGD(Own()), loss=lambda y_true, y_pred: keras.ops.mean(y_pred))
    converted = kmp.convert(model)
    assert converted.compiled
    assert float(converted.optimizer.inner_optimizer.learning_rate) == 0.5


def test_loss_scale_of_a_float32_model_keeps_its_settings():
    model, _ = trained(optimizer=kmp.LossScaleOptimizer("adam", initial_scale=256.0, growth_interval=7))
    rule = kmp.convert(model).optimizer.rule
    assert (rule.initial_scale, rule.growth_interval) == (256.0, 7)


def test_model_that_is_not_compiled_stays_so():
    assert not kmp.convert(models.autoencoder()[0]).compiled


def test_compile_of_ones_own_is_told():
    model, _ = models.gan()
    model.compile(generator=keras.optimizers.Adam(), discriminator=keras.optimizers.Adam())
    with pytest.warns(UserWarning, match="Gan 'gan.*' is not compiled, compile it as before"):
        converted = kmp.convert(model)
    assert not converted.compiled


def test_optimizer_that_was_built_on_other_variables_starts_anew():
    model, _ = trained()
    model.layers[1].trainable = False
    with pytest.warns(UserWarning, match="starts anew"):
        converted = kmp.convert(model)
    assert int(converted.optimizer.inner_optimizer.iterations.numpy()) == 0


def test_original_trains_on_as_if_nothing_had_happened():
    alone, batch = trained()
    model, _ = trained()
    kmp.convert(model)
    for one in (alone, model):
        keras.utils.set_random_seed(1)
        one.fit(batch, batch, verbose=0)
    for mine, its in zip(model.weights, alone.weights, strict=True):
        np.testing.assert_allclose(mine, its)
