"""Under `enable`, `compile` wraps the optimizer in every policy."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MODES, assert_equal, compiled_model, fit, fit_data, small_data, values
from packaging.version import Version

import kmp
from kmp.scaling import DynamicScale, FixedScale

NO_SCALE = FixedScale(1.0)
WITHOUT_FLOAT16 = ("float32", "mixed_bfloat16")


@pytest.mark.parametrize("policy", [*WITHOUT_FLOAT16, "mixed_float16", "float16"])
def test_compile_wraps_the_optimizer_with_the_scale_that_the_model_needs(policy):
    expected = DynamicScale(growth_interval=7) if "float16" in policy.split("_") else NO_SCALE
    with kmp.enable(policy, growth_interval=7):
        model = compiled_model("adam")
        assert (model.optimizer.rule, model.optimizer.settings_call) == (expected, "kmp.enable")
        assert (
            type(compiled_model("adam", auto_scale_loss=False).optimizer) is keras.optimizers.Adam
        )
        assert kmp.wrap("adam").rule == expected  # of a custom loop


def test_scale_is_that_of_the_model_and_not_of_the_policy():
    with kmp.enable("mixed_float16"):
        in_float16 = keras.models.clone_model(compiled_model())
    with kmp.enable("float32", initial_scale=8.0):
        in_float16.compile("sgd", "mse")
        assert in_float16.optimizer.rule == DynamicScale(initial_scale=8.0)


@pytest.mark.parametrize(
    ("of_model", "enabled", "rule"),
    [("mixed_float16", "float32", DynamicScale()), ("float32", "mixed_float16", NO_SCALE)],
)
def test_scale_in_place_of_that_of_keras_is_that_of_the_model(of_model, enabled, rule):
    keras.config.set_dtype_policy(of_model)
    model = compiled_model()
    with kmp.enable(enabled):
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "mse")
    assert model.optimizer.rule == rule


def test_optimizer_of_another_model_is_the_error_of_keras():
    shared = keras.optimizers.SGD()
    with kmp.enable("float32"):
        fit(compiled_model(shared), batches=1)
        with pytest.raises(ValueError, match=r"\AUnknown variable: "):
            fit(compiled_model(shared), batches=1)


def test_wrapped_optimizer_follows_the_model_that_it_is_compiled_with():
    for policy, rule in (("mixed_bfloat16", NO_SCALE), ("mixed_float16", DynamicScale())):
        keras.config.set_dtype_policy(policy)
        optimizer = kmp.wrap("sgd")
        model = compiled_model(optimizer)
        assert model.optimizer is optimizer
        assert (optimizer.rule, float(optimizer.loss_scale)) == (rule, rule.initial_scale)
        assert fit(model, batches=1)["loss"]
    with_settings = kmp.wrap("sgd", initial_scale=2.0)
    keras.config.set_dtype_policy("float32")
    assert compiled_model(with_settings).optimizer.rule == DynamicScale(initial_scale=2.0)
    fixed = kmp.wrap(keras.optimizers.SGD(loss_scale_factor=16.0))
    assert compiled_model(fixed).optimizer.rule == FixedScale(16.0)


def test_model_that_computes_in_float16_later_gets_a_scale_in_its_next_compile():
    with kmp.enable("float32", initial_scale=8.0):
        model = compiled_model(run_eagerly=True)
        fit(model, batches=2)
        model.layers[0].dtype_policy = "mixed_float16"
        model.compile(model.optimizer, "sparse_categorical_crossentropy")
        fit(model, batches=1)
    assert float(model.optimizer.loss_scale) == 8.0
    assert int(model.optimizer.iterations) == 3


def test_loss_scale_factor_of_the_optimizer_is_kept_in_float32():
    with kmp.enable("float32"):
        model = compiled_model(keras.optimizers.SGD(loss_scale_factor=16.0))
        model.compile(model.optimizer, "sparse_categorical_crossentropy")
    assert model.optimizer.rule == FixedScale(16.0)


@pytest.mark.parametrize(
    ("policy", "mode"), [("float32", "eager"), ("mixed_bfloat16", "graph"), ("float32", "xla")]
)
def test_trains_bit_for_bit_as_the_plain_optimizer(policy, mode):
    trained = []
    for scales in (True, False):
        keras.utils.set_random_seed(0)
        with kmp.enable(policy):
            optimizer = keras.optimizers.Adam(0.01, global_clipnorm=1.0)
            model = compiled_model(optimizer, auto_scale_loss=scales, **MODES[mode])
            fit(model, batches=5, shuffle=False)
        trained.append(values([*model.trainable_variables, *optimizer.variables]))
    if mode == "xla" and Version(tf.__version__) >= Version("2.22.0rc0"):
        # XLA rounds a product and a sum once (FMA) if both are in one fusion. From here on, what
        # selects between an update and no update changes the fusions.
        for one, other in zip(*trained, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    else:
        assert_equal(*trained)


@pytest.mark.parametrize(
    ("policy", "mode"), [("float32", "eager"), ("mixed_bfloat16", "graph"), ("float32", "xla")]
)
def test_batch_with_nan_is_skipped_and_counted_and_harms_nothing(policy, mode):
    x, y = small_data(4)
    x[12] = np.nan
    with kmp.enable(policy):
        model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization()])
        model.add(keras.layers.Dense(2, activation="softmax", dtype="float32"))
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"], **MODES[mode])
    logger = kmp.callbacks.OverflowCounter()
    history = fit_data(model, (x, y), [logger])
    assert history["overflow_count"] == [1]
    assert np.isfinite(history["loss"] + history["accuracy"]).all()
    assert all(np.isfinite(value).all() for value in values(model.weights))
    assert model.optimizer.snapshot().nonfinite_loss_count == 1


def test_no_gradient_is_the_error_of_keras():
    variable = keras.Variable([1.0])
    with kmp.enable("float32"), pytest.raises(ValueError, match=r"\ANo gradients provided"):
        kmp.wrap("sgd").apply([None], [variable])


class WithoutScaling(keras.Sequential):
    """A model whose training step is written without `scale_loss`."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


