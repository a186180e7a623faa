"""Where 16-bit tensors meet float32 ones, TensorFlow computes in float32, under `enable` only."""

import contextlib
import logging
import traceback
from pathlib import Path

import keras
import numpy as np
import optree
import pytest
import tensorflow as tf

import kmp
from kmp.backend import promotion

ROWS = 3
ADJACENCY = tf.sparse.from_dense(np.eye(ROWS, dtype="float32"))

# Functions of a 16-bit tensor `a` and a float32 tensor `b`, both of shape (3, 3).
PROMOTED = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: b - a,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: b // a,
    "%": lambda a, b: a % b,
    "**": lambda a, b: a**b,
    "@": lambda a, b: a @ b,
    "<": lambda a, b: a < b,
    ">=": lambda a, b: b >= a,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: b != a,
    "add": tf.add,
    "maximum": tf.maximum,
    "squared_difference": lambda a, b: tf.math.squared_difference(b, a),
    "divide_no_nan": tf.math.divide_no_nan,
    "matmul": tf.matmul,
    "einsum": lambda a, b: tf.einsum("ij,jk->ik", a, b),
    "tensordot": lambda a, b: tf.tensordot(a, b, 1),
    "concat": lambda a, b: tf.concat([a, b], 0),
    "stack": lambda a, b: tf.stack([b, a]),
    "add_n": lambda a, b: tf.add_n([a, b]),
    "where": lambda a, b: tf.where(a > 0, a, b),
    "clip_by_value": lambda a, b: tf.clip_by_value(a, b, 2 * b),
    "linspace": lambda a, b: tf.linspace(a[0, 0], b[0, 0], 4),
    "one_hot": lambda a, b: tf.one_hot([0], 3, on_value=a[0, 0], off_value=b[0, 0]),
    "pad": lambda a, b: tf.pad(a, [[1, 1], [0, 0]], constant_values=b[0, 0]),
    "scatter": lambda a, b: tf.tensor_scatter_nd_update(a, [[0]], b[:1]),
    "sparse matmul": lambda a, b: tf.sparse.sparse_dense_matmul(ADJACENCY, a),
    "cross entropy": lambda a, b: tf.nn.sigmoid_cross_entropy_with_logits(labels=b, logits=a),
    "bias_add": lambda a, b: tf.nn.bias_add(a, b[0]),
    "map_fn": lambda a, b: tf.map_fn(
        lambda rows: rows[0] * rows[1], (a, b), fn_output_signature=tf.float32
    ),
    "random.normal": lambda a, b: tf.random.normal((3, 3), mean=a),
    "convert_to_tensor": lambda a, b: tf.convert_to_tensor(a, tf.float32),
    "a variable": lambda a, b: a * WEIGHT,
    "a variable first": lambda a, b: WEIGHT.value - a,
}
WEIGHT = keras.Variable(np.full((3, 3), 3.0, "float32"))

STILL_REFUSED = {
    "float64": lambda a, b: a * tf.cast(b, tf.float64),
    "float32 and float64": lambda a, b: b * tf.cast(b, tf.float64),
    "integers": lambda a, b: a * tf.ones((3, 3), tf.int32),
    "float16 and bfloat16": lambda a, b: tf.cast(b, "float16") * tf.cast(b, "bfloat16"),
    "three dtypes": lambda a, b: tf.concat([a, b, tf.cast(b, tf.float64)], 0),
    "shapes": lambda a, b: a * tf.ones((2, 5)),
    "assign": lambda a, b: WEIGHT.value.assign(a),
    "assign_add": lambda a, b: WEIGHT.value.assign_add(a),
    "assign of version 1": lambda a, b: tf.compat.v1.assign(WEIGHT.value, a),
    "scatter_sub": lambda a, b: tf.compat.v1.scatter_sub(WEIGHT.value, [0], a[:1]),
}
ERRORS = (TypeError, ValueError, tf.errors.InvalidArgumentError)


