import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import values
from keras import ops

import kmp
from kmp.layers import BatchNormalization, Float32, Softmax

# Keras 3.12 has no renorm.
OPTIONS = [{}, {"renorm": True}] if hasattr(keras.layers.BatchNormalization(), "renorm") else [{}]
HALF = ["mixed_float16", "float16", "mixed_bfloat16"]


@keras.saving.register_keras_serializable(package="kmp_tests")
def root_of_sum_of_squares(x):
    return ops.sqrt(ops.sum(ops.square(x), axis=-1, keepdims=True))


WRAPPED = {
    "dense": lambda: keras.layers.Dense(3),
    "lstm": lambda: keras.layers.LSTM(3),
    "sequential": lambda: keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(2)]),
    "attention": lambda: keras.layers.MultiHeadAttention(num_heads=2, key_dim=3),
    "normalization": keras.layers.LayerNormalization,
    "function": lambda: root_of_sum_of_squares,
}


def wrapped_model(name):
    inputs = keras.Input((5, 4))
    hidden = keras.layers.Dense(4)(inputs)
    layer = Float32(WRAPPED[name](), name="island")
    outputs = layer(hidden, hidden) if name == "attention" else layer(hidden)
    return keras.Model(inputs, outputs)


@pytest.mark.parametrize("name", WRAPPED)
def test_float32_is_bit_for_bit_the_layer_in_float32(enabled, name):
    model = wrapped_model(name)
    x = np.random.default_rng(0).normal(size=(2, 5, 4)).astype("float32")
    hidden = ops.cast(model.layers[1](x), "float32")
    island = model.get_layer("island").layer
    expected = island(hidden, hidden) if name == "attention" else island(hidden)
    assert model.output.dtype == "float32"
    np.testing.assert_array_equal(model(x), expected)
    if isinstance(island, keras.layers.Layer):
        assert {layer.compute_dtype for layer in island._flatten_layers()} == {"float32"}


@pytest.mark.parametrize("name", WRAPPED)
def test_float32_stays_float32_after_save_and_load(enabled, tmp_path, name):
    model = wrapped_model(name)
    x = np.random.default_rng(0).normal(size=(2, 5, 4)).astype("float32")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.get_layer("island").compute_dtype == "float32"
    assert loaded.layers[1].compute_dtype == "float16"
    np.testing.assert_array_equal(loaded(x), model(x))


def test_float32_saves_where_float16_overflows(enabled):
    x = ops.full((1, 4096), 8.0, dtype="float16")
    assert not np.isfinite(float(root_of_sum_of_squares(x)[0, 0]))
    assert float(Float32(root_of_sum_of_squares)(x)[0, 0]) == 512.0


def test_float32_passes_on_training(enabled):
    dropout = Float32(keras.layers.Dropout(0.5))
    x = ops.ones((4, 64), dtype="float16")
    assert float(ops.min(dropout(x, training=True))) == 0.0
    np.testing.assert_array_equal(dropout(x, training=False), np.ones((4, 64)))


def test_float32_passes_on_masks(enabled):
    x = np.random.default_rng(0).normal(size=(1, 6, 2)).astype("float32")
    x[:, 4:] = 0
    outputs = []
    for make in (lambda: Float32(keras.layers.LSTM(3)), lambda: keras.layers.LSTM(3, dtype="float32")):
        keras.utils.set_random_seed(0)
        outputs.append(keras.Sequential([keras.layers.Masking(), make()])(x))
    np.testing.assert_array_equal(*outputs)
    wrapped = Float32(keras.layers.Masking())
    assert wrapped.compute_mask(ops.convert_to_tensor(x)).numpy().tolist() == [[True] * 4 + [False] * 2]


def test_float32_leaves_integers_alone(enabled):
    found = Float32(lambda x: ops.argmax(x, axis=-1))(ops.ones((2, 3), dtype="float16"))
    assert keras.backend.standardize_dtype(found.dtype) == "int32"


