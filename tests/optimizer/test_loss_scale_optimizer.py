import dataclasses
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import optimizer_for, values
from keras import ops
from reference import ReferenceRule

import kmp

# Most tests here pass gradients to `apply` without calling `scale_loss`.
pytestmark = pytest.mark.filterwarnings("ignore:.*did not go through `scale_loss`")


GOOD, OVERFLOW, NAN = 1.0, np.inf, np.nan


def weights():
    return [
        keras.Variable(np.arange(6, dtype="float32").reshape(2, 3) / 8 + 0.25, name="a"),
        keras.Variable([1.0, -2.0]),
    ]


def test_optimizer_follows_the_reference_rule():
    arguments = {
        "initial_scale": 8.0,
        "min_scale": 2.0,
        "max_scale": 32.0,
        "growth_interval": 2,
        "hysteresis": 2,
    }
    variables, reference = weights(), ReferenceRule(**arguments)
    optimizer = optimizer_for(*variables, **arguments)
    for element in np.random.default_rng(0).choice([GOOD, OVERFLOW, NAN], 40, p=[0.5, 0.25, 0.25]):
        optimizer.apply(
            [ops.full((2, 3), 0.5), tf.constant([0.25, element], tf.float32)],
            variables,
            unscaled=False,
        )
        now = optimizer.snapshot()
        assert (now.loss_scale, now.clean_steps, now.overflows_in_a_row) == reference.step(
            element != GOOD
        )


def test_step_is_the_same_in_eager_graph_and_xla_mode(run_step):
    variables = weights()
    optimizer = optimizer_for(*variables, inner=keras.optimizers.Adam(0.1), growth_interval=2)

    @run_step
    def step(element):
        optimizer.apply(
            [ops.full((2, 3), 0.5) * optimizer.dynamic_scale, ops.stack([element, 0.0])],
            variables,
            unscaled=False,
        )

    for element in (GOOD, OVERFLOW, GOOD, GOOD, NAN):
        step(tf.constant(element, tf.float32))
    assert optimizer.snapshot() == kmp.records.Snapshot(
        step=5,
        loss_scale=2.0**14,
        clean_steps=0,
        overflow_count=2,
        overflows_in_a_row=1,
        overflow_origin=variables[1].path,
        nonfinite_loss_count=0,
        overflows_by_variable={variables[1].path: 2},
        overflow_origins_by_variable={variables[1].path: 2},
    )
    assert all(np.isfinite(value).all() for value in values(variables))


CLIPS = {
    "by value": lambda gradients: [tf.clip_by_value(gradient, -1.0, 1.0) for gradient in gradients],
    "by global norm": lambda gradients: tf.clip_by_global_norm(gradients, 1.0)[0],
}


@pytest.mark.parametrize(
    ("clip", "run_step", "jit_compile"),
    [
        ("by value", "graph", False),
        ("by global norm", "eager", False),
        ("by global norm", "graph", True),
    ],
    indirect=["run_step"],
)
def test_overflow_skips_the_step_and_has_its_origin_if_gradients_are_clipped_by_hand(
    clip, run_step, jit_compile
):
    variables = [keras.Variable([0.0]), keras.Variable([0.0])]
    optimizer = optimizer_for(*variables, initial_scale=4096.0, jit_compile=jit_compile)

    @run_step
    def step(*gradients):
        optimizer.scale_loss(0.5)
        unscaled = optimizer.unscale([gradient * optimizer.loss_scale for gradient in gradients])
        optimizer.apply(CLIPS[clip](unscaled), variables, unscaled=True)

    step(tf.constant([np.inf]), tf.constant([0.5]))
    np.testing.assert_array_equal(np.concatenate(variables), [0.0, 0.0])
    now = optimizer.snapshot()
    assert (now.overflow_count, now.loss_scale, now.overflow_origin) == (
        1,
        2048.0,
        optimizer.paths[0],
    )
    step(tf.constant([3.0]), tf.constant([4.0]))
    np.testing.assert_allclose(
        np.concatenate(variables), -np.concatenate(CLIPS[clip]([[3.0], [4.0]])), rtol=1e-6
    )
    assert optimizer.snapshot().overflow_count == 1


