"""Saving and loading: with kmp's optimizer and Keras', and in a process without kmp."""

import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import (
    assert_equal,
    compiled_model,
    fit,
    optimizer_for,
    small_data,
    small_model,
    values,
)
from keras import ops

import kmp
from kmp.backend.keras_internals import optimizer_state

OURS, STOCK = kmp.LossScaleOptimizer, keras.optimizers.LossScaleOptimizer


def weights():
    return [keras.Variable(ops.ones((2, 3)), name="a"), keras.Variable(ops.ones((2,)), name="b")]


def test_loaded_model_has_the_scale_counters_and_moments(tmp_path, enabled):
    x, y = small_data(3)
    x[10] = np.nan
    model = compiled_model("adam", run_eagerly=True)
    model.fit(x, y, batch_size=8, verbose=0)
    model.optimizer.apply(
        [ops.full(v.shape, np.inf) for v in model.trainable_variables], model.trainable_variables
    )
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, kmp.LossScaleOptimizer)
    before, after = model.optimizer.snapshot(), loaded.optimizer.snapshot()
    assert (after.step, after.loss_scale, after.overflow_count) == (4, 2.0**14, 2)
    for name in ("overflows_by_variable", "overflow_origins_by_variable"):
        assert list(getattr(before, name).values()) == list(getattr(after, name).values()) != []
    assert_equal(model.optimizer.counters.weights, loaded.optimizer.counters.weights)
    assert_equal(model.optimizer.variables, loaded.optimizer.variables)


def test_compiled_but_untrained_models_save_and_load(tmp_path, enabled):
    trained, fresh = compiled_model("adam", run_eagerly=True), compiled_model("adam")
    fit(trained, batches=2)
    trained.save_weights(tmp_path / "trained.weights.h5")
    fresh.save(tmp_path / "fresh.keras")
    # Of Keras, about its variables.
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"):
        fresh.load_weights(tmp_path / "trained.weights.h5")
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"):
        keras.models.load_model(tmp_path / "fresh.keras")
    np.testing.assert_array_equal(fresh.get_weights()[0], trained.get_weights()[0])
    assert fresh.optimizer.snapshot().step == trained.optimizer.snapshot().step


def test_saved_model_of_a_trained_model_is_saved(tmp_path, enabled):
    model = compiled_model("adam")
    fit(model, batches=2)
    tf.saved_model.save(model, str(tmp_path / "model"))
    loaded, x = tf.saved_model.load(str(tmp_path / "model")), small_data(1)[0].astype("float32")
    (output,) = loaded.signatures["serving_default"](tf.constant(x)).values()
    np.testing.assert_allclose(output, model(x), rtol=1e-3)


def test_loading_counters_of_another_model_raises_and_changes_nothing():
    optimizer, store, other = optimizer_for(*weights()), {}, optimizer_for(keras.Variable([1.0]))
    optimizer.apply([ops.ones((2, 3)), ops.ones(2)], unscaled=False)
    optimizer.counters.save_own_variables(store)
    match = r"'by_variable' has shape \(2, 2\) in the file, .*\(2, 1\): .*another model"
    with pytest.raises(ValueError, match=match):
        other.counters.load_own_variables(store)
    assert other.snapshot().step == 0


def read_as_model(folder, _):
    return keras.models.load_model(folder / "model.keras").optimizer


def read_as_weights(folder, model):
    model.load_weights(folder / "model.weights.h5")
    return model.optimizer


def read_as_checkpoint(folder, model):
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    checkpoint.read(str(folder / "checkpoint")).expect_partial()
    return model.optimizer


