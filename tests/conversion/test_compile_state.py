import keras
import models
import numpy as np
import pytest
from conftest import assert_equal, assert_trained_alike

import kmp
from kmp.backend.keras_internals import optimizer_state


class CustomMetric(keras.metrics.MeanSquaredError):
    pass


def compiled(**arguments):
    keras.utils.set_random_seed(0)
    model, batch = models.autoencoder()
    model.compile(**{"optimizer": "adam", "loss": "mse", "run_eagerly": True} | arguments)
    return model, batch


@pytest.mark.parametrize("optimizer_class", [keras.optimizers.Nadam, keras.optimizers.Adafactor])
def test_optimizer_state_is_copied_both_ways_and_all_models_train_on(optimizer_class):
    (model, batch), (reference, _) = (compiled(optimizer=optimizer_class(0.01)) for _ in range(2))
    for trainee in (model, reference):
        trainee.train_on_batch(batch, batch)
        trainee.train_on_batch(batch, batch)
    converted = kmp.convert(model)
    assert isinstance(converted.optimizer, kmp.LossScaleOptimizer)
    restored, inner = kmp.to_float32(converted), converted.optimizer.inner_optimizer
    assert inner is not model.optimizer
    for optimizer in (inner, restored.optimizer):
        assert type(optimizer) is optimizer_class
        assert_equal(optimizer_state(optimizer), optimizer_state(model.optimizer))
    # Which needs no loss scale.
    assert type(kmp.convert(model, "mixed_bfloat16").optimizer) is optimizer_class
    converted.train_on_batch(batch, batch)
    assert (int(inner.iterations.numpy()), int(model.optimizer.iterations.numpy())) == (3, 2)
    for trainee in (reference, model, restored):
        trainee.train_on_batch(batch, batch)
        assert_trained_alike(trainee.weights, reference.weights)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"initial_scale": 256.0, "growth_interval": 7},
            {"initial_scale": 256.0, "growth_interval": 7},
        ),
        ({"loss_scale": 8.0}, {"loss_scale": 8.0}),
        ({"loss_scale": 1.0}, {}),  # which recorded a float32 run
    ],
    ids=str,
)
def test_loss_scale_of_a_float32_model_keeps_its_settings_except_a_fixed_scale_of_1(
    settings, expected
):
    model, _ = compiled(
        optimizer=kmp.LossScaleOptimizer("adam", **settings, name="mine", jit_compile=True)
    )
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


def test_unregistered_losses_and_metrics_are_kept_with_the_closures_of_functions_of_one_name():
    def times(factor):
        def loss(y_true, y_pred):
            return factor * keras.ops.mean((y_true - y_pred) ** 2, axis=-1)

        return loss

    inputs = keras.Input((4,))
    model = keras.Model(inputs, [keras.layers.Dense(2)(inputs), keras.layers.Dense(2)(inputs)])
    losses, metrics = (
        [times(1.0), times(1000.0)],
        [[times(3.0)], [times(5.0), CustomMetric(name="custom")]],
    )
    model.compile("adam", loss=losses, metrics=metrics, run_eagerly=True)
    x, y = np.ones((4, 4), "float32"), [np.ones((4, 2), "float32")] * 2
    converted = kmp.convert(model)
    results, expected = (
        each.evaluate(x, y, verbose=0, return_dict=True) for each in (converted, model)
    )
    assert results == pytest.approx(expected, rel=1e-2)
    assert sum("custom" in name for name in results) == 1


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
    with pytest.warns(
        UserWarning, match="Gan 'gan.*' is not compiled. Call its `compile` yourself"
    ):
        assert not kmp.convert(model).compiled


def test_optimizer_built_on_different_variables_starts_with_fresh_state():
    model, _ = compiled()
    model.optimizer.build(model.trainable_variables)
    model.optimizer.iterations.assign(2)
    model.layers[1].trainable = False
    with pytest.warns(UserWarning, match="starts with fresh state"):
        converted = kmp.convert(model)
    assert int(converted.optimizer.inner_optimizer.iterations.numpy()) == 0
