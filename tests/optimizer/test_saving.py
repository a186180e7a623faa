"""Saving and loading: with kmp's optimizer and Keras', and in a process that does not import kmp."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled_model, fit, small_data, small_model, values
from keras import ops

import kmp
from kmp.backend.keras_internals import optimizer_state


def weights():
    return [keras.Variable(ops.ones((2, 3)), name="a"), keras.Variable(ops.ones((2,)), name="b")]


def test_loaded_model_has_the_scale_counters_and_moments(tmp_path, enabled):
    x, y = small_data()
    x[10] = np.nan
    model = compiled_model("adam", jit_compile=False)
    model.fit(x, y, batch_size=8, verbose=0)
    model.optimizer.apply([ops.full(v.shape, np.inf) for v in model.trainable_variables], model.trainable_variables)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, kmp.LossScaleOptimizer)
    before, after = model.optimizer.snapshot(), loaded.optimizer.snapshot()
    assert (after.step, after.loss_scale, after.overflow_count) == (21, 2.0**14, 2)
    assert list(before.overflows_by_variable.values()) == list(after.overflows_by_variable.values())
    for old, new in zip(values(model.optimizer.variables), values(loaded.optimizer.variables), strict=True):
        np.testing.assert_array_equal(old, new)


def test_list_of_variables_equals_that_of_keras_class():
    ours = kmp.LossScaleOptimizer(keras.optimizers.Adam())
    stock = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    variables = weights()
    for optimizer in (ours, stock):
        optimizer.build(variables)
    assert [v.name for v in ours.variables] == [v.name for v in stock.variables]


def test_compiled_but_untrained_models_save_and_load(tmp_path, enabled):
    trained, fresh = compiled_model("adam"), compiled_model("adam")
    trained.fit(*small_data(), verbose=0)
    trained.save_weights(tmp_path / "trained.weights.h5")
    fresh.save(tmp_path / "fresh.keras")
    with pytest.warns(
        UserWarning, match="Skipping variable loading for optimizer"
    ):  # Keras warns about its own variables
        fresh.load_weights(tmp_path / "trained.weights.h5")
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"):
        keras.models.load_model(tmp_path / "fresh.keras")
    np.testing.assert_array_equal(fresh.get_weights()[0], trained.get_weights()[0])
    assert fresh.optimizer.snapshot().step == trained.optimizer.snapshot().step


def test_saved_model_of_a_trained_model_is_saved(tmp_path, enabled):
    model = compiled_model("adam")
    fit(model)
    tf.saved_model.save(model, str(tmp_path / "model"))
    loaded, x = tf.saved_model.load(str(tmp_path / "model")), small_data(1)[0].astype("float32")
    (output,) = loaded.signatures["serving_default"](tf.constant(x)).values()
    np.testing.assert_allclose(output, model(x), rtol=1e-3)


def test_loading_counters_of_another_model_raises_and_changes_nothing(enabled):
    model = compiled_model("adam")
    model.fit(*small_data(), verbose=0)
    store = {}
    model.optimizer.counters.save_own_variables(store)
    other = kmp.LossScaleOptimizer("adam")
    other.build([keras.Variable([1.0])])
    with pytest.raises(
        ValueError, match=r"'overflows_by_variable' has shape \(4,\) in the file, .*\(1,\): .*another model"
    ):
        other.counters.load_own_variables(store)
    assert other.snapshot().step == 0


@pytest.mark.parametrize("invalid_scale", [np.inf, 0.0, np.nan])
def test_invalid_scale_from_a_checkpoint_is_replaced_by_the_initial_scale(invalid_scale):
    optimizer, variable = kmp.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=8.0), keras.Variable([1.0])
    optimizer.build([variable])
    optimizer.dynamic_scale.assign(invalid_scale)
    assert optimizer.snapshot().loss_scale == 8.0
    optimizer.apply([ops.reshape(optimizer.scale_loss(1.0), [1])], [variable])
    np.testing.assert_array_equal(variable, [0.5])
    assert float(optimizer.dynamic_scale) == 8.0


def kmp_optimizer(scale=2.0**12):
    return kmp.LossScaleOptimizer(keras.optimizers.Nadam(), initial_scale=scale)


def keras_optimizer(scale=2.0**12):
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Nadam(), initial_scale=scale)


def transfer_by_weights(trained, fresh, path):
    trained.save_weights(path / "x.weights.h5")
    fresh.load_weights(path / "x.weights.h5")


def transfer_by_checkpoint(trained, fresh, path):
    written = tf.train.Checkpoint(model=trained, optimizer=trained.optimizer).write(str(path / "x"))
    tf.train.Checkpoint(model=fresh, optimizer=fresh.optimizer).read(written).expect_partial()


@pytest.mark.parametrize("transfer", [transfer_by_weights, transfer_by_checkpoint])
@pytest.mark.parametrize(
    ("make", "make_other"),
    [(keras_optimizer, kmp_optimizer), (kmp_optimizer, keras_optimizer), (kmp_optimizer, kmp_optimizer)],
)
def test_state_transfers_to_keras_class_and_back_without_a_warning(tmp_path, make, make_other, transfer):
    keras.config.set_dtype_policy("mixed_float16")
    trained, fresh = compiled_model(make()), compiled_model(make_other(2.0**3))
    fit(trained)
    fresh.optimizer.build(fresh.trainable_variables)
    transfer(trained, fresh, tmp_path)
    for old, new in zip(values(trained.optimizer.variables), values(fresh.optimizer.variables), strict=True):
        np.testing.assert_array_equal(old, new)
    assert float(fresh.optimizer.dynamic_scale) == 2.0**12
    assert int(fresh.optimizer.step_counter) == 20
    if make is make_other:
        old, new = (values(model.optimizer.counters.weights) for model in (trained, fresh))
        assert all(np.array_equal(*pair) for pair in zip(old, new, strict=True))
    fit(fresh)


def assert_inner_state_is_transferred(transfer, trained, fresh, path):
    fit(trained)
    fresh.optimizer.build(fresh.trainable_variables)
    transfer(trained, fresh, path)
    old, new = (optimizer_state(model.optimizer.inner_optimizer) for model in (trained, fresh))
    for pair in zip(old, new, strict=True):
        np.testing.assert_array_equal(*pair)


@pytest.mark.parametrize("transfer", [transfer_by_weights, transfer_by_checkpoint])
def test_unlisted_state_of_the_inner_optimizer_is_saved(tmp_path, enabled, transfer):
    trained, fresh = (compiled_model(keras.optimizers.Nadam(0.01)) for _ in range(2))
    assert_inner_state_is_transferred(transfer, trained, fresh, tmp_path)
    assert float(trained.optimizer.inner_optimizer._u_product.numpy()) < 0.5


def test_unlisted_state_of_another_optimizer_class_is_not_loaded(tmp_path, enabled):
    trained, fresh = compiled_model("adafactor"), compiled_model("nadam")
    fit(trained)
    store = {}
    trained.optimizer.inner_state.save_own_variables(store)
    fresh.optimizer.build(fresh.trainable_variables)
    fresh.optimizer.inner_state.load_own_variables(store)
    assert float(fresh.optimizer.inner_optimizer._u_product.numpy()) == 1.0


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="Keras 3.12 has none")
def test_unlisted_state_inside_a_multi_optimizer_is_saved(tmp_path, enabled):
    nadams = [keras.optimizers.Nadam(0.01) for _ in range(2)]

    def model_with(nadam):
        sgd = keras.optimizers.SGD(0.1)
        multi = keras.optimizers.MultiOptimizer(lambda variable: nadam if "kernel" in variable.path else sgd)
        return compiled_model(multi)

    assert_inner_state_is_transferred(transfer_by_weights, *map(model_with, nadams), tmp_path)
    products = [float(nadam._u_product.numpy()) for nadam in nadams]
    assert products[0] == products[1] < 0.5


def test_model_saved_with_keras_class_loads_with_kmp_class_under_enable(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    trained = compiled_model(keras_optimizer())
    fit(trained)
    trained.save(tmp_path / "stock.keras")
    assert type(keras.models.load_model(tmp_path / "stock.keras").optimizer) is keras.optimizers.LossScaleOptimizer
    with kmp.enable():
        loaded = keras.models.load_model(tmp_path / "stock.keras")
    assert type(loaded.optimizer) is kmp.LossScaleOptimizer
    for old, new in zip(values(trained.optimizer.variables), values(loaded.optimizer.variables), strict=True):
        np.testing.assert_array_equal(old, new)
    fit(loaded)
    assert loaded.optimizer.snapshot().step == 20


@pytest.mark.slow
def test_error_of_loading_without_kmp_names_the_import(tmp_path, enabled):
    model = compiled_model()
    model.save(tmp_path / "model.keras")
    code = f"import keras; keras.models.load_model({str(tmp_path / 'model.keras')!r})"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert "Could not locate class 'Softmax'" in process.stderr
    assert "'registered_name': 'kmp>Softmax'" in process.stderr
    process = subprocess.run([sys.executable, "-c", f"import kmp, {code[7:]}"], check=False)
    assert process.returncode == 0


@pytest.mark.parametrize("name", ["x.keras", "x.weights.h5"])
@pytest.mark.parametrize("length", [0, 100, 5000])
def test_truncated_file_is_an_error_and_stays_as_it_was(tmp_path, enabled, name, length):
    model, path = compiled_model("adam"), tmp_path / name
    fit(model)
    (model.save if name == "x.keras" else model.save_weights)(path)
    truncated = path.read_bytes()[:length]
    path.write_bytes(truncated)
    before = values(model.weights)
    with pytest.raises((OSError, ValueError), match=f"{path}|truncated file|file signature not found"):
        keras.models.load_model(path) if name == "x.keras" else model.load_weights(path)
    assert path.read_bytes() == truncated
    for old, new in zip(before, values(model.weights), strict=True):
        np.testing.assert_array_equal(old, new)


def test_deserialized_optimizer_keeps_the_settings(enabled):
    optimizer = kmp.LossScaleOptimizer("adam", initial_scale=64.0, hysteresis=3)
    copy = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(copy) is kmp.LossScaleOptimizer
    assert copy.rule == optimizer.rule
    model = small_model()
    model.compile(copy, "sparse_categorical_crossentropy")
    model.fit(*small_data(1), verbose=0)
    assert model.optimizer.snapshot().step == 1
