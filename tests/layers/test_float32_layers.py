from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import assert_equal, values
from keras import ops

import kmp
from kmp.layers import BatchNormalization, Float32, Softmax
from kmp.layers.float32 import Float32Operation


@keras.saving.register_keras_serializable(package="kmp_tests")
def root_of_sum_of_squares(x):
    return ops.sqrt(ops.sum(ops.square(x), axis=-1, keepdims=True))


def zero_in_training(x, training=None):
    return x * 0 if training else x


WRAPPED = {
    "lstm": lambda: keras.layers.LSTM(3),
    "sequential": lambda: keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(2)]),
    "attention": lambda: keras.layers.MultiHeadAttention(num_heads=2, key_dim=3),
    "function": lambda: root_of_sum_of_squares,
}


@pytest.mark.parametrize("name", WRAPPED)
def test_float32_output_is_bitwise_that_of_the_float32_layer_also_after_save_and_load(
    enabled, tmp_path, name
):
    wrapper, inputs = Float32(WRAPPED[name](), name="wrapper"), keras.Input((5, 4))
    hidden = keras.layers.Dense(4)(inputs)
    model = keras.Model(inputs, wrapper(hidden, hidden) if name == "attention" else wrapper(hidden))
    x = np.random.default_rng(0).normal(size=(2, 5, 4)).astype("float32")
    hidden, wrapped = ops.cast(model.layers[1](x), "float32"), wrapper.layer
    expected = wrapped(hidden, hidden) if name == "attention" else wrapped(hidden)
    assert model.output.dtype == "float32"
    np.testing.assert_array_equal(model(x), expected)
    if isinstance(wrapped, keras.layers.Layer):
        assert {layer.compute_dtype for layer in wrapped._flatten_layers()} == {"float32"}
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert (loaded.get_layer("wrapper").compute_dtype, loaded.layers[1].compute_dtype) == (
        "float32",
        "float16",
    )
    np.testing.assert_array_equal(loaded(x), expected)


def test_float32_is_finite_where_float16_overflows_and_does_not_cast_integers(enabled):
    x = ops.full((1, 4096), 8.0, dtype="float16")
    assert not np.isfinite(float(root_of_sum_of_squares(x)[0, 0]))
    assert float(Float32(root_of_sum_of_squares)(x)[0, 0]) == 512.0
    indices = Float32(lambda x: ops.argmax(x, axis=-1))(x)
    assert keras.backend.standardize_dtype(indices.dtype) == "int32"


@pytest.mark.parametrize("make", [lambda: keras.layers.Dropout(0.5), lambda: zero_in_training])
def test_float32_passes_training_to_the_layer_or_function(enabled, make):
    model = keras.Sequential([Float32(make())])
    x = ops.ones((4, 64), dtype="float16")
    assert float(ops.min(model(x, training=True))) == 0.0
    np.testing.assert_array_equal(model(x, training=False), np.ones((4, 64)))


def test_float32_passes_masks_to_the_layer(enabled):
    x = np.random.default_rng(0).normal(size=(1, 6, 2)).astype("float32")
    x[:, 4:] = 0
    outputs = []
    for make in (
        lambda: Float32(keras.layers.LSTM(3)),
        lambda: keras.layers.LSTM(3, dtype="float32"),
    ):
        keras.utils.set_random_seed(0)
        outputs.append(keras.Sequential([keras.layers.Masking(), make()])(x))
    np.testing.assert_array_equal(*outputs)
    wrapped = Float32(keras.layers.Masking())
    assert wrapped.compute_mask(ops.convert_to_tensor(x)).numpy().tolist() == [
        [True] * 4 + [False] * 2
    ]


class CreatesInBuild(keras.layers.Layer):
    """Creates its layer for the shapes of two inputs."""

    def build(self, x_shape, other_shape):
        self.dense = keras.layers.Dense(2)
        self.dense.build(x_shape)

    def call(self, x, other):
        return self.dense(x) + other