def test_records_of_a_step_that_scales_no_loss_have_no_loss():
    with kmp.enable("float32"):
        model = WithoutScaling([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    counter = kmp.callbacks.OverflowCounter()
    fit(model, [counter], batches=2)
    assert counter.run.last("overflow_count") == 0
    assert not counter.run.series("last_loss")[1].size


@pytest.mark.parametrize("name", ["Nadam", "Adafactor"])
def test_file_has_the_plain_optimizer_and_loads_with_and_without_enable(name, tmp_path):
    files = tmp_path / "model.keras", tmp_path / "model.weights.h5"

    def new_model():
        return compiled_model(getattr(keras.optimizers, name)(0.01), run_eagerly=True)

    def loaded_models():
        model = new_model()
        model.optimizer.build(model.trainable_variables)
        model.load_weights(files[1])
        return [keras.models.load_model(files[0]), model]

    for policy_of_file, policy in (("float32", None), (None, "float32"), ("float32", "float32")):
        kmp.disable()
        if policy_of_file:
            kmp.enable(policy_of_file)
        saved = new_model()
        fit(saved, batches=2)
        saved.save(files[0])
        saved.save_weights(files[1])
        kmp.disable()
        if policy:
            kmp.enable(policy)
        for loaded in loaded_models():
            optimizer, is_wrapped = loaded.optimizer, bool(policy)
            assert isinstance(optimizer, kmp.LossScaleOptimizer) is is_wrapped
            plain = optimizer.inner_optimizer if is_wrapped else optimizer
            expected = getattr(saved.optimizer, "inner_optimizer", saved.optimizer)
            assert type(plain) is getattr(keras.optimizers, name)
            assert_equal(values(expected.variables), values(plain.variables))
            assert_equal(values(saved.weights), values(loaded.weights))


def test_file_has_the_state_of_the_optimizer_once(tmp_path):
    sizes = []
    for scales in (True, False):
        with kmp.enable("float32"):
            layer = keras.layers.Dense(300)
            model = keras.Sequential([keras.Input((300,)), layer])
            model.compile("adam", "mse", auto_scale_loss=scales)
            model.optimizer.build(model.trainable_variables)
        model.save(tmp_path / "model.keras")
        sizes.append((tmp_path / "model.keras").stat().st_size)
    watched, plain = sizes
    assert watched < plain + 20_000  # the kernel has 360,000 bytes


@pytest.mark.filterwarnings("ignore:.*HDF5")
def test_old_h5_file_has_the_plain_optimizer(tmp_path):
    with kmp.enable("float32"):
        model = compiled_model(keras.optimizers.Adam(0.25), run_eagerly=True)
        fit(model, batches=2)
        model.save(tmp_path / "model.h5")
    assert isinstance(model.optimizer, kmp.LossScaleOptimizer)
    loaded = keras.models.load_model(tmp_path / "model.h5").optimizer
    assert type(loaded) is keras.optimizers.Adam
    assert (float(loaded.learning_rate), int(loaded.iterations)) == (0.25, 2)


def model_of_checkpoint(optimizer="adam", **arguments):
    model = compiled_model(optimizer, run_eagerly=True, **arguments)
    model.optimizer.build(model.trainable_variables)
    return model


def inner_state(model):
    return values(getattr(model.optimizer, "inner_optimizer", model.optimizer).variables)


@pytest.mark.parametrize("is_root", [False, True])
def test_checkpoint_has_the_plain_optimizer_and_the_counters(is_root, tmp_path):
    def checkpoint_of(model):
        optimizer = model.optimizer
        return (
            tf.train.Checkpoint(optimizer) if is_root else tf.train.Checkpoint(optimizer=optimizer)
        )

    with kmp.enable("mixed_bfloat16"):
        saved = model_of_checkpoint()
        fit(saved, batches=2)
        path = checkpoint_of(saved).save(str(tmp_path / "x"))
        assert not [name for name, _ in tf.train.list_variables(path) if "inner_optim" in name]
        watched = model_of_checkpoint(keras.optimizers.Adam(0.5))
        plain = model_of_checkpoint(keras.optimizers.Adam(0.5), auto_scale_loss=False)
        for model in (watched, plain):
            checkpoint = checkpoint_of(model)
            checkpoint.restore(path).assert_existing_objects_matched()
            assert_equal(inner_state(saved), inner_state(model))
            assert int(checkpoint.save_counter) == 1
        assert watched.optimizer.snapshot().step == 2


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_checkpoint_of_a_model_takes_the_optimizer_that_compile_got(policy, tmp_path):
    def checkpoint():
        optimizer = keras.optimizers.Adam(0.5)
        model = model_of_checkpoint(optimizer)
        assert model.optimizer.inner_optimizer is optimizer
        return model, tf.train.Checkpoint(model, optimizer=optimizer)

    with kmp.enable(policy):
        saved, written = checkpoint()
        fit(saved, batches=2)
        path = written.save(str(tmp_path / "x"))
        fresh, read = checkpoint()
        read.restore(path).assert_existing_objects_matched()
        other = keras.optimizers.Adam()
        with pytest.raises(ValueError, match="optimizer already exists"):
            tf.train.Checkpoint(fresh, optimizer=other)
    assert_equal(values(saved.weights), values(fresh.weights))
    assert_equal(inner_state(saved), inner_state(fresh))
    assert fresh.optimizer.snapshot().step == 2
    if policy == "float32":  # such a checkpoint is that of a plain run
        optimizer = keras.optimizers.Adam(0.5)
        plain = model_of_checkpoint(optimizer, auto_scale_loss=False)
        tf.train.Checkpoint(plain, optimizer=optimizer).read(path).expect_partial()
        assert_equal(inner_state(saved), inner_state(plain))


@pytest.mark.parametrize("is_built_later", [False, True])
@pytest.mark.parametrize(
    "policies", [("mixed_bfloat16", "mixed_float16"), ("mixed_float16", "float32")]
)
def test_checkpoint_goes_on_in_another_policy_with_the_scale_of_that(
    policies, is_built_later, tmp_path
):
    with kmp.enable(policies[0]):
        saved = model_of_checkpoint("adam")
        path = str(tmp_path / "x")
        for variable in saved.optimizer.inner_optimizer.variables:
            variable.assign(np.full(variable.shape, 3))
        tf.train.Checkpoint(optimizer=saved.optimizer).write(path)
    with kmp.enable(policies[1]):
        model = compiled_model("adam")
        if not is_built_later:
            model.optimizer.build(model.trainable_variables)
        tf.train.Checkpoint(optimizer=model.optimizer).read(path).expect_partial()
        model.optimizer.build(model.trainable_variables)
    assert float(model.optimizer.loss_scale) == model.optimizer.rule.initial_scale
    assert all((value == 3).all() for value in inner_state(model))
