import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tensorflow.python.framework import config  # no public function disables determinism

from kmp.gradients import gradient_statistics, nonfinite_flag, update_statistics
from kmp.records import exponent_histogram


def reference_counts(array):
    """Returns counts by exponent, computed with NumPy only."""
    counts = np.zeros(exponent_histogram.BIN_COUNT, np.int64)
    flat = np.asarray(array, np.float64).ravel()
    counts[exponent_histogram.ZERO_BIN] = np.sum(flat == 0)
    counts[exponent_histogram.INF_BIN] = np.sum(np.isinf(flat))
    counts[exponent_histogram.NAN_BIN] = np.sum(np.isnan(flat))
    exponents = np.frexp(np.abs(flat[np.isfinite(flat) & (flat != 0)]))[1] - 1
    np.add.at(counts, exponents - exponent_histogram.FIRST_EXPONENT + 1, 1)
    return counts


def counts_of(array, run_step=lambda step: step):
    return np.asarray(run_step(lambda x: gradient_statistics([x]).counts)(tf.constant(array)))[0]


@settings(max_examples=200, deadline=None)
@given(hnp.arrays(np.float32, st.integers(0, 20), elements=st.floats(width=32)))
def test_counts_match_frexp_for_any_float32(array):
    np.testing.assert_array_equal(counts_of(array), reference_counts(array))


def test_subnormals_of_every_bit_length_are_counted(run_step):
    bits = np.concatenate([2 ** np.arange(23), 2 ** np.arange(1, 24) - 1]).astype(np.uint32)
    array = np.concatenate([bits.view(np.float32), -bits.view(np.float32)])
    np.testing.assert_array_equal(counts_of(array, run_step), reference_counts(array))


@pytest.fixture
def op_determinism():
    tf.config.experimental.enable_op_determinism()
    yield
    config.disable_op_determinism()


def any_bits(size):
    bits = np.random.default_rng(1).integers(0, 2**32, size, dtype=np.uint64).astype(np.uint32)
    bits[::3] &= 0x807FFFFF  # subnormals of either sign
    bits[1::3] &= 0xFF80000F  # powers of two, Infs
    bits[::50] &= 0x80000000
    return bits.view(np.float32)


def check_any_bits(splits, run_step):
    with np.errstate(invalid="ignore"):
        arrays = np.split(any_bits(9000), splits)
        counts = run_step(lambda *tensors: gradient_statistics(tensors).counts)(*map(tf.constant, arrays))
        np.testing.assert_array_equal(counts, [reference_counts(array) for array in arrays])


@pytest.mark.parametrize("splits", [[], [1, 100, 3000]])
def test_counts_are_exact_for_any_bits(splits, run_step):
    check_any_bits(splits, run_step)


@pytest.mark.parametrize("splits", [[], [1, 100, 3000]])
def test_counts_are_exact_in_deterministic_mode(splits, run_step, op_determinism):
    check_any_bits(splits, run_step)


def test_deterministic_mode_does_not_use_dense_bincount(op_determinism):
    traced = tf.function(lambda: gradient_statistics([tf.ones([3])]).counts, autograph=False).get_concrete_function()
    assert "DenseBincount" not in {operation.type for operation in traced.graph.get_operations()}


def test_every_float16_value_is_counted(run_step):
    array = np.arange(2**16, dtype=np.uint16).view(np.float16)
    np.testing.assert_array_equal(counts_of(array, run_step), reference_counts(array))


def test_small_large_sparse_and_missing_gradients_have_separate_rows(run_step):
    random = np.random.default_rng(0)
    small, large = random.normal(size=(3, 5)).astype("float32"), random.normal(size=70_000).astype("float32")
    rows = random.normal(size=(2, 4)).astype("float32")
    sparse = tf.IndexedSlices(tf.constant(rows), tf.constant([0, 7]), tf.constant([9, 4]))
    measure = run_step(lambda a, b: gradient_statistics([a, b, None, sparse]))
    statistics = measure(tf.constant(small), tf.constant(large))
    arrays = [small, large, np.zeros(0), rows]
    np.testing.assert_array_equal(statistics.counts, [reference_counts(array) for array in arrays])
    np.testing.assert_allclose(statistics.amax, [np.abs(array).max(initial=0) for array in arrays])
    np.testing.assert_allclose(
        statistics.square_sum, [np.sum(array.astype(np.float64) ** 2) for array in arrays], rtol=1e-12
    )


@pytest.mark.parametrize("size", [10, 70_000])
def test_squares_outside_the_float32_range_do_not_overflow_or_underflow(size, run_step):
    measure = run_step(lambda *gradients: gradient_statistics(gradients))
    statistics = measure(tf.fill([size], 1e25), tf.fill([size], 1e-25))
    np.testing.assert_allclose(statistics.square_sum, [size * 1e50, size * 1e-50], rtol=1e-5)


@pytest.mark.parametrize(
    ("nonfinite", "amax"), [([math.inf, 1.0], math.inf), ([-math.inf, 1.0], math.inf), ([math.nan, math.inf], math.nan)]
)
@pytest.mark.parametrize("size", [10, 70_000])
def test_amax_of_a_nonfinite_gradient_is_inf_or_nan(nonfinite, amax, size, run_step):
    array = np.ones(size, np.float32)
    array[-2:] = nonfinite
    measure = run_step(lambda x: gradient_statistics([x, -3.0 * tf.ones(4)]))
    np.testing.assert_array_equal(measure(tf.constant(array)).amax, np.float32([amax, 3.0]))


def test_updates_are_measured_relative_to_the_weights(run_step):
    before = [np.float32([1.0, 2.0, 0.0, -4.0]), np.linspace(-1, 1, 70_000, dtype=np.float32)]
    lost, retained = 2.0**-12, 2.0**-10
    after = [before[0] + np.float32([lost, 2 * retained, 1e-9, 0.0]), before[1] * np.float32(1.25)]
    measure = run_step(update_statistics)
    statistics = measure([*map(tf.constant, before)], [*map(tf.constant, after)])
    changed = [np.sum(a != b) for a, b in zip(after, before, strict=True)]
    np.testing.assert_array_equal(statistics["updates"], changed)
    np.testing.assert_array_equal(statistics["lost_updates"], [1, 0])
    np.testing.assert_allclose(statistics["weight_norm"], [np.linalg.norm(b.astype(np.float64)) for b in before])
    differences = [(a - b).astype(np.float64) for a, b in zip(after, before, strict=True)]
    np.testing.assert_allclose(statistics["update_norm"], [np.linalg.norm(d) for d in differences])


@pytest.mark.parametrize("nonfinite", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_flag_is_one_for_a_single_nonfinite_element(nonfinite, dtype, run_step):
    flag = run_step(nonfinite_flag)
    assert float(flag(tf.cast([0.0, nonfinite, 1.0], dtype))) == 1.0
    assert float(flag(tf.cast([0.0, 2.0, 1.0], dtype))) == 0.0


def test_weight_that_stays_nonfinite_has_no_update(run_step):
    weights = tf.constant([math.inf, math.nan, 1.0])
    statistics = run_step(lambda x: update_statistics([x], [x]))(weights)
    assert (float(statistics["update_norm"][0]), int(statistics["updates"][0])) == (0.0, 0)


def test_weight_that_becomes_nan_has_changed(run_step):
    measure = run_step(lambda x, y: update_statistics([x], [y]))
    statistics = measure(tf.constant([1.0, 1.0]), tf.constant([math.nan, 1.0]))
    assert math.isnan(statistics["update_norm"][0])
    assert int(statistics["updates"][0]) == 1
