import contextlib
import copy
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import kmp
from kmp.backend.compiled_parts import in_step
from kmp.backend.xla import traced_for_gpu
from kmp.layers.fused_calls import use_call_of_keras, use_fused_call
from kmp.traffic import traffic_of

# The largest difference from Keras' layers, relative to the largest value: two roundings.
TOLERANCE = {"mixed_float16": 2e-3, "mixed_bfloat16": 1.6e-2}
NEEDS_RENORM = pytest.mark.skipif(
    not hasattr(layers.BatchNormalization(), "renorm"), reason="Keras has it starting with 3.14"
)

# By what differs in the code: the rank, the axis of the channels, a weight of 0 or 1, one row.
BATCH_CASES = [
    ({"axis": -1}, (8, 6), "mixed_float16"),
    ({"axis": -1, "momentum": 0.0}, (8, 5, 6), "mixed_bfloat16"),
    ({"axis": 3, "epsilon": 1e-7}, (4, 5, 3, 6), "mixed_float16"),
    ({"axis": 1}, (4, 6, 5, 3), "mixed_bfloat16"),
    ({"axis": -4, "epsilon": 1e-7}, (4, 6, 5, 2, 3), "mixed_float16"),
    ({"scale": False, "center": False, "momentum": 1.0}, (4, 5, 3, 6), "mixed_float16"),
    ({}, (1, 6), "mixed_float16"),
]
# XLA gets inputs with three axes: for it, rank 4 is no case of its own.
COMPILED_CASES = [*BATCH_CASES[:2], *BATCH_CASES[4:], ({}, (3, 40, 40, 2), "mixed_float16")]


def pair(cls, arguments, shape, policy):
    """Returns a layer of Keras and one with the fused kernel, with equal new weights."""
    random = np.random.default_rng(1)
    plain, fused = cls(dtype=policy, **arguments), cls(dtype=policy, **arguments)
    use_fused_call(fused)
    for layer in (plain, fused):
        layer.build((None, *shape[1:]))
    for one, other in zip(plain.weights, fused.weights, strict=True):
        value = random.uniform(0.5, 2.0, one.shape)
        one.assign(value)
        other.assign(value)
    return plain, fused


def data(shape, policy):
    random = np.random.default_rng(0)
    return [
        tf.cast(random.normal(mean, deviation, shape), policy.removeprefix("mixed_"))
        for mean, deviation in ((2, 3), (0, 1))
    ]


@contextlib.contextmanager
def step_on_gpu():
    """The context in which a training step is traced as on a GPU, which compiles parts of it."""
    with traced_for_gpu(), in_step():
        yield


def outputs_of(layer, x, upstream, in_graph, compiles=False, **options):
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
    with step_on_gpu() if compiles else contextlib.nullcontext():
        outputs = run(x)
        if compiles:
            assert traffic_of(run.get_concrete_function().graph).compiled_calls == 2
    states = [weight.value for weight in layer.non_trainable_weights]
    return [tf.cast(each, "float32").numpy() for each in (*outputs, *states)]