@pytest.mark.parametrize("make", [lambda dtype: Float32(ops.exp, dtype=dtype), lambda dtype: Softmax(dtype=dtype)])
def test_float32_layers_refuse_another_dtype(make):
    with pytest.raises(ValueError, match=r"`dtype` must be float32.*float16"):
        make("mixed_float16")


@pytest.mark.parametrize("layer", [3, None, keras.layers.Dense])
def test_float32_refuses_what_is_no_layer_or_function(layer):
    with pytest.raises(TypeError, match="`layer` must be"):
        Float32(layer)


def test_float32_refuses_a_layer_that_has_half_precision_variables():
    with kmp.enable("float16"):
        built = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        with pytest.raises(ValueError, match="half precision already: .*kernel"):
            Float32(built)


def test_float32_tells_a_function_whether_it_is_training():
    layer = Float32(lambda x, training=None: x * 0 if training else x)
    ones = np.ones((1, 2), "float32")
    assert float(ops.max(keras.Sequential([layer])(ones, training=True))) == 0.0
    assert float(ops.max(keras.Sequential([layer])(ones, training=False))) == 1.0


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Softmax(axis="x"), "`axis` must be an integer.*'x'"),
        (lambda: Softmax(axis=[0, 1.5]), "axis=1.5"),
        (lambda: BatchNormalization(axis=1.5), "axis=1.5"),
        (lambda: BatchNormalization(momentum=-1), "`momentum` must be.*-1"),
        (lambda: BatchNormalization(momentum=np.nan), "momentum=nan"),
        (lambda: BatchNormalization(epsilon=0), "`epsilon` must be.*epsilon=0"),
        (lambda: BatchNormalization(epsilon=np.inf), "epsilon=inf"),
    ],
)
def test_bad_argument_of_a_layer_is_an_error_that_names_it(make, match):
    with pytest.raises((ValueError, TypeError), match=match):
        make()


def loss_and_gradient(logits, labels, loss, outputs_of):
    with tf.GradientTape() as tape:
        tape.watch(logits)
        value = loss(labels, outputs_of(logits))
    return value, tape.gradient(value, logits)


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "one-hot"])
def test_cross_entropy_on_softmax_is_that_of_logits(enabled, run_step, sparse):
    logits = tf.constant([[30.0, -30.0, 0.0], [-30.0, 30.0, 30.0], [0.5, -0.25, 2.0]], tf.float16)
    labels = tf.constant([1, 0, 2]) if sparse else tf.one_hot([1, 0, 2], 3)
    kind = keras.losses.SparseCategoricalCrossentropy if sparse else keras.losses.CategoricalCrossentropy
    softmax = Softmax()
    mine = run_step(lambda x: loss_and_gradient(x, labels, kind(), softmax))(logits)
    ideal = run_step(lambda x: loss_and_gradient(tf.cast(x, tf.float32), labels, kind(from_logits=True), ops.copy))(
        logits
    )
    np.testing.assert_allclose(mine[0], ideal[0], rtol=1e-6)
    np.testing.assert_allclose(mine[1], tf.cast(ideal[1], tf.float16), rtol=1e-3)
    assert float(tf.reduce_min(tf.abs(mine[1][0, :2]))) > 0.3


def test_gradient_through_softmax_and_loss_in_fit_is_that_of_logits(enabled, compile_mode):
    x, labels = np.array([[30.0, -30.0], [-30.0, 30.0]], "float32"), np.array([1, 0])

    def trained(*last, **loss):
        scaler = keras.layers.Dense(2, use_bias=False, kernel_initializer="identity")
        model = keras.Sequential([keras.Input((2,)), scaler, *last])
        optimizer = kmp.LossScaleOptimizer(keras.optimizers.SGD(1e-3), initial_scale=256.0)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(**loss), **compile_mode)
        model.fit(x, labels, batch_size=2, verbose=0)
        return model.get_weights()[0]

    to_float32 = keras.layers.Activation("linear", dtype="float32")
    with_softmax, with_logits = trained(Softmax()), trained(to_float32, from_logits=True)
    np.testing.assert_allclose(with_softmax, with_logits, rtol=1e-6)
    assert np.abs(with_softmax - np.eye(2)).min() > 0.01


