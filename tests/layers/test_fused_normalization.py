import contextlib
import copy
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import kmp
from kmp.layers.fused_normalization import fuse_normalization, unfuse_normalization
from kmp.replay.instruments.other_precision import computing_in

# The largest difference from Keras' layers, relative to the largest value: float32's last bits, or
# two roundings. The kernel computes in float32 in a pass of a replay of a layer in 16 bits.
FLOAT32_PASS = "mixed_float16 in a float32 pass"
TOLERANCE = {FLOAT32_PASS: 3e-5, "mixed_float16": 2e-3, "mixed_bfloat16": 1.6e-2}
POLICIES = list(TOLERANCE)
NEEDS_RENORM = pytest.mark.skipif(
    not hasattr(layers.BatchNormalization(), "renorm"), reason="Keras has it starting with 3.14"
)

BATCH_CASES = [
    ({"axis": -1}, (8, 6)),
    ({"axis": -1, "momentum": 0.0}, (8, 5, 6)),
    ({"axis": -1, "momentum": 1.0}, (4, 5, 3, 6)),
    ({"axis": 3, "epsilon": 1e-7}, (4, 5, 3, 6)),
    ({"axis": -1}, (4, 2, 5, 3, 6)),
    ({"axis": 1}, (4, 6, 5)),
    ({"axis": 1}, (4, 6, 5, 3)),
    ({"axis": -4, "epsilon": 1e-7}, (4, 6, 5, 2, 3)),
    ({"scale": False, "center": False}, (4, 5, 3, 6)),
    ({}, (1, 6)),
]
OTHER_CASES = [
    (layers.LayerNormalization, {}, (4, 5, 6)),
    (layers.LayerNormalization, {"axis": [1, 2], "epsilon": 1e-12}, (4, 5, 6)),
    (layers.LayerNormalization, {"scale": False}, (4, 6)),
    (layers.LayerNormalization, {"center": False, "epsilon": 1e-6}, (4, 5, 6)),
    (layers.LayerNormalization, {"center": False, "scale": False}, (4, 5, 6)),
    (layers.GroupNormalization, {"groups": 3}, (4, 5, 3, 6)),
    (layers.GroupNormalization, {"groups": 1}, (4, 7, 6)),
    (layers.GroupNormalization, {"groups": -1, "axis": 1}, (4, 6, 5, 3)),
    (layers.GroupNormalization, {"groups": 2, "axis": 1, "scale": False}, (4, 6, 5)),
    (layers.RMSNormalization, {}, (4, 5, 6)),
    (layers.RMSNormalization, {"axis": [1, 2], "epsilon": 1e-2}, (4, 5, 6)),
]


def pair(cls, arguments, shape, policy):
    """Returns a layer of Keras and one with the fused kernel, with equal new weights."""
    random, policy = np.random.default_rng(1), policy.partition(" ")[0]
    plain, fused = cls(dtype=policy, **arguments), cls(dtype=policy, **arguments)
    fuse_normalization(fused)
    for layer in (plain, fused):
        layer.build((None, *shape[1:]))
    for one, other in zip(plain.weights, fused.weights, strict=True):
        value = random.uniform(0.5, 2.0, one.shape)
        one.assign(value)
        other.assign(value)
    return plain, fused


def data(shape, policy):
    random = np.random.default_rng(0)
    dtype = "float32" if policy == FLOAT32_PASS else policy.removeprefix("mixed_")
    return [
        tf.cast(random.normal(mean, deviation, shape), dtype)
        for mean, deviation in ((2, 3), (0, 1))
    ]


def pass_over(layer, x):
    """Returns the context in which a layer computes in the dtype of its inputs."""
    return computing_in("float32", [layer]) if x.dtype == "float32" else contextlib.nullcontext()


def outputs_of(layer, x, upstream, in_graph, **options):
    """Returns the outputs, the gradients of the inputs and weights, and the states afterwards."""

    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, **options)
        sources = [x, *(weight.value for weight in layer.trainable_weights)]
        return [y, *tape.gradient(y, sources, output_gradients=tf.cast(upstream, y.dtype))]

    if in_graph:  # as `fit` traces it, for any number of rows
        run = tf.function(
            run, autograph=False, input_signature=[tf.TensorSpec([None, *x.shape[1:]], x.dtype)]
        )
    with pass_over(layer, x):
        outputs = run(x)
    states = [weight.value for weight in layer.non_trainable_weights]
    return [tf.cast(each, "float32").numpy() for each in (*outputs, *states)]


def assert_equal(plain, fused, policy):
    for one, other in zip(plain, fused, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(
            other, one, rtol=0, atol=TOLERANCE[policy] * max(np.abs(one).max(), 1e-3)
        )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("arguments", "shape"), BATCH_CASES)
def test_batch_normalization_equals_that_of_keras(arguments, shape, policy):
    x, upstream = data(shape, policy)
    for training, in_graph in ((True, True), (True, False), (False, True)):
        layers_ = pair(layers.BatchNormalization, arguments, shape, policy)
        plain, fused = (
            outputs_of(each, x, upstream, in_graph, training=training) for each in layers_
        )
        assert_equal(plain, fused, policy)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("cls", "arguments", "shape"), OTHER_CASES)
