import numpy as np
import pytest
import tensorflow as tf

from kmp.gradients import tensor_packing, tensor_statistics


@pytest.fixture
def tensors():
    random = np.random.default_rng(0)
    return [
        tf.constant(random.normal(size=shape), tf.float32) for shape in [(3, 5), (2000,), (), (512,), (0,), (40, 30)]
    ]


def sums_of(groups):
    """Returns the sum of each tensor, in the original order."""
    sums = (
        (
            group.segment_sum(tf.reduce_sum(group.values, 1))
            if group.rows
            else tf.reduce_sum(group.values, keepdims=True),
        )
        for group in groups
    )
    return tensor_packing.in_order(tensor_packing.concatenated(sums)[0], groups)


@pytest.mark.parametrize("large", [1, 16, 1500, 10_000])
def test_each_tensor_is_measured_separately_for_any_size_limit(large, tensors, monkeypatch):
    monkeypatch.setattr(tensor_packing, "_LARGE", large)
    groups = tensor_packing.pack_tensors(tensors)
    assert sorted(member for group in groups for member in group.members) == list(range(len(tensors)))
    np.testing.assert_allclose(sums_of(groups), [tf.reduce_sum(tensor) for tensor in tensors], rtol=1e-5)


@pytest.mark.parametrize("large", [1, 16, 1500, 10_000])
def test_padding_is_not_counted(large, tensors, monkeypatch):
    monkeypatch.setattr(tensor_packing, "_LARGE", large)
    groups = tensor_packing.pack_tensors(tensors)
    sizes = tensor_packing.in_order(tf.concat([group.sizes for group in groups], 0), groups)
    np.testing.assert_array_equal(sizes, [tf.size(tensor) for tensor in tensors])
    counts = tensor_statistics.gradient_statistics(tensors).counts
    np.testing.assert_array_equal(tf.reduce_sum(counts, 1), [tf.size(tensor) for tensor in tensors])


def test_small_tensors_share_a_group_and_large_ones_are_not_copied(tensors, monkeypatch):
    monkeypatch.setattr(tensor_packing, "_LARGE", 1500)
    assert [group.members for group in tensor_packing.pack_tensors(tensors)] == [(1,), (0, 2, 3, 4, 5)]


def test_single_small_tensor_is_not_packed_into_rows(tensors):
    (group,) = tensor_packing.pack_tensors(tensors[:1])
    assert group.values.shape == (15,)
    assert group.rows == ()


def test_empty_tensors_have_no_rows(tensors):
    (group,) = tensor_packing.pack_tensors([tensors[4], tensors[4]])
    assert group.values.shape == (0, tensor_packing.ROW_SIZE)
    np.testing.assert_array_equal(tensor_statistics.gradient_statistics([tensors[4], tensors[4]]).amax, [0.0, 0.0])


@pytest.mark.parametrize(("max_elements", "batch_sizes"), [(10**6, [6]), (2000, [1, 1, 4]), (1, [1] * 6)])
def test_batches_are_limited_in_elements_or_hold_one_tensor(max_elements, batch_sizes, tensors):
    measured_sizes = []

    def measure(first, second):
        measured_sizes.append(len(first))
        return tf.stack([tf.reduce_sum(tensor) for tensor in first]), tf.stack([tf.size(tensor) for tensor in second])

    sums, counts = tensor_packing.in_batches(measure, tensors, tensors, max_elements=max_elements)
    assert measured_sizes == batch_sizes
    np.testing.assert_array_equal(sums, [tf.reduce_sum(tensor) for tensor in tensors])
    np.testing.assert_array_equal(counts, [tf.size(tensor) for tensor in tensors])


def test_tensor_of_unknown_size_is_a_batch_of_its_own():
    batch_sizes = []

    @tf.function(input_signature=[[tf.TensorSpec([size]) for size in (3, None, None, 4)]], autograph=False)
    def measure(tensors):
        return tensor_packing.in_batches(
            lambda batch: (batch_sizes.append(len(batch)) or tf.zeros([len(batch)]),), tensors, max_elements=9
        )

    measure.get_concrete_function()
    assert batch_sizes == [1, 1, 1, 1]


