import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from kmp.backend import xla
from kmp.gradients.unscaling import nonfinite_flags, unscale_for_update

LARGEST = float(np.finfo(np.float32).max)
DTYPES = ["float16", "bfloat16", "float32", "float64"]
SHAPES = [(), (3,), (0,), (5, 7), (512,), (300, 300), (257, 256), (8, 9, 3), (1025,), (65_537,)]


def variables_like(gradients):
    return [keras.Variable(np.zeros(gradient.shape, "float32")) for gradient in gradients]


@pytest.mark.parametrize(("has_gpu", "branches"), [(True, 0), (False, 1)])
def test_compiled_check_has_a_branch_only_where_no_gpu_waits_for_it(has_gpu, branches, monkeypatch):
    monkeypatch.setattr(xla, "has_gpu", lambda: has_gpu)
    gradients = [np.full(shape, LARGEST, "float32") for shape in SHAPES]
    variables = variables_like(gradients)

    @tf.function(jit_compile=True, autograph=False)
    def flags(gradients):
        return nonfinite_flags(gradients, variables, tf.constant(1.0), 1)

    hlo = flags.experimental_get_compiler_ir(gradients)(stage="hlo")
    assert hlo.count("conditional(") == branches
    assert flags(gradients).numpy().sum() == 0.0  # their sum is infinite
    gradients[-1][7] = np.nan
    assert flags(gradients).numpy().tolist() == [0.0] * (len(SHAPES) - 1) + [1.0]


@pytest.mark.parametrize("run_step", ["graph", "xla"], indirect=True)
def test_only_the_gradients_with_a_nonfinite_element_are_flagged(run_step):
    largest = [np.full(shape, LARGEST, "float32") for shape in SHAPES]
    variables = variables_like(largest)
    step = run_step(lambda gradients: nonfinite_flags(gradients, variables, tf.constant(1.0), 1))

    def flags(places, nonfinite):
        """Returns the flags if elements are non-finite: pairs of gradient and element."""
        gradients = [gradient.copy() for gradient in largest]
        for index, element in places:
            gradients[index].flat[element] = nonfinite
        return step([tf.constant(gradient) for gradient in gradients]).numpy().tolist()

    sizes = [gradient.size for gradient in largest]
    places = [
        (index, element) for index, size in enumerate(sizes) if size for element in (0, size - 1)
    ]
    for place, nonfinite in zip(places, itertools.cycle((np.nan, np.inf, -np.inf)), strict=False):
        assert flags([place], nonfinite) == [
            float(index == place[0]) for index in range(len(SHAPES))
        ]
    assert flags(places, np.nan) == [float(size > 0) for size in sizes]


def test_scale_below_1_and_replicas_can_make_a_finite_gradient_infinite(run_step):
    gradients = [tf.constant([1.0]), tf.constant([LARGEST])]
    variables = variables_like(gradients)
    expected = {
        (1.0, 1): [0.0, 0.0],
        (0.5, 1): [0.0, 1.0],
        (1.0, 2): [0.0, 1.0],
        (2.0, 2): [0.0, 0.0],
    }
    flags = run_step(
        lambda: [
            nonfinite_flags(gradients, variables, tf.constant(scale), n) for scale, n in expected
        ]
    )
    assert [flag.numpy().tolist() for flag in flags()] == list(expected.values())


def test_missing_sparse_and_overwritten_gradients_keep_their_indices(run_step):
    sparse = tf.IndexedSlices(tf.constant([[1.0, np.nan]]), tf.constant([2]), tf.constant([4, 2]))
    overwritten = keras.Variable([0.0])
    overwritten.overwrite_with_gradient = True
    gradients = [None, sparse, tf.constant([LARGEST]), tf.constant([8.0])]
    variables = [
        keras.Variable([0.0]),
        keras.Variable(np.zeros((4, 2))),
        overwritten,
        keras.Variable([0.0]),
    ]
    scale = tf.constant(0.5)

    @run_step
    def flags_and_unscaled():
        _, rows, unchanged, dense = unscale_for_update(gradients, variables, scale)
        return (
            nonfinite_flags(gradients, variables, scale, 1),
            rows.values,
            rows.indices,
            unchanged,
            dense,
        )

    flags, values, indices, unchanged, dense = (
        tensor.numpy().tolist() for tensor in flags_and_unscaled()
    )
    assert flags == [0.0, 1.0, 0.0, 0.0]
    np.testing.assert_array_equal(values, [[2.0, np.nan]])
    assert (indices, unchanged, dense) == ([2], [LARGEST], [16.0])


@pytest.mark.parametrize(
    ("pairs", "largest", "scale", "flagged"),
    [
        (list(itertools.product(DTYPES, DTYPES)), 4e4, 0.25, {"float16"}),
        # Beyond float32 before, not after.
        ([("float32", "float64")], 2e38 * 1024.0, 1024.0, set()),
    ],
    ids=["every pair", "large float64"],
)
def test_gradients_are_unscaled_and_flagged_in_the_dtypes_of_their_variables(
    pairs, largest, scale, flagged, run_step
):
    gradients = [tf.constant([3.0, largest], gradient_dtype) for _, gradient_dtype in pairs]
    arguments = (
        gradients,
        [keras.Variable([0.0, 0.0], dtype=dtype) for dtype, _ in pairs],
        tf.constant(scale),
    )
    unscaled, flags = run_step(
        lambda: (unscale_for_update(*arguments), nonfinite_flags(*arguments, replicas=1))
    )()
    for (dtype, _), gradient, actual in zip(pairs, gradients, unscaled, strict=True):
        assert actual.dtype == dtype
        np.testing.assert_array_equal(actual, tf.cast(tf.cast(gradient, "float64") / scale, dtype))
    assert flags.numpy().tolist() == [float(dtype in flagged) for dtype, _ in pairs]


def test_division_by_any_applied_scale_is_exact(run_step):
    variables = [keras.Variable([0.0, 0.0])]
    divided = run_step(lambda gradient, scale: unscale_for_update([gradient], variables, scale)[0])
    for exponent in (-126, -14, 0, 15, 100, 126):
        gradient, scale = (
            tf.constant([2.0 ** min(127, max(-120, exponent)), 0.0]),
            tf.constant(2.0**exponent),
        )
        np.testing.assert_array_equal(divided(gradient, scale), gradient / scale)


def test_gradient_without_elements_is_finite(run_step):
    gradients = [tf.zeros([3, 0])]
    variables = variables_like(gradients)
    flags = run_step(lambda: nonfinite_flags(gradients, variables, tf.constant(1.0), 1))
    assert flags().numpy().tolist() == [0.0]
