import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from kmp.gradients import nonfinite_flags, unscale_for_update

LARGEST = float(np.finfo(np.float32).max)
DTYPES = ["float16", "bfloat16", "float32", "float64"]
SHAPES = [(), (3,), (0,), (5, 7), (512,), (300, 300), (257, 256), (8, 9, 3), (65_537,)]


def variables_like(gradients, dtype="float32"):
    return [keras.Variable(np.zeros(g.shape), dtype=dtype) for g in gradients]


def flags(gradients, variables, scale, decorate, replicas=1):
    step = decorate(lambda *g: nonfinite_flags(g, variables, tf.constant(scale), replicas))
    return step(*gradients).numpy().tolist()


def test_only_the_gradient_with_a_nonfinite_element_is_flagged(run_step):
    largest = [np.full(shape, LARGEST, "float32") for shape in SHAPES]
    variables = variables_like(largest)
    step = run_step(lambda gradients: nonfinite_flags(gradients, variables, tf.constant(1.0), 1))
    for index, shape in enumerate(SHAPES):
        for element in {0, int(np.prod(shape)) - 1} if np.prod(shape) else set():
            for nonfinite in (np.nan, np.inf, -np.inf):
                gradients = [gradient.copy() for gradient in largest]
                gradients[index].flat[element] = nonfinite
                flagged = step([tf.constant(gradient) for gradient in gradients])
                assert flagged.numpy().tolist() == [float(i == index) for i in range(len(SHAPES))]


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2000), st.booleans()), min_size=1, max_size=8), st.randoms(use_true_random=False)
)
def test_gradients_of_any_sizes_are_flagged_under_xla(tensors, random):
    gradients = [np.ones(size, "float32") for size, _ in tensors]
    for gradient, (size, is_nonfinite) in zip(gradients, tensors, strict=True):
        if size and is_nonfinite:
            gradient[random.randrange(size)] = np.nan
    flagged = flags([tf.constant(g) for g in gradients], variables_like(gradients), 1.0, tf.function(jit_compile=True))
    assert flagged == [float(bool(size and is_nonfinite)) for size, is_nonfinite in tensors]


def test_scale_below_1_and_replicas_can_make_a_finite_gradient_infinite(run_step):
    gradients = [tf.constant([1.0]), tf.constant([LARGEST])]
    variables = variables_like(gradients)
    assert flags(gradients, variables, 1.0, run_step) == [0.0, 0.0]
    assert flags(gradients, variables, 0.5, run_step) == [0.0, 1.0]
    assert flags(gradients, variables, 1.0, run_step, replicas=2) == [0.0, 1.0]
    assert flags(gradients, variables, 2.0, run_step, replicas=2) == [0.0, 0.0]


def test_missing_sparse_and_overwritten_gradients_keep_their_indices(run_step):
    sparse = tf.IndexedSlices(tf.constant([[1.0, np.nan]]), tf.constant([2]), tf.constant([4, 2]))
    overwritten = keras.Variable([0.0])
    overwritten.overwrite_with_gradient = True
    gradients = [None, sparse, tf.constant([LARGEST]), tf.constant([8.0])]
    variables = [keras.Variable([0.0]), keras.Variable(np.zeros((4, 2))), overwritten, keras.Variable([0.0])]
    scale = tf.constant(0.5)
    flagged = run_step(lambda: nonfinite_flags(gradients, variables, scale, 1))()
    assert flagged.numpy().tolist() == [0.0, 1.0, 0.0, 0.0]

    @run_step
    def unscaled():
        _, rows, unchanged, dense = unscale_for_update(gradients, variables, scale)
        return rows.values, rows.indices, unchanged, dense

    values, indices, unchanged, dense = unscaled()
    np.testing.assert_array_equal(values, [[2.0, np.nan]])
    assert (indices.numpy().tolist(), unchanged.numpy().tolist(), dense.numpy().tolist()) == ([2], [LARGEST], [16.0])


@pytest.mark.parametrize(
    ("dtype", "gradient_dtype", "largest", "scale", "is_flagged"),
    [
        *[(dtype, gradient, 4e4, 0.25, dtype == "float16") for dtype in DTYPES for gradient in DTYPES],
        ("float32", "float64", 2e38 * 1024.0, 1024.0, False),  # beyond float32 before, not after
    ],
)
def test_gradient_is_unscaled_and_flagged_in_its_variables_dtype(
    dtype, gradient_dtype, largest, scale, is_flagged, run_step
):
    gradient, variable = tf.constant([3.0, largest], gradient_dtype), keras.Variable([0.0, 0.0], dtype=dtype)
    scale = tf.constant(scale)
    arguments = [gradient], [variable], scale
    unscaled, flag = run_step(lambda: (unscale_for_update(*arguments)[0], nonfinite_flags(*arguments, replicas=1)))()
    assert unscaled.dtype == dtype
    expected = tf.cast(tf.cast(gradient, "float64") / tf.cast(scale, "float64"), dtype)
    np.testing.assert_array_equal(unscaled, expected)
    assert flag.numpy().tolist() == [float(is_flagged)]


@pytest.mark.parametrize("exponent", [-126, -14, 0, 15, 100, 126])
def test_division_by_any_applied_scale_is_exact(exponent, run_step):
    gradient = tf.constant([2.0 ** min(127, max(-120, exponent)), 0.0])
    scale = tf.constant(2.0**exponent)
    variables = variables_like([gradient])
    divided = run_step(lambda g: unscale_for_update([g], variables, scale)[0])
    np.testing.assert_array_equal(divided(gradient), gradient / scale)