def test_overflow_of_any_micro_batch_skips_the_step_that_applies_their_clipped_sum():
    variables = [keras.Variable([0.0]), keras.Variable([0.0])]
    optimizer = optimizer_for(*variables)
    total = [tf.zeros(1), tf.zeros(1)]
    for gradient in (np.inf, 0.5):
        optimizer.scale_loss(1.0)
        total = [total[0] + gradient, total[1] + 1.0]
    optimizer.apply(CLIPS["by value"](optimizer.unscale(total)), variables)
    np.testing.assert_array_equal(np.concatenate(variables), [0.0, 0.0])
    assert optimizer.snapshot().overflow_origin == optimizer.paths[0]
    optimizer.apply(optimizer.unscale([tf.constant([2.0])]), variables[:1])
    assert optimizer.snapshot().overflow_count == 1


def test_unscaled_gradients_are_sampled_times_the_loss_scale():
    variable = keras.Variable([1.0, 2.0])
    optimizer = optimizer_for(variable, initial_scale=1024.0)
    optimizer.sampler.start(optimizer.counters, 1)
    optimizer.scale_loss(0.5)
    optimizer.apply(optimizer.unscale([tf.constant([2.0**-10, -3 * 1024.0])]), [variable])
    np.testing.assert_array_equal(variable, np.float32([1 - 2.0**-20, 5.0]))
    assert list(optimizer.snapshot().sample.amax) == [3 * 1024.0]


def test_unscale_keeps_sparse_missing_and_nonfinite_gradients_and_casts_float16_to_float32():
    optimizer = kmp.LossScaleOptimizer("sgd", loss_scale=2.0**15)
    sparse = tf.IndexedSlices(tf.constant([[2.0**15]]), tf.constant([1]), tf.constant([3, 1]))
    optimizer.scale_loss(1.0)
    unscaled = optimizer.unscale([tf.constant([1.0, np.inf], tf.float16), None, sparse])
    np.testing.assert_array_equal(unscaled[0], np.float32([2.0**-15, np.inf]))
    assert (unscaled[0].dtype, unscaled[1]) == (tf.float32, None)
    np.testing.assert_array_equal(tf.convert_to_tensor(unscaled[2]), [[0], [1], [0]])


def test_scale_loss_casts_float16_to_float32_and_warns_once():
    optimizer = kmp.LossScaleOptimizer("sgd")
    with pytest.warns(UserWarning, match="loss was computed in float16") as caught:
        scaled = optimizer.scale_loss(tf.constant(3.0, tf.float16))
    assert [warning.filename for warning in caught] == [__file__]
    assert (scaled.dtype, float(scaled)) == (tf.float32, 3 * 2.0**15)
    optimizer.scale_loss(tf.constant(3.0, tf.float16))


@pytest.mark.parametrize(
    ("dtype", "gradients", "scale"),
    [
        ("float32", [np.inf], 256.0),
        ("float32", [np.inf, 1.0], 256.0),  # of a variable that is listed twice
        ("float16", [6e4], 0.25),  # overflows when it is unscaled
        ("float32", [1e35], 2.0**-14),
    ],
)
def test_any_nonfinite_gradient_skips_the_step_and_a_fixed_scale_never_changes(
    dtype, gradients, scale
):
    variable = keras.Variable([1.0], dtype=dtype)
    optimizer = optimizer_for(variable, inner=keras.optimizers.SGD(1e-4), loss_scale=scale)
    gradients = [ops.array([gradient], dtype=dtype) for gradient in gradients]
    optimizer.apply(gradients, [variable] * len(gradients), unscaled=False)
    np.testing.assert_array_equal(variable, [1.0])
    assert (optimizer.snapshot().overflow_count, optimizer.snapshot().loss_scale) == (1, scale)


def test_config_has_keras_keys_and_only_changed_arguments_of_kmp_and_is_deserialized():
    keras_keys = {"name", "inner_optimizer", "initial_scale", "dynamic_growth_steps"}
    assert set(kmp.LossScaleOptimizer("sgd").get_config()) == keras_keys
    changed = {
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "hysteresis": 2,
        "min_scale": 1.0,
        "max_scale": 2.0**20,
    }
    dynamic = kmp.LossScaleOptimizer(
        "sgd", initial_scale=8.0, growth_interval=5, **changed, jit_compile=True
    )
    assert dynamic.get_config().items() >= changed.items()
    for optimizer in (dynamic, kmp.LossScaleOptimizer("sgd", loss_scale=2.0**-20)):
        copy = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
        assert type(copy) is kmp.LossScaleOptimizer
        assert (copy.rule, copy.jit_compile) == (optimizer.rule, optimizer.jit_compile)