def test_other_normalizations_equal_those_of_keras(cls, arguments, shape, policy):
    x, upstream = data(shape, policy)
    for in_graph in (True, False):
        plain, fused = (
            outputs_of(each, x, upstream, in_graph) for each in pair(cls, arguments, shape, policy)
        )
        assert_equal(plain, fused, policy)


def test_kernel_reads_and_writes_16_bits_and_is_used_outside_of_xla_only():
    x = tf.ones([4, 5, 3, 6], tf.float16)
    for cls, arguments, shape in [
        (layers.BatchNormalization, {}, x.shape),
        *OTHER_CASES[:1],
        OTHER_CASES[5],
        OTHER_CASES[9],
    ]:
        _, layer = pair(cls, arguments, tuple(shape), "mixed_float16")
        inputs = tf.ones(shape, tf.float16)
        options = {"training": True} if cls is layers.BatchNormalization else {}
        step = tf.function(
            lambda x, layer=layer, options=options: layer(x, **options), autograph=False
        )
        graph = step.get_concrete_function(inputs).graph
        assert "FusedBatchNormV3" in {op.type for op in graph.get_operations()}
        large = [
            out
            for op in graph.get_operations()
            for out in op.outputs
            if out.shape.num_elements() == tf.size(inputs)
        ]
        assert {out.dtype for out in large} == {tf.float16}
        compiled = tf.function(
            step.python_function, autograph=False, jit_compile=True
        ).get_concrete_function(inputs)
        assert "FusedBatchNormV3" not in {op.type for op in compiled.graph.get_operations()}


@pytest.mark.parametrize(
    ("arguments", "shape", "options"),
    [
        pytest.param({"renorm": True}, (4, 5, 6), {}, marks=NEEDS_RENORM),
        ({"synchronized": True}, (4, 5, 6), {}),
        ({"axis": 2}, (4, 5, 3, 6), {}),
        ({}, (4, 5, 6), {"mask": np.ones((4, 5), bool)}),
    ],
)
def test_keras_own_code_runs_where_the_kernel_cannot(arguments, shape, options):
    x, upstream = data(shape, "mixed_float16")
    layers_ = pair(layers.BatchNormalization, arguments, shape, "mixed_float16")
    plain, fused = (
        outputs_of(each, x, upstream, False, training=True, **options) for each in layers_
    )
    for one, other in zip(plain, fused, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("cls", [layers.BatchNormalization, kmp.layers.BatchNormalization])
def test_batch_without_rows_leaves_the_statistics_unchanged(cls):
    layer = cls(dtype="mixed_float16")
    fuse_normalization(layer)
    layer.build((None, 3))
    call = tf.function(
        lambda x: layer(x, training=True), input_signature=[tf.TensorSpec([None, 3])]
    )
    before = [call(tf.random.normal([8, 3])), *layer.get_weights()][1:]
    assert call(tf.zeros([0, 3])).shape == (0, 3)
    assert layer(tf.zeros([0, 3]), training=True).shape == (0, 3)
    for old, new in zip(before, layer.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_second_derivatives_equal_those_of_keras():
    for cls, arguments, shape in (
        (layers.BatchNormalization, {}, (8, 5, 6)),
        *OTHER_CASES[:1],
        OTHER_CASES[5],
        OTHER_CASES[9],
    ):
        x, _ = data(shape, FLOAT32_PASS)
        found = []
        for layer in pair(cls, arguments, shape, FLOAT32_PASS):
            options = {"training": True} if cls is layers.BatchNormalization else {}
            with pass_over(layer, x), tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    loss = tf.reduce_sum(layer(x, **options) ** 3)
                penalty = tf.reduce_sum(inner.gradient(loss, x) ** 2)
            found.append(outer.gradient(penalty, x).numpy())
        np.testing.assert_allclose(
            found[1], found[0], rtol=1e-3, atol=1e-3 * np.abs(found[0]).max()
        )


def test_layers_under_enable_and_of_converted_models_are_fused_and_saved_as_those_of_keras(
    tmp_path,
):
    class Scaled(layers.BatchNormalization):
        def call(self, inputs, training=None, mask=None):
            return 2.0 * super().call(inputs, training=training, mask=mask)

    def is_fused(layer):
        return "call" in vars(layer)

    outside = keras.Sequential(
        [keras.Input((4, 6)), layers.BatchNormalization(), layers.LayerNormalization()]
    )
    with kmp.enable():
        model = keras.models.clone_model(outside)
        assert not is_fused(Scaled())
    assert [list(map(is_fused, each.layers)) for each in (outside, model)] == [
        [False] * 2,
        [True] * 2,
    ]
    assert all(map(is_fused, kmp.convert(outside).layers[1:]))
    assert not any(map(is_fused, kmp.to_float32(model).layers))
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert [type(layer) for layer in loaded.layers] == [type(layer) for layer in outside.layers]
    x = np.random.default_rng(0).normal(size=(2, 4, 6)).astype("float32")
    np.testing.assert_allclose(loaded(x), model(x), rtol=4e-3, atol=1e-3)
    twin = copy.deepcopy(model.layers[0])
    np.testing.assert_array_equal(twin(x), model.layers[0](x))
    unfuse_normalization(model.layers[0])
    assert not is_fused(model.layers[0])


@pytest.mark.parametrize(
    "make",
    [
        layers.BatchNormalization,
        layers.LayerNormalization,
        functools.partial(layers.GroupNormalization, 3),
        layers.RMSNormalization,
    ],
)
def test_float32_run_under_enable_has_the_weights_of_one_without_kmp_bit_for_bit(make):
    x = np.random.default_rng(0).normal(2.0, 3.0, (32, 6)).astype("float32")

    def trained(context):
        keras.utils.set_random_seed(0)
        with context:
            model = keras.Sequential([keras.Input((6,)), layers.Dense(6), make(), layers.Dense(1)])
            model.compile(keras.optimizers.Adam(0.1), "mse", jit_compile=False)
            model.fit(x, x[:, :1], batch_size=8, verbose=0)
        return model.get_weights()

    plain, watched = trained(contextlib.nullcontext()), trained(kmp.enable("float32"))
    for one, other in zip(plain, watched, strict=True):
        np.testing.assert_array_equal(other, one)


@pytest.mark.parametrize("cls", [layers.RMSNormalization, layers.BatchNormalization])
def test_float32_layer_in_a_mixed_model_computes_as_that_of_keras(cls):
    plain = cls(dtype="float32")
    with kmp.enable():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(6), cls(dtype="float32")])
    x = np.random.default_rng(0).normal(2.0, 3.0, (32, 6)).astype("float32")
    hidden = tf.cast(model.layers[0](x), "float32")
    options = {"training": True} if cls is layers.BatchNormalization else {}
    expected = plain(hidden, **options)
    np.testing.assert_array_equal(model(x, training=True), expected)