@pytest.mark.parametrize("read", [read_as_model, read_as_weights, read_as_checkpoint])
def test_files_of_a_version_with_fewer_counters_load(read, enabled):
    # Four steps: one with a non-finite loss, and the last with Inf in all gradients.
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="dense")])
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    optimizer = read(Path(__file__).parent / "saved_by_0_2_0", model)
    snapshot = optimizer.snapshot()
    assert (snapshot.step, snapshot.loss_scale, snapshot.overflow_count) == (4, 2.0**9, 2)
    assert (snapshot.overflows_in_a_row, snapshot.nonfinite_loss_count) == (1, 1)
    assert snapshot.overflow_origin.endswith("dense/bias")
    assert list(snapshot.overflows_by_variable.values()) == [2, 2]
    counts = optimizer.counters.counts.numpy()
    assert counts.tolist() == [4, 2, 2, 1, 1, 0, 0, 2] + [0] * (counts.size - 8)


def test_file_of_a_version_with_more_counters_is_an_error_and_changes_nothing():
    optimizer, store = optimizer_for(keras.Variable([1.0])), {}
    optimizer.counters.save_own_variables(store)
    store["counts"] = np.arange(50)
    with pytest.raises(ValueError, match="'counts' has 50 elements in the file.*newer version"):
        optimizer.counters.load_own_variables(store)
    assert optimizer.snapshot().step == 0


def test_invalid_scale_from_a_checkpoint_is_replaced_by_the_initial_scale():
    variable = keras.Variable([1.0])
    optimizer = optimizer_for(variable, initial_scale=8.0)
    optimizer.dynamic_scale.assign(np.nan)
    assert optimizer.snapshot().loss_scale == 8.0
    optimizer.apply([ops.reshape(optimizer.scale_loss(1.0), [1])], [variable])
    np.testing.assert_array_equal(variable, [0.0])
    assert float(optimizer.dynamic_scale) == 8.0


@pytest.mark.parametrize(
    ("loaded", "bounded"),
    [
        (np.inf, 8.0),
        (0.0, 8.0),
        (np.nan, 8.0),
        (-1.0, 8.0),
        (64.0, 32.0),
        (1.0, 2.0),
        (4.0, 4.0),
    ],
)
def test_loaded_scale_is_clipped_to_the_bounds(loaded, bounded):
    bounds = {"initial_scale": 8.0, "min_scale": 2.0, "max_scale": 32.0}
    for settings, expected in ((bounds, bounded), ({"loss_scale": 16.0}, 16.0)):
        optimizer = kmp.LossScaleOptimizer("sgd", **settings)
        optimizer.dynamic_scale.assign(loaded)
        assert float(optimizer.loss_scale) == expected


def transfer_by_weights(trained, fresh, path):
    trained.save_weights(path / "x.weights.h5")
    fresh.load_weights(path / "x.weights.h5")


def transfer_by_checkpoint(trained, fresh, path):
    written = tf.train.Checkpoint(model=trained, optimizer=trained.optimizer).write(str(path / "x"))
    tf.train.Checkpoint(model=fresh, optimizer=fresh.optimizer).read(written).expect_partial()


@pytest.mark.parametrize(
    ("trained_class", "fresh_class"), [(STOCK, OURS), (OURS, STOCK), (OURS, OURS)]
)
def test_state_transfers_to_keras_class_and_back_without_a_warning(
    tmp_path, trained_class, fresh_class
):
    keras.config.set_dtype_policy("mixed_float16")
    trained = compiled_model(
        trained_class(keras.optimizers.Nadam(0.01), initial_scale=2.0**12), run_eagerly=True
    )
    fit(trained, batches=3)
    if trained_class is OURS:
        trained.optimizer.counters.by_variable.assign(np.arange(8).reshape(2, 4))
    for transfer in (transfer_by_weights, transfer_by_checkpoint):
        fresh = compiled_model(
            fresh_class(keras.optimizers.Nadam(0.01), initial_scale=2.0**3), run_eagerly=True
        )
        fresh.optimizer.build(fresh.trainable_variables)
        transfer(trained, fresh, tmp_path)
        assert_equal(fresh.optimizer.variables, trained.optimizer.variables)
        assert (float(fresh.optimizer.dynamic_scale), int(fresh.optimizer.step_counter)) == (
            2.0**12,
            3,
        )
        if trained_class is fresh_class:
            assert_equal(fresh.optimizer.counters.weights, trained.optimizer.counters.weights)
            # Nadam's product of momenta is in no list of Keras.
            assert_equal(
                *(optimizer_state(model.optimizer.inner_optimizer) for model in (fresh, trained))
            )
            assert float(fresh.optimizer.inner_optimizer._u_product.numpy()) < 0.5
        fit(fresh, batches=1)