def operands(dtype):
    values = np.arange(1.0, 10.0, dtype="float32").reshape(3, 3) / 4
    return tf.constant(values, dtype), tf.constant(values.T)


def in_graph(function, *args):
    """Runs a function in a graph; without autograph, which cannot read a lambda of a table."""
    return tf.function(function, autograph=False)(*args)


@pytest.fixture(params=["eager", "graph"])
def run(request):
    return in_graph if request.param == "graph" else lambda function, *args: function(*args)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_operands_are_promoted_to_float32(run, dtype):
    a, b = operands(dtype)
    with kmp.enable("mixed_" + dtype):
        for name, function in PROMOTED.items():
            keras.utils.set_random_seed(1)
            found = run(function, a, b)
            keras.utils.set_random_seed(1)
            expected = run(function, tf.cast(a, tf.float32), b)
            assert found.dtype == expected.dtype, name
            # What a function computes of the 16-bit tensor alone stays in 16 bits.
            tolerance = 1e-2 if name == "cross entropy" else 0
            np.testing.assert_allclose(
                found, expected, rtol=tolerance, atol=tolerance, err_msg=name
            )


def test_promotion_works_under_xla():
    a, b = operands("float16")
    names = ["*", "/", "concat", "where", "matmul", "einsum", "stack"]

    def compute(a, b):
        return [PROMOTED[name](a, b) for name in names]

    with kmp.enable():
        found = tf.function(compute, jit_compile=True, autograph=False)(a, b)
    assert {each.dtype for each in found} == {tf.float32}


def test_other_errors_of_tensorflow_stay(run):
    a, b = operands("float16")
    before = WEIGHT.numpy()
    with kmp.enable():
        for name, function in STILL_REFUSED.items():
            found = None
            with contextlib.suppress(*ERRORS):
                found = run(function, a, b)
            assert found is None, name
    assert np.array_equal(WEIGHT, before)


def test_operands_that_tensorflow_accepts_keep_their_dtype(run):
    """An array or a number takes the dtype of the tensor, as without kmp."""
    a, b = operands("float16")
    with kmp.enable():
        assert run(lambda a: a * np.ones((3, 3), "float32"), a).dtype == tf.float16
        assert run(lambda a: 2.0 * a + 1, a).dtype == tf.float16
        assert run(lambda b: b * 2.0, b).dtype == tf.float32


def test_tensorflow_raises_before_enable_and_after_disable(run):
    a, b = operands("float16")
    for enabled in (False, True, False):
        if enabled:
            with kmp.enable():
                run(tf.multiply, a, b)
        for function in (tf.multiply, tf.maximum, PROMOTED["/"], PROMOTED["sparse matmul"]):
            with pytest.raises(ERRORS):
                run(function, a, b)


def test_gradients_pass_through_the_promotion(run):
    a, b = operands("float16")

    def gradients(a, b):
        with tf.GradientTape() as tape:
            tape.watch([a, b])
            value = tf.reduce_sum(tf.maximum(a * b, b - a))
        return tape.gradient(value, [a, b])

    with kmp.enable():
        of_a, of_b = run(gradients, a, b)
        expected = gradients(tf.cast(a, tf.float32), b)
    assert (of_a.dtype, of_b.dtype) == (tf.float16, tf.float32)
    np.testing.assert_allclose(of_a, expected[0], rtol=1e-3)
    np.testing.assert_allclose(of_b, expected[1], rtol=1e-6)


def test_operands_whose_shapes_differ_have_the_error_of_shapes(run):
    a, _ = operands("float16")
    match = r"must be equal, but are 3 and 2|\[3,3\] vs. \[2,5\]"
    with kmp.enable(), pytest.raises(ERRORS, match=match):
        run(lambda a: a * tf.ones((2, 5)), a)


def test_function_among_the_arguments_runs_once():
    """It gets the tensors that the user passes, and may have changed something."""
    calls = []

    def fails(pair):
        calls.append(pair[0].dtype)
        raise ValueError("of the user")

    a, b = operands("float16")
    with kmp.enable(), pytest.raises(ValueError, match="of the user"):
        tf.map_fn(fails, (a, b), fn_output_signature=tf.float32)
    assert calls == [tf.float16]