@pytest.mark.parametrize("run_step", ["graph", "xla"], indirect=True)
def test_float16_variables_work_with_gradient_accumulation(run_step):
    variable = keras.Variable([1.0, 2.0], dtype="float16")
    inner = keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)
    optimizer = optimizer_for(variable, inner=inner, initial_scale=4.0)
    step = run_step(lambda g: optimizer.apply([g], [variable], unscaled=False))
    for _ in range(2):
        step(tf.constant([4.0, 8.0], tf.float16))
    np.testing.assert_array_equal(variable, [0.5, 1.0])


@pytest.mark.parametrize("run_step", ["eager", "graph"], indirect=True)
def test_nonfinite_loss_is_distinguished_from_an_overflow_in_the_backward_pass(run_step):
    variable = keras.Variable([1.0])
    optimizer = optimizer_for(variable)

    @run_step
    def step(first, second):
        with tf.GradientTape() as tape:
            total = optimizer.scale_loss(first * variable.value[0]) + optimizer.scale_loss(
                second * variable.value[0]
            )
        optimizer.apply([tape.gradient(total, variable.value)], [variable])

    def counts():
        now = optimizer.snapshot()
        return now.nonfinite_loss_count, now.overflow_count, now.loss_scale

    for losses, expected in (
        ((np.nan, 1.0), (1, 1)),
        ((1.0, 1.0), (1, 1)),
        ((1.0, np.nan), (2, 2)),
    ):
        step(*map(tf.constant, losses))
        assert counts() == (*expected, 2.0**15)
    optimizer.apply([ops.array([np.inf])], [variable])
    assert counts() == (2, 3, 2.0**14)
    run_step(optimizer.scale_loss)(tf.constant(np.inf))  # traced apart from `apply`
    run_step(lambda gradient: optimizer.apply([gradient], [variable]))(tf.constant([np.nan]))
    assert counts() == (3, 4, 2.0**14)
    optimizer.scale_loss(ops.array(np.inf))  # discarded: the next step is not skipped
    optimizer.scale_loss(ops.array(1.0))
    optimizer.apply([ops.array([2.0])], [variable])
    assert counts() == (3, 4, 2.0**14)


def test_inner_optimizer_can_be_a_name_but_not_a_loss_scale_optimizer():
    assert isinstance(kmp.LossScaleOptimizer("adam").inner_optimizer, keras.optimizers.Adam)
    for invalid in (
        kmp.LossScaleOptimizer("sgd"),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
    ):
        with pytest.raises(TypeError, match="scaled twice"):
            kmp.LossScaleOptimizer(invalid)
    for invalid in (None, 3, keras.layers.Dense(1)):
        with pytest.raises(TypeError, match="`inner_optimizer` must be"):
            kmp.LossScaleOptimizer(invalid)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hysteresys": 2}, "does not support arguments: `hysteresys`"),
        ({"clipnorm": 1.0}, "set `clipnorm` on the `inner_optimizer`"),
        ({"initial_scale": -1}, "initial_scale=-1"),
    ],
)
def test_invalid_argument_raises_before_anything_changes(arguments, message):
    inner = keras.optimizers.SGD(0.1, loss_scale_factor=2.0)
    with pytest.raises(ValueError, match=message):
        kmp.LossScaleOptimizer(inner, **arguments)
    assert inner.loss_scale_factor == 2.0


@pytest.mark.parametrize("setting", ["initial_scale", "loss_scale"])
def test_scale_with_a_subnormal_reciprocal_is_not_applied(setting):
    optimizer = optimizer_for(keras.Variable([1.0]), **{setting: 2.0**127})
    assert float(optimizer.loss_scale) == 2.0**126
    assert optimizer.snapshot().loss_scale == 2.0**127


def test_defaults_are_those_of_the_dynamic_scale():
    parameters = inspect.signature(kmp.LossScaleOptimizer).parameters
    for field in dataclasses.fields(kmp.scaling.DynamicScale):
        assert parameters[field.name].default == field.default, field.name
