import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kmp import records, statistics


def reference_counts(array):
    """Counts by exponent with NumPy alone."""
    counts = np.zeros(records.BIN_COUNT, np.int64)
    flat = np.asarray(array, np.float64).ravel()
    counts[records.ZERO_BIN] = np.sum(flat == 0)
    counts[records.INF_BIN] = np.sum(np.isinf(flat))
    counts[records.NAN_BIN] = np.sum(np.isnan(flat))
    exponents = np.frexp(np.abs(flat[np.isfinite(flat) & (flat != 0)]))[1] - 1
    np.add.at(counts, exponents - records.FIRST_EXPONENT + 1, 1)
    return counts


@settings(max_examples=200, deadline=None)
@given(hnp.arrays(np.float32, st.integers(0, 20), elements=st.floats(width=32)))
def test_counts_are_those_of_frexp_on_any_float32(array):
    np.testing.assert_array_equal(statistics.exponent_counts([tf.constant(array)]), reference_counts(array))


def test_every_bit_length_of_subnormals_is_counted_right(run_step):
    bits = np.concatenate([2 ** np.arange(23), 2 ** np.arange(1, 24) - 1]).astype(np.uint32)
    array = np.concatenate([bits.view(np.float32), -bits.view(np.float32)])
    counts = run_step(lambda x: statistics.exponent_counts([x]))(tf.constant(array))
    np.testing.assert_array_equal(counts, reference_counts(array))


def test_every_float16_is_counted_right(run_step):
    array = np.arange(2**16, dtype=np.uint16).view(np.float16)
    counts = run_step(lambda x: statistics.exponent_counts([x]))(tf.constant(array))
    np.testing.assert_array_equal(counts, reference_counts(array))


def test_small_large_sparse_and_missing_gradients_are_added_up(run_step):
    random = np.random.default_rng(0)
    small, large = random.normal(size=(3, 5)).astype("float32"), random.normal(size=70_000).astype("float32")
    rows = random.normal(size=(2, 4)).astype("float32")
    sparse = tf.IndexedSlices(tf.constant(rows), tf.constant([0, 7]), tf.constant([9, 4]))
    count = run_step(lambda *g: statistics.exponent_counts([*g[:2], None, sparse]))
    counts = count(tf.constant(small), tf.constant(large))
    np.testing.assert_array_equal(counts, sum(map(reference_counts, (small, large, rows))))
    assert counts.dtype == tf.int64


def test_no_gradients_count_nothing():
    assert int(tf.reduce_sum(statistics.exponent_counts([None]))) == 0


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_one_bad_element_makes_the_flag_one(bad, dtype, run_step):
    flag = run_step(statistics.nonfinite)
    assert float(flag(tf.cast([0.0, bad, 1.0], dtype))) == 1.0
    assert float(flag(tf.cast([0.0, 2.0, 1.0], dtype))) == 0.0
