import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tensorflow.python.framework import config  # nothing public ends determinism

from kmp.gradients import tensor_statistics
from kmp.gradients.tensor_packing import pack_tensors
from kmp.records import exponent_histogram


def reference_counts(array):
    """Counts by exponent with NumPy alone."""
    counts = np.zeros(exponent_histogram.BIN_COUNT, np.int64)
    flat = np.asarray(array, np.float64).ravel()
    counts[exponent_histogram.ZERO_BIN] = np.sum(flat == 0)
    counts[exponent_histogram.INF_BIN] = np.sum(np.isinf(flat))
    counts[exponent_histogram.NAN_BIN] = np.sum(np.isnan(flat))
    exponents = np.frexp(np.abs(flat[np.isfinite(flat) & (flat != 0)]))[1] - 1
    np.add.at(counts, exponents - exponent_histogram.FIRST_EXPONENT + 1, 1)
    return counts


def counts_of(array, run_step=lambda step: step):
    return np.asarray(run_step(lambda x: tensor_statistics.of_gradients([x]).counts)(tf.constant(array)))[0]


@settings(max_examples=200, deadline=None)
@given(hnp.arrays(np.float32, st.integers(0, 20), elements=st.floats(width=32)))
def test_counts_are_those_of_frexp_on_any_float32(array):
    np.testing.assert_array_equal(counts_of(array), reference_counts(array))


def test_every_bit_length_of_subnormals_is_counted_right(run_step):
    bits = np.concatenate([2 ** np.arange(23), 2 ** np.arange(1, 24) - 1]).astype(np.uint32)
    array = np.concatenate([bits.view(np.float32), -bits.view(np.float32)])
    np.testing.assert_array_equal(counts_of(array, run_step), reference_counts(array))


@pytest.mark.parametrize("count", [tensor_statistics._count_at_once, tensor_statistics._count_in_turn])
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_both_ways_to_count_are_right_on_any_bits(count, run_step, is_deterministic, monkeypatch):
    monkeypatch.setattr(statistics, "_is_deterministic", lambda: is_deterministic)
    bits = np.random.default_rng(1).integers(0, 2**32, 9000, dtype=np.uint64).astype(np.uint32)
    bits[::3] &= 0x807FFFFF  # subnormals of either sign
    bits[1::3] &= 0xFF80000F  # powers of two, infs
    bits[::50] &= 0x80000000
    with np.errstate(invalid="ignore"):
        arrays = np.split(bits.view(np.float32), [1, 100, 3000])
        found = run_step(lambda *tensors: count(pack_tensors(tensors)))(*map(tf.constant, arrays))
        np.testing.assert_array_equal(found, [reference_counts(array) for array in arrays])


def test_histograms_are_made_otherwise_where_tensorflow_has_to_be_deterministic():
    def operations():
        traced = tf.function(lambda: tensor_statistics.of_gradients([tf.ones([3])]).counts, autograph=False)
        return {operation.type for operation in traced.get_concrete_function().graph.get_operations()}

    assert "DenseBincount" in operations()
    tf.config.experimental.enable_op_determinism()
    try:
        assert "DenseBincount" not in operations()
    finally:
        config.disable_op_determinism()
    assert "DenseBincount" in operations()


def test_every_float16_is_counted_right(run_step):
    array = np.arange(2**16, dtype=np.uint16).view(np.float16)
    np.testing.assert_array_equal(counts_of(array, run_step), reference_counts(array))


def test_a_large_gradient_of_any_bits_is_counted_right(run_step):
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32)
    bits[::3] &= 0x807FFFFF  # subnormals of either sign
    bits[::100] &= 0x80000000
    with np.errstate(invalid="ignore"):
        array = bits.view(np.float32)
        np.testing.assert_array_equal(counts_of(array, run_step), reference_counts(array))


