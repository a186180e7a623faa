import math

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import config  # no public function disables determinism

from kmp.gradients.tensor_statistics import gradient_statistics, update_statistics
from kmp.records import exponent_histogram

LARGE = 2**22  # elements of a tensor that is measured alone
SHAPES = [(3, 5), (LARGE,), (2000,), (), (512,), (0,), (40, 30)]


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


def tensors_of(*shapes):
    random = np.random.default_rng(0)
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize(
    ("run_step", "is_deterministic", "copies"),
    # 32 copies are too many for one pass in graph mode.
    [("graph", False, 1), ("graph", False, 32), ("graph", True, 1), ("xla", False, 1)],
    indirect=["run_step"],
)
def test_counts_of_one_and_of_several_gradients_are_exact_for_any_bits(
    is_deterministic, run_step, copies
):
    bits = np.random.default_rng(1).integers(0, 2**32, 9000, dtype=np.uint64).astype(np.uint32)
    bits[::3] &= 0x807FFFFF  # subnormals of either sign
    bits[1::3] &= 0xFF80000F  # powers of two, Infs
    bits[::50] &= 0x80000000
    of_every_bit_length = np.concatenate([2 ** np.arange(23), 2 ** np.arange(1, 24) - 1]).astype(
        np.uint32
    )
    every_float16 = np.arange(2**16, dtype=np.uint16).view(np.float16)
    arrays = [
        np.tile(bits, copies).view(np.float32),
        *(each.view(np.float32) for each in (bits[:1], of_every_bit_length)),
        every_float16,
    ]

    def measure(*gradients):
        return gradient_statistics(gradients).counts, gradient_statistics(gradients[:1]).counts

    if is_deterministic:
        tf.config.experimental.enable_op_determinism()
    try:
        several, one = run_step(measure)(*map(tf.constant, arrays))
        traced = tf.function(lambda: gradient_statistics([tf.ones([3])]).counts, autograph=False)
        operations = {
            operation.type for operation in traced.get_concrete_function().graph.get_operations()
        }
    finally:
        config.disable_op_determinism()
    with np.errstate(invalid="ignore"):
        expected = [reference_counts(array) for array in arrays]
    np.testing.assert_array_equal(several, expected)
    np.testing.assert_array_equal(one, expected[:1])
    # On a GPU, it raises an error in deterministic mode.
    assert ("DenseBincount" in operations) != is_deterministic


@pytest.mark.parametrize("run_step", ["graph", "xla"], indirect=True)
def test_gradients_of_any_size_have_separate_rows(run_step):
    gradients = tensors_of(*SHAPES)
    gradients[2][:3] = np.inf, -0.0, 1e-40
    gradients[1][7] = np.nan
    rows = tensors_of((2, 4))[0]
    sparse = tf.IndexedSlices(tf.constant(rows), tf.constant([0, 7]), tf.constant([9, 4]))
    measure = run_step(lambda dense: gradient_statistics([*dense, None, sparse]))
    statistics = measure([tf.constant(gradient) for gradient in gradients])
    arrays = [*gradients, np.zeros(0, np.float32), rows]
    np.testing.assert_array_equal(statistics.counts, [reference_counts(array) for array in arrays])
    np.testing.assert_array_equal(
        statistics.amax, [np.max(np.abs(array), initial=0) for array in arrays]
    )
    square_sums = [np.sum(np.square(array, dtype=np.float64)) for array in arrays]
    np.testing.assert_allclose(statistics.square_sum, square_sums, rtol=1e-12)


def test_gradient_of_unknown_size_is_measured():
    @tf.function(
        input_signature=[[tf.TensorSpec([size]) for size in (3, None, None, 4)]], autograph=False
    )
    def measure(gradients):
        return tuple(gradient_statistics(gradients))

    counts, amax, square_sum = measure([tf.fill([size], float(size)) for size in (3, 0, 5, 4)])
    np.testing.assert_array_equal(tf.reduce_sum(counts, 1), [3, 0, 5, 4])
    np.testing.assert_array_equal(amax, [3, 0, 5, 4])
    np.testing.assert_array_equal(square_sum, [27, 0, 125, 64])


def test_only_missing_gradients_have_zero_statistics():
    for gradients in ([None], [None, None]):
        statistics = gradient_statistics(gradients)
        assert not np.any(statistics.counts)
        assert not np.any(statistics.amax)