def adam_with_a_schedule():
    return keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 100))


def plain_model(optimizer):
    """A model whose layers may compute in float16, with an optimizer that is not wrapped."""
    model = compiled_model(optimizer, run_eagerly=True, auto_scale_loss=False)
    assert model.optimizer is optimizer
    model.optimizer.build(model.trainable_variables)
    return model


def wrapped_model(optimizer):
    model = compiled_model(OURS(optimizer), run_eagerly=True)
    model.optimizer.build(model.trainable_variables)
    return model


def plain_state(model):
    return values(optimizer_state(getattr(model.optimizer, "inner_optimizer", model.optimizer)))


@pytest.mark.parametrize(
    "make",
    [
        adam_with_a_schedule,
        lambda: keras.optimizers.SGD(0.1, momentum=0.5),
        lambda: keras.optimizers.Nadam(0.1),
        lambda: keras.optimizers.Adafactor(0.1),
    ],
    ids=["adam", "sgd", "nadam", "adafactor"],
)
def test_state_of_a_float32_run_goes_on_under_enable(tmp_path, make):
    trained = plain_model(make())
    fit(trained, batches=3)
    trained.save_weights(tmp_path / "x.weights.h5")
    with kmp.enable():
        fresh = wrapped_model(make())
    for _ in range(2):  # the second time, as the first
        fresh.load_weights(tmp_path / "x.weights.h5")
    assert_equal(plain_state(fresh), plain_state(trained))
    assert int(fresh.optimizer.iterations) == 3
    assert float(fresh.optimizer.learning_rate) == float(trained.optimizer.learning_rate)
    fit(fresh, batches=1)
    assert fresh.optimizer.snapshot().overflow_count == 0


@pytest.mark.parametrize(
    ("wrapper", "make", "file"),
    [
        (OURS, adam_with_a_schedule, "x.weights.h5"),
        (OURS, lambda: keras.optimizers.SGD(0.1), "x.keras"),
        (STOCK, adam_with_a_schedule, "x.keras"),
        (STOCK, lambda: keras.optimizers.SGD(0.1), "x.weights.h5"),
    ],
)
def test_state_of_a_float16_run_goes_on_in_float32(tmp_path, wrapper, make, file):
    keras.config.set_dtype_policy("mixed_float16")
    trained = compiled_model(wrapper(make()), run_eagerly=True)
    fit(trained, batches=3)
    if file == "x.keras":
        trained.save(tmp_path / file)
    else:
        trained.save_weights(tmp_path / file)
    with kmp.enable("float32"):
        fresh = plain_model(make())
        fresh.load_weights(tmp_path / file)
    assert_equal(plain_state(fresh), plain_state(trained))
    assert int(fresh.optimizer.iterations) == 3


def test_file_of_a_model_with_a_plain_optimizer_loads_with_its_state(tmp_path, enabled):
    trained = plain_model(adam_with_a_schedule())
    trained.optimizer.apply([ops.ones(each.shape) for each in trained.trainable_variables])
    trained.save(tmp_path / "x.keras")
    loaded = keras.models.load_model(tmp_path / "x.keras")
    assert isinstance(loaded.optimizer, OURS)
    assert_equal(plain_state(loaded), plain_state(trained))


