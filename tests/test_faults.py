"""The table of faults in docs/faults.md, with Keras' LossScaleOptimizer and with kmp's."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import assert_equal, fit_data, small_data, small_model, values, without_replays

import kmp

OPTIMIZERS = {"keras": keras.optimizers.LossScaleOptimizer, "kmp": kmp.LossScaleOptimizer}


# What Keras' optimizer does changes with Keras only.
@pytest.fixture(params=[pytest.param("keras", marks=pytest.mark.exhaustive), "kmp"])
def library(request):
    """The library of the loss scale optimizer: `"keras"`, without `enable`, or `"kmp"`."""
    keras.config.set_dtype_policy("mixed_float16")
    if request.param == "kmp":
        kmp.enable()
    return request.param


def is_finite(variables):
    return all(np.isfinite(value).all() for value in values(variables))


def compiled(layers=None, **arguments):
    model = keras.Sequential([keras.Input((4,)), *layers]) if layers else small_model()
    model.compile(keras.optimizers.Adam(0.02), "sparse_categorical_crossentropy", **arguments)
    return model


def corrupt_data(clean=20):
    """Returns 200 corrupt batches between some clean ones."""
    x, y = small_data(200 + 2 * clean)
    x[clean * 8 : (clean + 200) * 8] = np.nan
    return x, y


def test_200_corrupt_batches_in_a_row(library):
    model = compiled(metrics=["accuracy"])
    fit_data(model, corrupt_data())
    assert is_finite(model.weights) == (library == "kmp")
    if library == "kmp":
        assert fit_data(model, small_data(), epochs=2)["accuracy"][-1] > 0.9


@pytest.mark.usefixtures("enabled")
def test_200_corrupt_batches_in_a_row_with_the_callback():
    model = compiled()
    before = model.get_weights()
    with pytest.raises(kmp.callbacks.StuckError, match="the last 100 steps were skipped"):
        fit_data(model, corrupt_data(clean=0), without_replays())
    assert model.optimizer.snapshot().step == 100
    assert_equal(before, model.get_weights())


def test_outlier_that_overflows_before_batch_normalization(library):
    layers = [
        keras.layers.Dense(32),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.Dense(2),
    ]
    model = compiled([*layers, kmp.layers.Softmax()], run_eagerly=True)
    x, y = small_data(3)
    x[10] = 6e4  # finite in float16, but Dense overflows on it
    fit_data(model, (x, y))
    assert is_finite(model.trainable_variables)
    assert is_finite(model.non_trainable_variables) == (library == "kmp")
    assert np.isfinite(model.predict(x[:8], verbose=0)).all() == (library == "kmp")


def test_scale_driven_to_its_ceiling(library):
    variable = keras.Variable(np.ones(4, "float32"))
    optimizer = OPTIMIZERS[library](
        keras.optimizers.SGD(0.1), initial_scale=2.0**120, dynamic_growth_steps=1
    )
    optimizer.build([variable])
    optimizer.scale_loss(1.0)
    for _ in range(12):
        optimizer.apply([tf.zeros(4)], [variable])
    assert float(optimizer.dynamic_scale) == (2.0**127 if library == "kmp" else np.inf)
    for _ in range(5):
        optimizer.apply([tf.fill([4], np.inf)], [variable])
    assert float(optimizer.dynamic_scale) == (2.0**122 if library == "kmp" else np.inf)
    assert is_finite([variable])


def test_scale_driven_to_its_floor(library):
    variable = keras.Variable(np.ones(4, "float32"))
    optimizer = OPTIMIZERS[library](keras.optimizers.SGD(0.1))
    optimizer.build([variable])

    @tf.function
    def step(gradient):
        optimizer.scale_loss(1.0)
        optimizer.apply([gradient], [variable])

    for _ in range(170):
        step(tf.fill([4], np.inf))
    assert float(optimizer.dynamic_scale) == (2.0**-14 if library == "kmp" else 0.0)
    step(tf.zeros(4))
    assert is_finite([variable]) == (library == "kmp")


def test_overflow_on_one_replica(library, two_replicas):
    with two_replicas.scope():
        options = {"use_bias": False, "kernel_initializer": "ones", "dtype": "float32"}
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(1, **options), keras.layers.Identity()]
        )
        model.compile(
            OPTIMIZERS[library](keras.optimizers.SGD(0.01), initial_scale=4.0),
            "mse",
            run_eagerly=True,
        )
    x, _ = small_data(1)
    y = x.sum(1, keepdims=True) * 0.5
    # Keras checks only the first replica.
    for replica, is_skipped in ((0, True), (1, library == "kmp")):
        corrupt = x.copy()
        corrupt[4 * replica] = np.inf
        fit_data(model, (corrupt, y))
        for kernel in two_replicas.experimental_local_results(model.layers[0].kernel.value):
            if is_skipped:
                np.testing.assert_array_equal(kernel, np.ones((4, 1)))
            else:
                assert not np.isfinite(kernel).any()


def test_model_that_float16_cannot_train(library):
    """Keras silently skips every step."""

    @tf.custom_gradient
    def overflows(x):
        return tf.identity(x), lambda gradient: gradient * np.inf

    layers = [
        keras.layers.Dense(8),
        keras.layers.Lambda(overflows),
        keras.layers.Dense(2),
        kmp.layers.Softmax(),
    ]
    # On an H100, XLA's autotuner refused the product with a constant Inf.
    model = compiled(layers, jit_compile=False)
    before = model.get_weights()
    if library == "keras":
        fit_data(model, small_data(30))
    else:
        with pytest.raises(
            kmp.callbacks.StuckError, match="at step 30 the last 30 steps .* lowest"
        ):
            fit_data(model, small_data(40), without_replays())
    assert_equal(before, model.get_weights())


def test_nadam_saved_and_loaded(library, tmp_path):
    """Keras' LossScaleOptimizer does not track Nadam's product of momenta, so it is not saved."""
    model = small_model()
    model.compile(keras.optimizers.Nadam(0.01), "sparse_categorical_crossentropy", run_eagerly=True)
    fit_data(model, small_data(1))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    saved, restored = (
        source.optimizer.inner_optimizer._u_product.numpy() for source in (model, loaded)
    )
    assert (saved < 0.5, restored) == (True, saved if library == "kmp" else 1.0)
    fit_data(model, small_data(1))
    fit_data(loaded, small_data(1))
    are_equal = [
        np.array_equal(*pair)
        for pair in zip(model.get_weights(), loaded.get_weights(), strict=True)
    ]
    assert all(are_equal) == (library == "kmp")


def test_bad_initial_scale(library):
    for value in (-1.0, 0.0, np.nan, np.inf):
        is_error = pytest.raises(
            ValueError, match=f"`initial_scale` must be .*initial_scale={value}"
        )
        with is_error if library == "kmp" else contextlib.nullcontext():
            OPTIMIZERS[library](keras.optimizers.SGD(), initial_scale=value)