def test_float32_builds_a_recurrent_layer_and_sets_what_a_first_call_creates(enabled):
    recurrent = Float32(keras.layers.LSTM(2))
    recurrent.build((None, 3, 4))
    assert recurrent.layer.built
    layer = Float32(CreatesInBuild())
    layer(np.ones((1, 2), "float16"), np.ones((1, 2), "float16"))
    assert layer.layer.dense.compute_dtype == "float32"


def test_float32_rejects_a_layer_with_half_precision_variables():
    with kmp.enable("float16"):
        built = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        with pytest.raises(ValueError, match="already has variables in half precision: .*kernel"):
            Float32(built)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        *(
            (partial(Float32, layer), "`layer` must be a layer instance or")
            for layer in (3, None, keras.layers.Dense)
        ),
        (
            lambda: Float32(ops.exp, dtype="mixed_float16"),
            "`dtype` must be float32 or omitted.*float16",
        ),
        (lambda: Softmax(dtype="mixed_float16"), "`dtype` must be float32 or omitted.*float16"),
        (lambda: Softmax(axis="x"), "`axis` must be an integer.*'x'"),
        (lambda: Softmax(axis=[0, 1.5]), "axis=1.5"),
        (lambda: BatchNormalization(axis=1.5), "axis=1.5"),
        (lambda: BatchNormalization(momentum=-1), "`momentum` must be.*-1"),
        (lambda: BatchNormalization(momentum=np.nan), "momentum=nan"),
        (lambda: BatchNormalization(epsilon=0), "`epsilon` must be.*epsilon=0"),
        (lambda: BatchNormalization(epsilon=np.inf), "epsilon=inf"),
    ],
)
def test_invalid_layer_argument_raises_an_error_that_names_it(make, match):
    with pytest.raises((ValueError, TypeError), match=match):
        make()


def loss_and_gradient(logits, labels, loss, outputs_of):
    with tf.GradientTape() as tape:
        tape.watch(logits)
        value = loss(labels, outputs_of(logits))
    return value, tape.gradient(value, logits)


@pytest.mark.parametrize("arguments", [{}, {"axis": 1}, {"axis": [1, 2]}])
def test_softmax_is_that_of_keras_in_float32_over_the_same_axes(enabled, arguments):
    x = tf.constant(np.random.default_rng(0).normal(size=(2, 3, 4)), tf.float16)
    expected = keras.layers.Softmax(dtype="float32", **arguments)(x)
    np.testing.assert_array_equal(Softmax(**arguments)(x), expected)
    assert expected.dtype == tf.float32


def test_cross_entropy_on_softmax_equals_cross_entropy_on_logits(enabled, run_step):
    logits = tf.constant([[30.0, -30.0, 0.0], [-30.0, 30.0, 30.0], [0.5, -0.25, 2.0]], tf.float16)
    sparse, one_hot, softmax = tf.constant([1, 0, 2]), tf.one_hot([1, 0, 2], 3), Softmax()
    cases = [
        (keras.losses.SparseCategoricalCrossentropy, sparse),
        (keras.losses.CategoricalCrossentropy, one_hot),
    ]

    @run_step
    def on_softmax(x):
        return [loss_and_gradient(x, labels, loss_class(), softmax) for loss_class, labels in cases]

    @run_step
    def on_logits(x):
        return [
            loss_and_gradient(x, labels, loss_class(from_logits=True), ops.copy)
            for loss_class, labels in cases
        ]

    for found, expected in zip(
        on_softmax(logits), on_logits(tf.cast(logits, tf.float32)), strict=True
    ):
        (loss, gradient), (expected_loss, expected_gradient) = found, expected
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
        np.testing.assert_allclose(gradient, tf.cast(expected_gradient, tf.float16), rtol=1e-3)
        assert float(tf.reduce_min(tf.abs(gradient[0, :2]))) > 0.3