def assert_equal(plain, fused, policy):
    for one, other in zip(plain, fused, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(
            other, one, rtol=0, atol=TOLERANCE[policy] * max(np.abs(one).max(), 1e-2)
        )


@pytest.mark.parametrize(("arguments", "shape", "policy"), BATCH_CASES)
def test_batch_normalization_equals_that_of_keras(arguments, shape, policy):
    x, upstream = data(shape, policy)
    for training, in_graph in ((True, True), (True, False), (False, True)):
        layers_ = pair(layers.BatchNormalization, arguments, shape, policy)
        plain, fused = (
            outputs_of(each, x, upstream, in_graph, training=training) for each in layers_
        )
        assert_equal(plain, fused, policy)


@pytest.mark.parametrize(("arguments", "shape", "policy"), COMPILED_CASES)
def test_compiled_batch_normalization_equals_that_of_keras(arguments, shape, policy):
    x, upstream = data(shape, policy)
    plain, fused = pair(layers.BatchNormalization, arguments, shape, policy)
    expected = outputs_of(plain, x, upstream, True, training=True)
    found = outputs_of(fused, x, upstream, True, compiles=True, training=True)
    assert_equal(expected, found, policy)


def at_place(values, place, outlier):
    values = values.copy()
    values[place] = outlier
    return values


NORMAL = np.random.default_rng(2).normal(size=(8, 7, 5, 4))


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize(
    "values",
    [
        pytest.param(NORMAL + 1000.0, id="large mean"),
        pytest.param(at_place(NORMAL, (0, 0, 0), 1e4), id="outlier at the first place"),
        pytest.param(at_place(NORMAL, (4, 3, 2), 1e4), id="outlier at the middle place"),
        pytest.param(at_place(NORMAL, (..., 2), 37.25), id="constant channel"),
        pytest.param(65000.0 + 400.0 * np.tanh(NORMAL), id="close to the largest float16"),
    ],
)
def test_compiled_batch_normalization_has_the_statistics_of_float64(values, axis):
    values = np.moveaxis(values, -1, axis)
    x, upstream = tf.cast(values, tf.float16), tf.ones(values.shape)
    options = {"axis": axis, "momentum": 0.0}
    _, fused = pair(layers.BatchNormalization, options, x.shape, "mixed_float16")
    exact, _ = pair(layers.BatchNormalization, options, x.shape, "float64")
    found = outputs_of(fused, x, upstream, True, compiles=True, training=True)
    expected = outputs_of(exact, tf.cast(x, tf.float64), upstream, True, training=True)
    assert_equal(expected[:1], found[:1], "mixed_float16")
    for one, other in zip(expected[-2:], found[-2:], strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-6)


def test_compiled_batch_normalization_is_two_programs_and_keeps_the_inputs_and_statistics():
    with kmp.enable():
        stack = [layers.BatchNormalization() for _ in range(3)]
    for layer in stack:
        layer.build((None, 8, 8, 4))
    weights = [each.value for layer in stack for each in layer.trainable_weights]

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = 2 * x
            for layer in stack:
                y = layer(y, training=True)
        return tape.gradient(y, [x, *weights], y)

    x = tf.ones([16, 8, 8, 4], tf.float16)
    with step_on_gpu():
        graph = tf.function(step, autograph=False).get_concrete_function(x).graph
    calls = [op for op in graph.get_operations() if "PartitionedCall" in op.type]
    assert (len(calls), len({op.get_attr("f").name for op in calls})) == (6, 2)
    large = [out for op in graph.get_operations() for out in op.outputs]
    large = [out for out in large if out.shape.num_elements() == tf.size(x)]
    assert {out.dtype for out in large} == {tf.float16}
    # The inputs of each layer, the last output, and two vectors of each layer.
    assert traffic_of(graph).kept_bytes == 4 * 2 * int(tf.size(x)) + 3 * 2 * 4 * 4


def test_compiled_batch_normalization_has_the_second_derivatives_of_float64():
    shape = (4, 6, 5)
    x, upstream = data(shape, "mixed_float16")
    _, fused = pair(layers.BatchNormalization, {"axis": 1}, shape, "mixed_float16")
    exact, _ = pair(layers.BatchNormalization, {"axis": 1}, shape, "float64")
    expected = penalized_step(exact, tf.cast(x, tf.float64), tf.cast(upstream, "float32"))
    with step_on_gpu():
        step = tf.function(penalized_step, autograph=False)
        found = step(fused, x, tf.cast(upstream, "float32"))
    as_arrays = ([tf.cast(each, "float32").numpy() for each in some] for some in (expected, found))
    assert_equal(*as_arrays, "mixed_bfloat16")


@pytest.mark.parametrize("is_frozen", [False, True])
def test_second_derivatives_of_a_function_that_calls_batch_normalization_are_those_of_float64(
    is_frozen,
):
    shape = (4, 5, 6)
    x, upstream = data(shape, "mixed_float16")
    _, fused = pair(layers.BatchNormalization, {}, shape, "mixed_float16")
    exact, _ = pair(layers.BatchNormalization, {}, shape, "float64")
    fused.trainable = exact.trainable = not is_frozen
    fused.call = tf.function(fused.call, autograph=False)
    expected = penalized_step(exact, tf.cast(x, tf.float64), tf.cast(upstream, "float32"))
    with step_on_gpu():
        step = tf.function(penalized_step, autograph=False)
        found = step(fused, x, tf.cast(upstream, "float32"))
    as_arrays = ([tf.cast(each, "float32").numpy() for each in some] for some in (expected, found))
    assert_equal(*as_arrays, "mixed_bfloat16")


def test_kernel_of_batch_normalization_reads_and_writes_16_bits_and_is_used_outside_of_xla_only():
    x = tf.ones([4, 5, 3, 6], tf.float16)
    _, layer = pair(layers.BatchNormalization, {}, x.shape, "mixed_float16")
    step = tf.function(lambda x: layer(x, training=True), autograph=False)
    graph = step.get_concrete_function(x).graph
    assert "FusedBatchNormV3" in {op.type for op in graph.get_operations()}
    outputs = [out for op in graph.get_operations() for out in op.outputs]
    large = [out for out in outputs if out.shape.num_elements() == tf.size(x)]
    assert {out.dtype for out in large} == {tf.float16}
    compiled = tf.function(step.python_function, autograph=False, jit_compile=True)
    operations = compiled.get_concrete_function(x).graph.get_operations()
    assert "FusedBatchNormV3" not in {op.type for op in operations}


@pytest.mark.parametrize(
    ("axis", "shape", "scale"),
    [(-1, (4, 5, 3, 6), False), (1, (4, 6, 5), True), (-1, (40, 6), True)],
)
def test_given_statistics_have_the_derivatives_of_keras(axis, shape, scale):
    x, upstream = data(shape, "mixed_float16")
    arguments = {"axis": axis, "scale": scale}
    exact, fused = pair(layers.BatchNormalization, arguments, shape, "mixed_float16")
    exact, _ = pair(layers.BatchNormalization, arguments, shape, "float64")

    def derivatives(layer, x):
        sources = [weight.value for weight in layer.trainable_weights]
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(tf.cast(upstream, x.dtype) * layer(x, training=False) ** 2)
            gradients = inner.gradient(loss, [x, *sources])
            penalty = tf.reduce_sum(gradients[0] ** 2)
        return [*gradients, outer.gradient(penalty, x)]

    expected = derivatives(exact, tf.cast(x, tf.float64))
    for found in (derivatives(fused, x), tf.function(derivatives, autograph=False)(fused, x)):
        assert_equal(expected, [tf.cast(each, tf.float64) for each in found], "mixed_bfloat16")


def test_frozen_batch_normalization_is_a_kernel_in_each_direction_and_keeps_nothing():
    _, layer = pair(layers.BatchNormalization, {}, (8, 16, 16, 64), "mixed_float16")
    layer.trainable = False

    def backward(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
        return tape.gradient(y, x)

    spec = tf.TensorSpec((8, 16, 16, 64), tf.float16)
    traffic = traffic_of(tf.function(backward, autograph=False).get_concrete_function(spec).graph)
    assert traffic.kept_bytes == 0
    # TensorFlow prunes the forward pass, which nothing needs, and transposes without convolutions.
    assert set(traffic.by_type) == {"FusedBatchNormV3", "Fill", "Transpose"}
    assert traffic.by_type["FusedBatchNormV3"].kernels == 1


@pytest.mark.parametrize(
    ("arguments", "shape", "options"),
    [
        pytest.param({"renorm": True}, (4, 5, 6), {}, marks=NEEDS_RENORM),
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


def penalized_step(layer, x, upstream):
    """Returns the outputs, and the gradients of a loss and of a penalty of its gradient."""
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = tf.cast(layer(x, training=True), "float32")
            loss = tf.reduce_sum(upstream * y + 0.1 * y**3)
        gradients = inner.gradient(loss, [x, *(each.value for each in layer.trainable_weights)])
        penalty = tf.reduce_sum(tf.cast(gradients[0], "float32") ** 2)
    return [y, gradients[0], outer.gradient(penalty, x), *gradients[1:]]


@pytest.mark.parametrize(
    ("policy", "rows"), [("mixed_float16", (6, 2)), ("mixed_bfloat16", (8, 0))]
)
def test_synchronized_normalization_of_replicas_equals_that_of_their_joined_batch(
    policy, rows, two_replicas
):
    shape = (8, 5, 3, 6)
    x, upstream = data(shape, policy)
    upstream = tf.cast(upstream, "float32")
    options = {"axis": -1 if rows == (6, 2) else 1, "momentum": 0.5}
    random = np.random.default_rng(1)

    def built(**options):
        layer = layers.BatchNormalization(**options)
        layer.build((None, *shape[1:]))
        layer.set_weights([random.uniform(0.5, 2.0, each.shape) for each in layer.weights])
        return layer

    with two_replicas.scope():
        layer = built(synchronized=True, dtype=policy, **options)
        use_fused_call(layer)
    random = np.random.default_rng(1)
    plain = built(dtype="float32", **options)
    expected = penalized_step(plain, tf.cast(x, "float32"), upstream)

    def of_replica(values):
        parts = tf.split(values, rows)
        return two_replicas.experimental_distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group]
        )

    def step(*args):  # in a thread of its own
        with step_on_gpu():
            return penalized_step(layer, *args)

    run = tf.function(step, autograph=False)
    found = two_replicas.run(run, (of_replica(x), of_replica(upstream)))
    parts = [two_replicas.experimental_local_results(each) for each in found]
    joined = [tf.concat(each, 0) for each in parts[:3]] + [sum(each) for each in parts[3:]]
    for index, weight in enumerate(layer.non_trainable_weights):
        for each in two_replicas.experimental_local_results(weight.value):
            np.testing.assert_allclose(each, plain.non_trainable_weights[index], rtol=1e-4)
    as_arrays = [[tf.cast(each, "float32").numpy() for each in some] for some in (expected, joined)]
    assert_equal(*as_arrays, policy)


def test_synchronized_normalization_of_replicas_moves_16_bits_in_both_directions(two_replicas):
    x = tf.ones([4, 15, 3, 6], tf.float16)
    with two_replicas.scope():
        layer = layers.BatchNormalization(synchronized=True, dtype="mixed_float16")
        use_fused_call(layer)
        layer.build(x.shape)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            with step_on_gpu():
                y = layer(x, training=True)
        with step_on_gpu():
            return tape.gradient(y, x, y)

    run = tf.function(lambda x: two_replicas.run(step, (x,)), autograph=False)
    graph = run.get_concrete_function(x).graph
    assert traffic_of(graph).compiled_calls == 2 * 4
    tensors = [tensor for op in graph.get_operations() for tensor in op.outputs]
    large = [each for each in tensors if each.shape.num_elements() == tf.size(x)]
    assert {each.dtype for each in large} == {tf.float16}


@pytest.mark.parametrize(
    ("cls", "shape", "context"),
    [
        (layers.BatchNormalization, (3,), contextlib.nullcontext),
        (layers.BatchNormalization, (2, 4, 3), step_on_gpu),
        (kmp.layers.BatchNormalization, (3,), step_on_gpu),
        (kmp.layers.BatchNormalization, (2, 4, 3), contextlib.nullcontext),
    ],
)
def test_batch_without_rows_leaves_the_statistics_unchanged(cls, shape, context):
    layer = cls(dtype="mixed_float16")
    use_fused_call(layer)
    layer.build((None, *shape))
    call = tf.function(
        lambda x: layer(x, training=True), input_signature=[tf.TensorSpec([None, *shape])]
    )
    with context():
        before = [call(tf.random.normal([8, *shape])), *layer.get_weights()][1:]
    assert call(tf.zeros([0, *shape])).shape == (0, *shape)
    assert layer(tf.zeros([0, *shape]), training=True).shape == (0, *shape)
    for old, new in zip(before, layer.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_second_derivatives_of_batch_normalization_equal_those_of_keras():
    shape = (8, 5, 6)
    x, _ = data(shape, "mixed_float16")
    found = []
    for layer in pair(layers.BatchNormalization, {}, shape, "mixed_float16"):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(layer(x, training=True) ** 3)
            penalty = tf.reduce_sum(inner.gradient(loss, x) ** 2)
        found.append(outer.gradient(penalty, x).numpy())
    np.testing.assert_allclose(found[1], found[0], rtol=0.02, atol=0.02 * np.abs(found[0]).max())


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
    use_call_of_keras(model.layers[0])
    assert not is_fused(model.layers[0])


def test_spectral_normalization_of_16_bits_writes_the_weights_of_one_in_float32(tmp_path):
    x = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype("float32")

    def built():
        keras.utils.set_random_seed(0)
        conv = layers.SpectralNormalization(layers.Conv2D(4, 3), power_iterations=2)
        return keras.Sequential([keras.Input((8, 8, 3)), conv])

    plain = built()
    with kmp.enable():
        model = built()
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    converted = kmp.convert(built(), kmp.Plan("mixed_float16"))
    expected = plain(x, training=True)
    for each in (model, loaded, converted):
        outputs = each(x, training=True)
        assert outputs.dtype == tf.float16
        for one, other in zip(plain.weights, each.weights, strict=True):
            np.testing.assert_array_equal(other, one)
        np.testing.assert_allclose(tf.cast(outputs, "float32"), expected, atol=5e-3)


def test_spectral_normalization_around_a_float32_layer_returns_float32():
    with kmp.enable():
        layer = layers.SpectralNormalization(layers.Dense(1, dtype="float32"))
    assert layer(np.ones((2, 4), "float16"), training=True).dtype == tf.float32


def test_float32_run_under_enable_has_the_weights_of_one_without_kmp_bit_for_bit():
    normalizations = [
        layers.BatchNormalization,
        layers.LayerNormalization,
        functools.partial(layers.GroupNormalization, 3),
        layers.RMSNormalization,
    ]
    x = np.random.default_rng(0).normal(2.0, 3.0, (32, 6)).astype("float32")

    def trained(context):
        keras.utils.set_random_seed(0)
        with context:
            stack = [layer for make in normalizations for layer in (layers.Dense(6), make())]
            model = keras.Sequential([keras.Input((6,)), *stack, layers.Dense(1)])
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
