import numpy as np
import pytest
import tensorflow as tf

from kmp.gradients import gradient_statistics, update_statistics
from kmp.gradients.tensor_groups import group_indices, measure_in_groups

LARGE = 2**22
FLOAT8 = tf.dtypes.experimental.float8_e4m3fn
SHAPES = [(3, 5), (LARGE,), (2000,), (), (512,), (0,), (LARGE + 3,), (40, 30)]


def tensors_of(*shapes):
    random = np.random.default_rng(0)
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([15, 2000, 1, 512], [[0, 1, 2, 3]]),
        ([15, 2000, 1, 512, 0, 1200], [[0, 2, 3, 4, 5], [1]]),
        ([None, 3, None, 4], [[0], [1, 3], [2]]),
        ([1400, 1400, 1400, 5], [[0, 1], [2, 3]]),
        ([1] * 600, [list(range(512)), list(range(512, 600))]),
        ([2000], [[0]]),
    ],
)
def test_small_tensors_share_groups_of_limited_size(sizes, groups):
    shapes = [tf.TensorSpec([size]) for size in sizes]
    large = 3000 if len(sizes) == 4 else 1500
    assert sorted(group_indices(shapes, large, 3072)) == groups


def test_each_gradient_of_any_size_has_its_own_row(run_step):
    gradients = tensors_of(*SHAPES)
    gradients[2][:3] = np.inf, -0.0, 1e-40
    gradients[6][7] = np.nan
    statistics = run_step(gradient_statistics)([tf.constant(gradient) for gradient in gradients])
    np.testing.assert_array_equal(tf.reduce_sum(statistics.counts, 1), [gradient.size for gradient in gradients])
    np.testing.assert_array_equal(statistics.amax, [np.max(np.abs(gradient), initial=0) for gradient in gradients])
    square_sums = [np.sum(np.square(gradient, dtype=np.float64)) for gradient in gradients]
    np.testing.assert_allclose(statistics.square_sum, square_sums, rtol=1e-12)


def test_each_variable_of_any_size_has_its_own_update():
    before = tensors_of(*SHAPES, (LARGE // 2,), (LARGE // 2,), (7,))
    statistics = update_statistics(before, [np.float32(2) * weights for weights in before])
    norms = [np.sqrt(np.sum(np.square(weights, dtype=np.float64))) for weights in before]
    np.testing.assert_allclose(statistics["weight_norm"], norms, rtol=1e-12)
    np.testing.assert_allclose(statistics["update_norm"], norms, rtol=1e-12)
    np.testing.assert_array_equal(statistics["updates"], [np.count_nonzero(weights) for weights in before])
    assert not np.any(statistics["lost_updates"])


def test_gradient_of_unknown_size_is_measured():
    @tf.function(input_signature=[[tf.TensorSpec([size]) for size in (3, None, None, 4)]], autograph=False)
    def measure(gradients):
        return tuple(gradient_statistics(gradients))

    counts, amax, square_sum = measure([tf.fill([size], float(size)) for size in (3, 0, 5, 4)])
    np.testing.assert_array_equal(tf.reduce_sum(counts, 1), [3, 0, 5, 4])
    np.testing.assert_array_equal(amax, [3, 0, 5, 4])
    np.testing.assert_array_equal(square_sum, [27, 0, 125, 64])


def test_gradients_without_elements_have_zero_statistics():
    for gradients in ([None], [None, None]):
        statistics = gradient_statistics(gradients)
        assert not np.any(statistics.counts)
        assert not np.any(statistics.amax)


def row_sum(group):
    return (group.per_tensor(tf.reduce_sum(group.values, 1)),)


def test_groups_run_sequentially_under_xla():
    tensors = [tf.cast([1.0, 1.0], dtype) for dtype in (tf.float32, tf.float16, tf.float64, tf.bfloat16, FLOAT8)]
    run = tf.function(lambda *values: measure_in_groups(row_sum, values, max_elements=1), jit_compile=True)
    np.testing.assert_array_equal(run(*tensors), [[2.0] * 5])
    lowered = run.experimental_get_compiler_ir(*tensors)(stage="hlo")
    # Each group depends on the previous one: only this dependency creates comparisons and uses them.
    assert lowered.count("compare(") == lowered.count("select(") == 4


def test_groups_run_sequentially_in_a_graph():
    tensors = [tf.TensorSpec([size]) for size in (15, LARGE, 2000, LARGE, 1)]
    traced = tf.function(lambda *values: tuple(gradient_statistics(values)), autograph=False)
    operations = traced.get_concrete_function(*tensors).graph.get_operations()
    histograms_before = {}  # the histograms that an operation waits for
    for node in operations:
        sources = [*node.control_inputs, *(tensor.op for tensor in node.inputs)]
        found = {name for source in sources for name in histograms_before[source.name]}
        histograms_before[node.name] = found | {node.name} if node.type == "DenseBincount" else found
    histograms = [node.name for node in operations if node.type == "DenseBincount"]
    assert [len(histograms_before[name]) for name in histograms] == [1, 2, 3]


def test_histograms_of_many_small_gradients_are_counted_in_groups():
    gradients = [tf.fill([2], float(2**exponent)) for exponent in range(8)] * 75
    traced = tf.function(lambda: gradient_statistics(gradients).counts, autograph=False).get_concrete_function()
    operations = traced.graph.get_operations()
    sizes = [tf.get_static_value(node.inputs[1]) for node in operations if node.type == "DenseBincount"]
    assert sizes == [512 * 512, 512 * 88]
    counts = traced().numpy()
    assert all(counts[index, 150 + index % 8] == 2 for index in range(600))