def test_batches_run_sequentially_under_xla():
    def measure(batch):
        return (tf.stack([tf.reduce_sum(tf.cast(tensor, tf.float32)) for tensor in batch]),)

    tensors = [tf.ones([2], dtype) for dtype in (tf.float32, tf.float16, tf.float64, tf.bfloat16)]

    @tf.function(jit_compile=True, autograph=False)
    def run(tensors):
        return tensor_packing.in_batches(measure, tensors, max_elements=1)[0]

    np.testing.assert_array_equal(run(tensors), [2.0] * 4)
    lowered = run.experimental_get_compiler_ir(tensors)(stage="hlo")
    # Each batch depends on the previous one: only this dependency creates comparisons and uses them.
    assert lowered.count("compare(") == lowered.count(" or(") == 3


def test_small_tensors_count_as_the_minimum_size(tensors):
    batch_sizes = []
    tensor_packing.in_batches(
        lambda batch: (batch_sizes.append(len(batch)) or tf.zeros([1]),), tensors, max_elements=3000, min_size=1000
    )
    assert batch_sizes == [2, 3, 1]


def test_histograms_of_many_small_gradients_are_counted_in_batches():
    gradients = [tf.fill([2], float(2**exponent)) for exponent in range(8)] * 75
    traced = tf.function(
        lambda: tensor_statistics.gradient_statistics(gradients).counts, autograph=False
    ).get_concrete_function()
    operations = traced.graph.get_operations()
    sizes = [tf.get_static_value(node.inputs[1]) for node in operations if node.type == "DenseBincount"]
    assert sizes == [512 * 512, 512 * 88]
    counts = traced().numpy()
    assert all(counts[index, 150 + index % 8] == 2 for index in range(600))


def test_pairs_are_measured_in_batches(tensors, monkeypatch):
    batch_sizes, measure = [], tensor_statistics._measure_pairs
    monkeypatch.setattr(
        tensor_statistics, "_measure_pairs", lambda *pairs: batch_sizes.append(len(pairs[0])) or measure(*pairs)
    )
    monkeypatch.setattr(tensor_statistics, "_MAX_PAIRS", 2000)
    tensor_statistics.update_statistics(tensors, tensors)
    assert batch_sizes == [1, 1, 4]


def test_batches_run_sequentially_in_a_graph(tensors):
    def measure(batch):
        return (tf.stack([tf.reduce_sum(tensor) for tensor in batch]),)

    traced = tf.function(lambda: tensor_packing.in_batches(measure, tensors, max_elements=2000)).get_concrete_function()
    control_inputs = {node.name for operation in traced.graph.get_operations() for node in operation.control_inputs}
    assert control_inputs == {"stack", "stack_1"}


@pytest.mark.parametrize("jit_compile", [None, False, True], ids=["eager", "graph", "XLA"])
def test_statistics_do_not_depend_on_the_batch_size(jit_compile, tensors, monkeypatch):
    def measured():
        functions = [
            tensor_statistics.gradient_statistics,
            lambda before: tensor_statistics.update_statistics(before, [2 * tensor for tensor in before]),
        ]
        if jit_compile is not None:
            functions = [tf.function(measure, jit_compile=jit_compile, autograph=False) for measure in functions]
        return [measure(tensors) for measure in functions]

    tensors = [*tensors, -tensors[1], tf.zeros([7]), tf.constant([np.inf, -0.0, 1e-40, np.nan])]
    in_one_batch = measured()
    for max_elements, max_pairs in ((1, 1), (2**17, 2500)):  # a small gradient counts as 2^15 elements
        monkeypatch.setattr(tensor_statistics, "_MAX_ELEMENTS", max_elements)
        monkeypatch.setattr(tensor_statistics, "_MAX_PAIRS", max_pairs)
        for expected_statistics, statistics in zip(in_one_batch, measured(), strict=True):
            for expected, actual in zip(expected_statistics, statistics, strict=True):
                np.testing.assert_allclose(expected, actual, rtol=1e-12)