@pytest.mark.parametrize("run_step", ["graph", "xla"], indirect=True)
def test_squares_beyond_float32_and_nonfinite_gradients_have_a_sum_and_a_maximum(run_step):
    measure = run_step(lambda *gradients: gradient_statistics(gradients))
    large, small = tf.fill([10], 1e25), tf.fill([10], 1e-25)
    square_sums = measure(large, small, -3.0 * tf.ones(4)).square_sum
    np.testing.assert_allclose(square_sums, [1e51, 1e-49, 36.0], rtol=1e-5)
    for nonfinite, amax in (
        ([math.inf, 1], math.inf),
        ([-math.inf, 1], math.inf),
        ([math.nan, math.inf], math.nan),
    ):
        found = measure(tf.constant([1.0] * 8 + nonfinite), small, -3.0 * tf.ones(4)).amax
        np.testing.assert_array_equal(found, np.float32([amax, 1e-25, 3.0]))


def test_large_gradients_are_measured_one_after_the_other_under_xla():
    def operations_of(count):
        """Returns how many operations the dependency on the gradient before creates and uses."""
        measure = tf.function(lambda *values: tuple(gradient_statistics(values)), jit_compile=True)
        lowered = measure.experimental_get_compiler_ir(*[tf.ones([LARGE])] * count)(stage="hlo")
        return np.array([lowered.count("compare("), lowered.count("select(")])

    np.testing.assert_array_equal(operations_of(3) - operations_of(2), operations_of(1) + 1)


def test_large_gradients_are_measured_one_after_the_other_in_a_graph():
    tensors = [tf.TensorSpec([size]) for size in (15, LARGE, 2000, LARGE, 1)]
    traced = tf.function(lambda *values: tuple(gradient_statistics(values)), autograph=False)
    operations = traced.get_concrete_function(*tensors).graph.get_operations()
    histograms_before = {}  # the histograms that an operation waits for
    for node in operations:
        sources = [*node.control_inputs, *(tensor.op for tensor in node.inputs)]
        found = {name for source in sources for name in histograms_before[source.name]}
        histograms_before[node.name] = (
            found | {node.name} if node.type == "DenseBincount" else found
        )
    histograms = [node.name for node in operations if node.type == "DenseBincount"]
    assert [len(histograms_before[name]) for name in histograms] == [1, 2, 3]


def test_histograms_of_many_small_gradients_are_counted_in_groups():
    gradients = [tf.fill([2], float(2**exponent)) for exponent in range(8)] * 75
    traced = tf.function(
        lambda: gradient_statistics(gradients).counts, autograph=False
    ).get_concrete_function()
    operations = traced.graph.get_operations()
    sizes = [
        tf.get_static_value(node.inputs[1]) for node in operations if node.type == "DenseBincount"
    ]
    assert sizes == [512 * 512, 512 * 88]
    counts = traced().numpy()
    assert all(counts[index, 150 + index % 8] == 2 for index in range(600))


def test_each_variable_of_any_size_has_its_own_update():
    before = tensors_of(*SHAPES, (LARGE // 2,), (LARGE // 2,), (7,))  # two groups of small ones
    statistics = update_statistics(before, [np.float32(2) * weights for weights in before])
    norms = [np.sqrt(np.sum(np.square(weights, dtype=np.float64))) for weights in before]
    np.testing.assert_allclose(statistics.weight_norm, norms, rtol=1e-12)
    np.testing.assert_allclose(statistics.update_norm, norms, rtol=1e-12)
    np.testing.assert_array_equal(
        statistics.updates, [np.count_nonzero(weights) for weights in before]
    )
    assert not np.any(statistics.lost_updates)


def test_updates_are_measured_relative_to_the_weights():
    before = [np.float32([1.0, 2.0, 0.0, -4.0]), np.linspace(-1, 1, 1000, dtype=np.float32)]
    lost, retained = 2.0**-12, 2.0**-10
    after = [before[0] + np.float32([lost, 2 * retained, 1e-9, 0.0]), before[1] * np.float32(1.25)]
    statistics = update_statistics(before, after)
    changed = [np.sum(a != b) for a, b in zip(after, before, strict=True)]
    np.testing.assert_array_equal(statistics.updates, changed)
    np.testing.assert_array_equal(statistics.lost_updates, [1, 0])
    np.testing.assert_allclose(
        statistics.weight_norm, [np.linalg.norm(b.astype(np.float64)) for b in before]
    )
    differences = [(a - b).astype(np.float64) for a, b in zip(after, before, strict=True)]
    np.testing.assert_allclose(statistics.update_norm, [np.linalg.norm(d) for d in differences])


def test_weight_that_becomes_nan_has_changed_and_one_that_stays_nonfinite_has_not():
    before, after = (
        tf.constant([math.inf, math.nan, 1.0]),
        tf.constant([math.inf, math.nan, math.nan]),
    )
    statistics = update_statistics([before, before], [before, after])
    np.testing.assert_array_equal(statistics.updates, [0, 1])
    np.testing.assert_array_equal(statistics.update_norm, [0.0, math.nan])