def test_each_gradient_has_a_row_of_its_own_small_large_sparse_or_missing(run_step):
    random = np.random.default_rng(0)
    small, large = random.normal(size=(3, 5)).astype("float32"), random.normal(size=70_000).astype("float32")
    rows = random.normal(size=(2, 4)).astype("float32")
    sparse = tf.IndexedSlices(tf.constant(rows), tf.constant([0, 7]), tf.constant([9, 4]))
    measure = run_step(lambda a, b: tensor_statistics.of_gradients([a, b, None, sparse]))
    found = measure(tf.constant(small), tf.constant(large))
    arrays = [small, large, np.zeros(0), rows]
    np.testing.assert_array_equal(found.counts, [reference_counts(array) for array in arrays])
    np.testing.assert_allclose(found.amax, [np.abs(array).max(initial=0) for array in arrays])
    np.testing.assert_allclose(
        found.square_sum, [np.sum(array.astype(np.float64) ** 2) for array in arrays], rtol=1e-12
    )


@pytest.mark.parametrize("size", [10, 70_000])
def test_squares_beyond_float32_are_summed_right(size, run_step):
    measure = run_step(lambda *gradients: tensor_statistics.of_gradients(gradients))
    found = measure(tf.fill([size], 1e25), tf.fill([size], 1e-25))
    np.testing.assert_allclose(found.square_sum, [size * 1e50, size * 1e-50], rtol=1e-5)


@pytest.mark.parametrize(
    ("bad", "amax"), [([math.inf, 1.0], math.inf), ([-math.inf, 1.0], math.inf), ([math.nan, math.inf], math.nan)]
)
@pytest.mark.parametrize("size", [10, 70_000])
def test_amax_is_inf_or_nan_where_the_gradient_has_one(bad, amax, size, run_step):
    array = np.ones(size, np.float32)
    array[-2:] = bad
    found = run_step(lambda x: tensor_statistics.of_gradients([x, -3.0 * tf.ones(4)]))(tf.constant(array))
    np.testing.assert_array_equal(found.amax, np.float32([amax, 3.0]))


def test_updates_are_measured_against_the_weights(run_step):
    before = [np.float32([1.0, 2.0, 0.0, -4.0]), np.linspace(-1, 1, 70_000, dtype=np.float32)]
    lost, kept = 2.0**-12, 2.0**-10
    after = [before[0] + np.float32([lost, 2 * kept, 1e-9, 0.0]), before[1] * np.float32(1.25)]
    found = run_step(tensor_statistics.of_updates)([*map(tf.constant, before)], [*map(tf.constant, after)])
    changed = [np.sum(a != b) for a, b in zip(after, before, strict=True)]
    np.testing.assert_array_equal(found.changed, changed)
    np.testing.assert_array_equal(found.lost, [1, 0])
    np.testing.assert_allclose(found.weight_square_sum, [np.sum(b.astype(np.float64) ** 2) for b in before])
    differences = [(a - b).astype(np.float64) for a, b in zip(after, before, strict=True)]
    np.testing.assert_allclose(found.update_square_sum, [np.sum(d**2) for d in differences])


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_one_bad_element_makes_the_flag_one(bad, dtype, run_step):
    flag = run_step(tensor_statistics.nonfinite)
    assert float(flag(tf.cast([0.0, bad, 1.0], dtype))) == 1.0
    assert float(flag(tf.cast([0.0, 2.0, 1.0], dtype))) == 0.0


def test_a_weight_that_stays_inf_or_nan_has_no_update(run_step):
    weights = tf.constant([math.inf, math.nan, 1.0])
    found = run_step(lambda x: tensor_statistics.of_updates([x], [x]))(weights)
    assert (float(found.update_square_sum[0]), float(found.changed[0])) == (0.0, 0.0)


def test_a_weight_that_becomes_nan_was_changed(run_step):
    measure = run_step(lambda x, y: tensor_statistics.of_updates([x], [y]))
    found = measure(tf.constant([1.0, 1.0]), tf.constant([math.nan, 1.0]))
    assert math.isnan(found.update_square_sum[0])
    assert float(found.changed[0]) == 1.0