def test_gradient_through_softmax_and_loss_in_fit_equals_that_of_logits(enabled):
    x, labels = np.array([[30.0, -30.0], [-30.0, 30.0]], "float32"), np.array([1, 0])

    def trained_kernel(*output_layers, **loss_arguments):
        dense = keras.layers.Dense(2, use_bias=False, kernel_initializer="identity")
        model = keras.Sequential([keras.Input((2,)), dense, *output_layers])
        optimizer = kmp.LossScaleOptimizer(keras.optimizers.SGD(1e-3), initial_scale=256.0)
        model.compile(
            optimizer,
            keras.losses.SparseCategoricalCrossentropy(**loss_arguments),
            run_eagerly=True,
        )
        model.fit(x, labels, batch_size=2, verbose=0)
        return model.get_weights()[0]

    to_float32 = keras.layers.Activation("linear", dtype="float32")
    with_softmax, with_logits = (
        trained_kernel(Softmax()),
        trained_kernel(to_float32, from_logits=True),
    )
    np.testing.assert_allclose(with_softmax, with_logits, rtol=1e-6)
    assert np.abs(with_softmax - np.eye(2)).min() > 0.01


@pytest.mark.parametrize(
    "make",
    [keras.layers.Softmax, lambda: keras.layers.Dense(2, "softmax", kernel_initializer="identity")],
)
def test_float32_around_softmax_keeps_the_logits(enabled, make):
    x = tf.constant([[90.0, -90.0]], tf.float16)
    loss = keras.losses.SparseCategoricalCrossentropy()
    loss, gradient = loss_and_gradient(x, tf.constant([1]), loss, Float32(make()))
    np.testing.assert_allclose((loss, gradient[0, 0]), (180.0, 1.0))


@pytest.mark.parametrize("policy", ["mixed_float16", "float16", "mixed_bfloat16"])
def test_batch_normalization_has_float32_weights_and_output_in_the_compute_dtype(policy):
    with kmp.enable(policy):
        layer = BatchNormalization()
    output = layer(ops.ones((4, 3)), training=True)
    assert {keras.backend.standardize_dtype(v.dtype) for v in layer.weights} == {"float32"}
    assert keras.backend.standardize_dtype(output.dtype) == policy.removeprefix("mixed_")


# Keras 3.13 does not support `renorm`.
RENORM = {"renorm": True} if hasattr(keras.layers.BatchNormalization(), "renorm") else {}


@pytest.mark.parametrize(
    ("run_step", "options"),
    [("eager", {"scale": False, "center": False}), ("graph", RENORM)],
    indirect=["run_step"],
)
def test_batch_normalization_matches_keras_for_finite_batches_and_ignores_others(
    enabled, run_step, options
):
    layer, keras_layer = BatchNormalization(**options), keras.layers.BatchNormalization(**options)
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float16")
    layer(x), keras_layer(x)
    step, keras_step = (
        run_step(lambda x, each=each: each(x, training=True)) for each in (layer, keras_layer)
    )
    np.testing.assert_array_equal(step(tf.constant(x)), keras_step(tf.constant(x)))
    assert_equal(layer.weights, keras_layer.weights)
    before = values(layer.non_trainable_variables)
    for x[2, 1] in (np.nan, np.inf):
        step(tf.constant(x))
        assert_equal(layer.non_trainable_variables, before)


def test_batch_normalization_is_called_without_state():
    layer, x = BatchNormalization(), tf.constant([[1.0], [3.0]])
    layer.build(x.shape)
    states = [
        [v.value for v in each]
        for each in (layer.trainable_variables, layer.non_trainable_variables)
    ]
    call = tf.function(lambda x: layer.stateless_call(*states, x, training=True))
    for batch, expected in ((x, 0.02), (x * np.inf, 0.0)):
        _, (moving_mean, *_) = call(batch)
        np.testing.assert_allclose(moving_mean, [expected], rtol=1e-5)
    np.testing.assert_array_equal(layer.moving_mean, [0.0])


def test_batch_normalization_and_softmax_keep_their_dtypes_after_save_and_load(enabled, tmp_path):
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3), BatchNormalization(), Softmax()]
    )
    model.save(tmp_path / "model.keras")
    kmp.disable()
    loaded = keras.models.load_model(tmp_path / "model.keras")
    dense, normalization, softmax = loaded.layers
    assert isinstance(normalization, BatchNormalization)
    assert isinstance(softmax, Softmax)
    assert [layer.compute_dtype for layer in (dense, normalization, softmax)] == [
        "float16",
        "float16",
        "float32",
    ]
    assert normalization.moving_mean.dtype == "float32"