def test_the_log_names_each_line_once(caplog, monkeypatch):
    monkeypatch.setattr(promotion, "_logged", set())
    a, b = operands("float16")

    @tf.function
    def converted_by_autograph(a, b):
        if tf.reduce_sum(b) > 0:
            a = tf.cast(a * b, a.dtype)  # this line
        return a

    with kmp.enable(), caplog.at_level(logging.WARNING, "kmp"):
        caplog.clear()
        for _ in range(2):
            a / b  # and this one
        converted_by_autograph(a, b)
    lines = [record.getMessage() for record in caplog.records]
    source = enumerate(Path(__file__).read_text().splitlines(), start=1)
    numbers = [number for number, line in source if line.endswith(("# this line", "this one"))]
    expected = [f"{__file__}, line {number} " for number in sorted(numbers, reverse=True)]
    assert [line[: len(each)] for line, each in zip(lines, expected, strict=True)] == expected
    assert "tf.cast(..., 'float16')" in lines[0]


def test_audit_and_advice_name_the_lines(enabled):
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3), Noisy(), keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse", jit_compile=False)
    x = np.ones((32, 4), "float32")
    (monitor,) = callbacks = kmp.callbacks.defaults()
    model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=callbacks)
    source = Path(__file__).read_text().splitlines()
    line = 1 + next(number for number, each in enumerate(source) if each.endswith("# the noise"))
    place = f"{__file__}, line {line} (Mul of float16 and float32)"
    assert place in monitor.run.settings.promoted
    assert f"Computed in float32, because one operand is float32: {place}" in " ".join(
        kmp.advise(monitor.run).verdict.split()
    )
    assert any(f"line {line}" in note for note in kmp.audit(model, x).notes)


@keras.saving.register_keras_serializable("tests.promotion")
class Noisy(keras.layers.Layer):
    """Adds noise of TensorFlow, which is float32."""

    def call(self, x):
        x = x * tf.random.normal(tf.shape(x))  # the noise
        return tf.concat([x, tf.ones((tf.shape(x)[0], 1))], -1)


def test_models_made_under_enable_promote_after_it(tmp_path):
    with kmp.enable():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(3), Noisy(), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse", jit_compile=False)
    kmp.disable()
    x = np.ones((8, 4), "float32")
    model.fit(x, x[:, :1], validation_data=(x, x[:, :1]), verbose=0)
    assert np.isfinite(model.predict(x, verbose=0)).all()
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded(x).dtype == model(x).dtype
    with pytest.raises(ERRORS):
        tf.multiply(*operands("float16"))


def test_slices_with_lists_as_indices_are_added(enabled):
    b = tf.ones((2, 2))
    total = tf.add_n([tf.IndexedSlices(b, [0, 1], tf.constant([2, 2])), b])
    np.testing.assert_array_equal(total, np.full((2, 2), 2.0))


def test_converted_model_promotes_without_enable():
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3), Noisy(), keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse", jit_compile=False)
    x = np.ones((8, 4), "float32")
    in_graph, eager = kmp.convert(model), kmp.convert(model, batch=x)
    eager.run_eagerly = True
    for converted in (in_graph, eager):
        assert converted.layers[1].compute_dtype == "float16"
        assert converted(x).dtype == tf.float32
        assert np.isfinite(converted.predict(x, verbose=0)).all()
        converted.fit(x, x[:, :1], verbose=0, callbacks=kmp.callbacks.defaults())
    with pytest.raises(ERRORS):
        tf.multiply(*operands("float16"))


def test_libraries_by_which_keras_maps_structures_are_not_the_users_code():
    frames = [traceback.FrameSummary("train.py", 7, "train")]
    for module in (keras, optree):
        frames.append(traceback.FrameSummary(module.__file__, 1, "map_structure"))
    assert promotion.line_of_user(frames) == ("train.py", 7)