def test_file_of_another_optimizer_is_not_loaded(tmp_path, enabled):
    trained = plain_model(keras.optimizers.SGD(0.1, momentum=0.5))
    trained.save_weights(tmp_path / "x.weights.h5")
    fresh = wrapped_model(keras.optimizers.Adam(0.1))
    before = plain_state(fresh)
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"):
        fresh.load_weights(tmp_path / "x.weights.h5")
    assert_equal(plain_state(fresh), before)


class Scale(keras.layers.Layer):
    """Has one weight, a scalar, as the variables of a wrapper."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        return x * self.scale


def scalars(optimizer, layers=4):
    model = keras.Sequential([keras.Input((2,)), *(Scale() for _ in range(layers))])
    model.compile(optimizer, "mse", auto_scale_loss=False)
    model.optimizer.build(model.trainable_variables)
    return model


def with_momentum():
    return keras.optimizers.SGD(0.1, momentum=0.5)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        # Four variables more, as many as a wrapper has of its own.
        (with_momentum, lambda: keras.optimizers.SGD(0.1)),
        # The same number as the inner optimizer.
        (lambda: STOCK(with_momentum()), lambda: OURS(keras.optimizers.Adam(0.1))),
    ],
    ids=["plain", "wrapped"],
)
def test_file_of_another_optimizer_with_variables_of_the_same_shapes_is_not_loaded(
    saved, loaded, tmp_path, enabled
):
    scalars(saved()).save_weights(tmp_path / "x.weights.h5")
    fresh = scalars(loaded())
    before = values(fresh.optimizer.variables)
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"):
        fresh.load_weights(tmp_path / "x.weights.h5")
    assert_equal(values(fresh.optimizer.variables), before)


def checkpoint_of(model, parts=("model", "optimizer")):
    objects = {"model": model, "optimizer": model.optimizer}
    return tf.train.Checkpoint(**{part: objects[part] for part in parts})


def trained_with(wrap, make, steps=3):
    """A model whose optimizer has state, and is or is not in a wrapper."""
    model = compiled_model(wrap(make()), run_eagerly=True, auto_scale_loss=False)
    model.optimizer.build(model.trainable_variables)
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    for _ in range(steps):
        inner.apply([ops.ones(each.shape) for each in model.trainable_variables])
    return model


def unwrapped(optimizer):
    return optimizer


# What is in a checkpoint, and both wrappers.
WRAPPERS_AND_PARTS = [
    (OURS, ("model",)),
    (OURS, ("optimizer",)),
    (STOCK, ("model", "optimizer")),
]
NUMBERED = [adam_with_a_schedule, lambda: keras.optimizers.Nadam(0.1)]


@pytest.mark.parametrize(("wrapper", "parts"), WRAPPERS_AND_PARTS)
def test_checkpoint_of_a_plain_optimizer_goes_on_in_a_wrapped_one(
    tmp_path, enabled, wrapper, parts
):
    trained = trained_with(unwrapped, adam_with_a_schedule)
    path = checkpoint_of(trained, parts).save(str(tmp_path / "x"))
    optimizer = wrapper(adam_with_a_schedule(), initial_scale=64.0)
    fresh = compiled_model(optimizer, run_eagerly=True)
    optimizer.build(fresh.trainable_variables)
    status = checkpoint_of(fresh, parts).restore(path).assert_nontrivial_match()
    assert_equal(plain_state(fresh), plain_state(trained))
    assert (float(optimizer.dynamic_scale), int(optimizer.iterations)) == (64.0, 3)
    # The checkpoint has no loss scale.
    with pytest.raises(AssertionError, match="not bound to checkpointed values"):
        status.assert_consumed()
    fit(fresh, batches=1)
    assert int(optimizer.iterations) == 4


@pytest.mark.parametrize(("wrapper", "parts"), WRAPPERS_AND_PARTS)
def test_checkpoint_of_a_wrapped_optimizer_goes_on_in_a_plain_one(tmp_path, wrapper, parts):
    trained = trained_with(wrapper, adam_with_a_schedule)
    path = checkpoint_of(trained, parts).save(str(tmp_path / "x"))
    with kmp.enable("float32"):
        fresh = plain_model(adam_with_a_schedule())
        status = checkpoint_of(fresh, parts).restore(path).assert_existing_objects_matched()
    assert_equal(plain_state(fresh), plain_state(trained))
    with pytest.raises(AssertionError, match="Unresolved object in checkpoint.*optimizer"):
        status.assert_consumed()  # the loss scale
    status.expect_partial()
    fit(fresh, batches=1)
    assert int(fresh.optimizer.iterations) == 4


@pytest.mark.parametrize("make", NUMBERED, ids=["adam", "nadam"])
@pytest.mark.parametrize(("before", "after"), [(unwrapped, OURS), (OURS, unwrapped)])
def test_checkpoint_waits_for_an_optimizer_that_is_created_later(
    tmp_path, enabled, before, after, make
):
    trained = trained_with(before, make)
    path = checkpoint_of(trained, ["model"]).write(str(tmp_path / "x"))
    fresh = small_model()
    status = tf.train.Checkpoint(model=fresh).read(path)
    fresh.compile(after(make()), "mse", auto_scale_loss=False)
    fresh.optimizer.build(fresh.trainable_variables)
    assert_equal(plain_state(fresh), plain_state(trained))
    status.expect_partial()


def test_manager_goes_on_with_the_checkpoints_of_a_plain_optimizer(tmp_path, enabled):
    def manager(model):
        return tf.train.CheckpointManager(checkpoint_of(model), str(tmp_path), max_to_keep=2)

    trained = trained_with(unwrapped, adam_with_a_schedule)
    manager(trained).save()
    fresh = wrapped_model(adam_with_a_schedule())
    in_16_bits = manager(fresh)
    assert in_16_bits.restore_or_initialize().endswith("ckpt-1")
    assert_equal(plain_state(fresh), plain_state(trained))
    fit(fresh, batches=1)
    assert in_16_bits.save().endswith("ckpt-2")
    last = wrapped_model(adam_with_a_schedule())
    checkpoint_of(last).restore(in_16_bits.latest_checkpoint).assert_consumed()
    assert_equal(last.optimizer.variables, fresh.optimizer.variables)
    assert last.optimizer.snapshot().step == 1


@pytest.mark.parametrize(
    ("before", "after", "cure"),
    [(unwrapped, OURS, r"`kmp\.wrap\(optimizer\)`"), (OURS, unwrapped, "`inner_optimizer`")],
)
def test_checkpoint_with_other_variables_is_an_error_that_says_what_to_write(
    tmp_path, enabled, before, after, cure
):
    def adafactor():
        return keras.optimizers.Adafactor(0.1)

    path = checkpoint_of(trained_with(before, adafactor)).write(str(tmp_path / "x"))
    fresh = trained_with(after, adafactor, steps=1)
    state, kernels = plain_state(fresh), fresh.get_weights()
    with pytest.raises(ValueError, match=f"has .* variables of a .* optimizer.*{cure}"):
        checkpoint_of(fresh).read(path)
    assert_equal(plain_state(fresh), state)
    assert_equal(fresh.get_weights(), kernels)


@pytest.mark.parametrize(("before", "after"), [(unwrapped, OURS), (OURS, unwrapped)])
def test_checkpoint_whose_root_is_an_optimizer_that_is_wrapped_otherwise_is_an_error(
    tmp_path, enabled, before, after
):
    trained, fresh = (trained_with(wrap, adam_with_a_schedule) for wrap in (before, after))
    path = tf.train.Checkpoint(trained.optimizer).save(str(tmp_path / "x"))
    with pytest.raises(ValueError, match=r"`tf\.train\.Checkpoint\(optimizer=optimizer\)`"):
        tf.train.Checkpoint(fresh.optimizer).restore(path)


def test_missing_checkpoint_is_the_error_of_tensorflow(tmp_path, enabled):
    checkpoint = tf.train.Checkpoint(optimizer=wrapped_model(adam_with_a_schedule()).optimizer)
    with pytest.raises(tf.errors.NotFoundError):
        checkpoint.read(str(tmp_path / "missing"))


def test_unlisted_state_of_another_optimizer_class_is_not_loaded():
    saved = optimizer_for(*weights(), inner=keras.optimizers.Adafactor(0.01))
    loaded = optimizer_for(*weights(), inner=keras.optimizers.Nadam(0.01))
    store = {}
    saved.inner_state.save_own_variables(store)
    assert store
    loaded.inner_state.load_own_variables(store)
    assert float(loaded.inner_optimizer._u_product.numpy()) == 1.0


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="Keras 3.12 has none")
def test_unlisted_state_inside_a_multi_optimizer_is_saved(tmp_path, enabled):
    nadams = [keras.optimizers.Nadam(0.01) for _ in range(2)]

    def model_with(nadam):
        sgd = keras.optimizers.SGD(0.1)
        multi = keras.optimizers.MultiOptimizer(
            lambda variable: nadam if "kernel" in variable.path else sgd
        )
        return compiled_model(multi, run_eagerly=True)

    trained, fresh = map(model_with, nadams)
    fit(trained, batches=3)
    fresh.optimizer.build(fresh.trainable_variables)
    transfer_by_weights(trained, fresh, tmp_path)
    assert_equal(*(optimizer_state(model.optimizer.inner_optimizer) for model in (fresh, trained)))
    products = [float(nadam._u_product.numpy()) for nadam in nadams]
    assert products[0] == products[1] < 0.5


def test_model_saved_with_keras_class_loads_with_kmp_class_under_enable(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    trained = compiled_model(
        STOCK(keras.optimizers.Nadam(), initial_scale=2.0**12), run_eagerly=True
    )
    fit(trained, batches=2)
    trained.save(tmp_path / "stock.keras")
    assert type(keras.models.load_model(tmp_path / "stock.keras").optimizer) is STOCK
    with kmp.enable():
        loaded = keras.models.load_model(tmp_path / "stock.keras")
    assert type(loaded.optimizer) is kmp.LossScaleOptimizer
    assert_equal(trained.optimizer.variables, loaded.optimizer.variables)
    fit(loaded, batches=1)
    assert loaded.optimizer.snapshot().step == 1


@pytest.mark.slow
def test_error_of_loading_without_kmp_names_the_import(tmp_path, enabled):
    model = compiled_model()
    model.save(tmp_path / "model.keras")
    code = f"import keras; keras.models.load_model({str(tmp_path / 'model.keras')!r})"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert process.returncode == 1
    assert "Could not locate class 'Softmax'" in process.stderr
    assert "'registered_name': 'kmp>Softmax'" in process.stderr
    process = subprocess.run([sys.executable, "-c", f"import kmp, {code[7:]}"], check=False)
    assert process.returncode == 0


WITHOUT_KMP = """
import sys, warnings
import keras, numpy as np, tensorflow as tf
LossScaleOptimizer = keras.optimizers.LossScaleOptimizer
warnings.simplefilter("error")