@pytest.mark.parametrize(
    "wrap", [lambda: Float32(keras.layers.Softmax()), lambda: Float32(keras.layers.Dense(2, "softmax"))]
)
def test_float32_around_softmax_keeps_the_logits(enabled, wrap):
    layer = wrap()
    x = tf.constant([[90.0, -90.0]], tf.float16)
    layer(x)
    if hasattr(layer.layer, "kernel"):
        layer.layer.kernel.assign(np.eye(2))
    loss, gradient = loss_and_gradient(x, tf.constant([1]), keras.losses.SparseCategoricalCrossentropy(), layer)
    np.testing.assert_allclose((loss, gradient[0, 0]), (180.0, 1.0))


@pytest.mark.parametrize("policy", HALF)
def test_batch_normalization_has_float32_statistics_and_the_policys_output(policy):
    with kmp.enable(policy):
        layer = BatchNormalization()
    out = layer(ops.ones((4, 3)), training=True)
    assert {keras.backend.standardize_dtype(v.dtype) for v in layer.weights} == {"float32"}
    assert keras.backend.standardize_dtype(out.dtype) == policy.removeprefix("mixed_")


@pytest.mark.parametrize("options", [*OPTIONS, {"scale": False, "center": False}], ids=str)
def test_batch_normalization_learns_as_keras_does_from_finite_batches(enabled, options, run_step):
    mine, stock = BatchNormalization(**options), keras.layers.BatchNormalization(**options)
    x = tf.constant(np.random.default_rng(0).normal(size=(8, 3)), tf.float16)
    mine(x), stock(x)
    a, b = run_step(lambda x: mine(x, training=True))(x), run_step(lambda x: stock(x, training=True))(x)
    np.testing.assert_array_equal(a, b)
    for found, expected in zip(values(mine.weights), values(stock.weights), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_batch_normalization_does_not_learn_from_a_nonfinite_batch(enabled, options, bad, run_step):
    layer = BatchNormalization(**options)
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float16")
    layer(tf.constant(x))
    step = run_step(lambda x: layer(x, training=True))
    step(tf.constant(x))
    before = values(layer.non_trainable_variables)
    x[2, 1] = bad
    step(tf.constant(x))
    for old, new in zip(before, values(layer.non_trainable_variables), strict=True):
        np.testing.assert_array_equal(old, new)


def test_predict_is_finite_after_an_outlier_overflows_before_batch_normalization(enabled):
    layers = [keras.layers.Dense(32), BatchNormalization(), keras.layers.ReLU(), keras.layers.Dense(1, dtype="float32")]
    model = keras.Sequential([keras.Input((16,)), *layers])
    model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(80, 16)).astype("float32")
    y = x[:, :1].copy()
    x[40] = 6e4
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert model.optimizer.snapshot().nonfinite_loss_count == 1
    assert np.isfinite(model.predict(x[:8], verbose=0)).all()


def test_batch_normalization_and_softmax_stay_as_they_are_after_save_and_load(enabled, tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), BatchNormalization(), Softmax()])
    model.save(tmp_path / "model.keras")
    kmp.disable()
    loaded = keras.models.load_model(tmp_path / "model.keras")
    dense, normalization, softmax = loaded.layers
    assert isinstance(normalization, BatchNormalization)
    assert isinstance(softmax, Softmax)
    assert [layer.compute_dtype for layer in (dense, normalization, softmax)] == ["float16", "float16", "float32"]
    assert normalization.moving_mean.dtype == "float32"