def test_unknown_channels_and_other_dtypes_are_left_to_keras():
    x = np.random.default_rng(0).normal(size=(4, 6)).astype("float32")
    for options, dtype in (
        ({"autocast": False}, "mixed_float16"),
        ({}, "float64"),
        ({}, "mixed_float16"),
    ):
        plain, fused = pair(layers.BatchNormalization, options, (4, 6), dtype)
        call = tf.function(
            lambda x, fused=fused: fused(x, training=True),
            input_signature=[tf.TensorSpec([None, None])],
        )
        expected = plain(x, training=True)
        for outputs in (fused(x, training=True), call(x)):
            assert outputs.dtype == expected.dtype
            np.testing.assert_allclose(
                tf.cast(outputs, "float32"), tf.cast(expected, "float32"), rtol=4e-3, atol=4e-3
            )


@pytest.mark.parametrize("cls", [layers.LayerNormalization, layers.RMSNormalization])
def test_gradient_that_is_almost_orthogonal_to_the_result_is_rounded_once(cls):
    random = np.random.default_rng(0)
    x = tf.constant(random.normal(size=(64, 256)), tf.float16)
    upstream = x + tf.constant(0.1 * random.normal(size=x.shape), tf.float16)

    def gradient_of(layer, x, upstream):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
        return tf.cast(tape.gradient(y, x, tf.cast(upstream, y.dtype)), "float64")

    _, layer = pair(cls, {}, x.shape, "mixed_float16")
    exact, _ = pair(cls, {}, x.shape, "float64")
    expected = gradient_of(exact, tf.cast(x, "float64"), upstream)
    error = tf.norm(gradient_of(layer, x, upstream) - expected) / tf.norm(expected)
    assert error < 1e-3


def test_weight_gradients_of_a_gradient_penalty_are_those_of_finite_differences():
    for cls in (layers.LayerNormalization, layers.RMSNormalization):
        random = np.random.default_rng(0)
        kernel, x = (
            random.normal(size=(6, 6)).astype("float32"),
            tf.constant(random.normal(size=(4, 6)), tf.float32),
        )
        _, norm = pair(cls, {"epsilon": 1e-2}, (4, 6), FLOAT32_PASS)

        def penalty(kernel, x=x, norm=norm):
            with pass_over(norm, x), tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(tf.sin(norm(tf.matmul(x, kernel))))
            return tf.reduce_sum(tape.gradient(loss, x) ** 2)

        with tf.GradientTape() as tape:
            variable = tf.Variable(kernel)
            value = penalty(variable)
        found = tape.gradient(value, variable).numpy()
        step, expected = 1e-2, np.zeros_like(kernel)
        for index in np.ndindex(kernel.shape):
            moved = np.zeros_like(kernel)
            moved[index] = step
            expected[index] = (penalty(kernel + moved) - penalty(kernel - moved)) / (2 * step)
        assert np.linalg.norm(found - expected) < 5e-3 * np.linalg.norm(expected)