def model_with(optimizer):
    layers = keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(optimizer, "mse", auto_scale_loss=False)
    model.optimizer.build(model.trainable_variables)
    return model

def assert_loaded(model, name="adam"):
    for weight, saved in zip(model.get_weights(), np.load(name + ".npz").values(), strict=True):
        np.testing.assert_array_equal(weight, saved)

def load(wrap, optimizer):
    model = model_with(wrap(keras.optimizers.get(optimizer)))
    model.load_weights("adam.weights.h5")
    assert_loaded(model)
    return model.optimizer

def restore(wrap, optimizer):
    model = model_with(wrap(keras.optimizers.get(optimizer)))
    tf.train.Checkpoint(model=model).read(optimizer).expect_partial()
    assert_loaded(model, optimizer)
    return model.optimizer

def plain(optimizer):
    return optimizer

assert_loaded(keras.models.load_model("adam.keras", compile=False))
for read in load, restore:
    wrapped = read(LossScaleOptimizer, "adam")
    assert (float(wrapped.dynamic_scale), int(wrapped.iterations)) == (64.0, 2)
    assert all(np.any(wrapped.inner_optimizer.variables[index]) for index in (2, 3))
assert float(restore(plain, "sgd").learning_rate) == 0.0
unscaled = model_with("adam")
tf.train.Checkpoint(model=unscaled).read("unscaled").expect_partial()
assert float(unscaled.optimizer.learning_rate) == 0.25
assert int(unscaled.optimizer.iterations) == 2
warnings.simplefilter("ignore")
assert int(load(plain, "adam").iterations) == 0
for read, error in (
    (lambda: keras.models.load_model("adam.keras"), "Could not locate class 'LossScaleOptimizer'"),
    (lambda: restore(plain, "adam"), "expected dtype float does not equal original dtype int64"),
):
    try:
        read()
    except Exception as raised:
        assert error in str(raised), raised
    else:
        raise AssertionError(error)