def test_float32_operation_is_finite_beyond_the_float16_range_and_does_not_cast_integers():
    squared = Float32Operation(
        ops.power(keras.Input((1,)), 2)._keras_history.operation, name="squared"
    )
    outputs = squared(ops.full((1, 1), 300.0, "float16"), 2)
    assert outputs.dtype == "float32"
    # On a GPU the last few bits of `power` differ.
    assert float(outputs[0, 0]) == pytest.approx(90000.0, rel=2**-21)
    inputs = keras.Input((4,), dtype="int32")
    operation = Float32Operation(ops.where(inputs > 0, inputs, inputs)._keras_history.operation)
    assert operation(*[ops.ones((1, 4), "int32")] * 3).dtype == "int32"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Float32Operation(ops.softmax(keras.Input((4,)))._keras_history.operation),
        lambda: Float32(keras.layers.LayerNormalization()),
    ],
    ids=["operation", "layer"],
)
def test_input_of_float32_may_be_a_tensor_times_a_number_which_keras_takes_for_sparse(make):
    inputs = keras.Input((4,))
    scaled = inputs * 0.125
    model = keras.Model(inputs, make()(scaled))
    assert model.output.dtype == "float32"
    assert np.isfinite(model(np.full((2, 4), 3.0, "float32"))).all()


class Doubled(keras.layers.Layer):
    """Has no shape of its own: Keras traces `call`, with an operation that is not for sparse."""

    def call(self, x):
        return 2.0 * x / ops.norm(x, axis=-1, keepdims=True)


@pytest.mark.parametrize("make", [lambda: root_of_sum_of_squares, Doubled], ids=["function", "own"])
def test_functions_in_float32_follow_each_other_with_a_product_in_between(enabled, make):
    inputs = keras.Input((4,))
    first, second = Float32(make()), Float32(make())
    hidden = first(keras.layers.Dense(4)(inputs)) * 3.0
    model = keras.Model(inputs, first(second(-hidden * 2.0) + 1.0))
    x = np.ones((2, 4), "float32")
    expected = first(second(-first(model.layers[1](x)) * 3.0 * 2.0) + 1.0)
    np.testing.assert_allclose(model(x), expected, rtol=1e-2)


def test_function_in_float32_gets_a_sparse_tensor_times_a_number(enabled):
    inputs = keras.Input((4,), sparse=True)
    model = keras.Model(inputs, Float32(lambda x: ops.matmul(x, ops.ones((4, 2))))(inputs * 2.0))
    x = tf.sparse.from_dense(np.ones((2, 4), "float32"))
    np.testing.assert_array_equal(model(x), np.full((2, 2), 8.0))


@pytest.mark.parametrize("mode", ["int8", "int4", "float8"])
def test_float32_around_a_quantized_layer_keeps_its_quantization(enabled, tmp_path, mode):
    dense, plain = (keras.layers.Dense(4, dtype=dtype) for dtype in ("mixed_bfloat16", "float32"))
    x = np.random.default_rng(0).normal(size=(2, 8)).astype("float32")
    for layer in (dense, plain):
        layer.build((None, 8))
    plain.set_weights(dense.get_weights())
    for layer in (dense, plain):
        layer.quantize(mode)
    expected = plain(x)

    wrapped = keras.Sequential([keras.Input((8,), dtype="float32"), Float32(dense)])
    assert (dense.quantization_mode, dense.compute_dtype) == (mode, "float32")
    np.testing.assert_array_equal(wrapped(x), expected)
    wrapped.save(tmp_path / "wrapped.keras")
    loaded = keras.models.load_model(tmp_path / "wrapped.keras")
    assert loaded.layers[0].layer.quantization_mode == mode
    np.testing.assert_array_equal(loaded(x), expected)


def test_quantized_layer_that_needs_float32_keeps_its_quantization(enabled):
    policy = "int8_from_mixed_bfloat16"
    dense = keras.layers.Dense(2, activity_regularizer="l2", dtype=policy)
    assert dense.dtype_policy.name == "int8_from_float32"