assert "kmp" not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "float32"])
def test_what_keras_alone_loads_is_what_the_guide_says(tmp_path, policy):
    for name in ("adam", "sgd"):
        with kmp.enable(policy):
            layers = keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)
            model = keras.Sequential([keras.Input((3,)), *layers])
            model.compile(OURS(name, initial_scale=64.0), "mse", run_eagerly=True)
            keras.utils.set_random_seed(0)
            model.set_weights([np.random.normal(size=each.shape) for each in model.weights])
            x = np.random.default_rng(0).normal(size=(8, 3))
            model.fit(x, x[:, :1], batch_size=4, verbose=0)
        model.save(tmp_path / f"{name}.keras")
        model.save_weights(tmp_path / f"{name}.weights.h5")
        tf.train.Checkpoint(model=model).write(str(tmp_path / name))
        np.savez(tmp_path / f"{name}.npz", *model.get_weights())
    unscaled = OURS(keras.optimizers.Adam(0.25), loss_scale=1.0)
    model.compile(unscaled, "mse", run_eagerly=True)
    unscaled.build(model.trainable_variables)
    unscaled.inner_optimizer.iterations.assign(2)
    tf.train.Checkpoint(model=model).write(str(tmp_path / "unscaled"))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_KMP],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]

    with kmp.enable("float32"):
        fresh = keras.models.clone_model(model)
        fresh.compile("sgd", "mse", auto_scale_loss=False)
        fresh.optimizer.build(fresh.trainable_variables)
        tf.train.Checkpoint(model=fresh).read(str(tmp_path / "sgd")).expect_partial()
    assert float(fresh.optimizer.learning_rate) == pytest.approx(0.01)
    assert int(fresh.optimizer.iterations) == 2


def test_truncated_file_is_an_error_and_stays_as_it_was(tmp_path, enabled):
    model, path, weights_path = (
        compiled_model("adam"),
        tmp_path / "x.keras",
        tmp_path / "x.weights.h5",
    )
    model.optimizer.build(model.trainable_variables)
    model.save(path)
    model.save_weights(weights_path)
    before = values(model.weights)
    for file, load in ((path, keras.models.load_model), (weights_path, model.load_weights)):
        for length in (5000, 100, 0):
            truncated = file.read_bytes()[:length]
            file.write_bytes(truncated)
            with pytest.raises(
                (OSError, ValueError), match=f"{file}|truncated file|file signature not found"
            ):
                load(file)
            assert file.read_bytes() == truncated
            assert_equal(model.weights, before)
