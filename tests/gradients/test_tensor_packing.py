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
    """The sum of each tensor, in the order given."""
    sums = (
        (group.total(tf.reduce_sum(group.values, 1)) if group.rows else tf.reduce_sum(group.values, keepdims=True),)
        for group in groups
    )
    return tensor_packing.in_order(tensor_packing.joined(sums)[0], groups)


@pytest.mark.parametrize("large", [1, 16, 1500, 10_000])
def test_every_tensor_is_measured_as_itself_wherever_the_limit_is(large, tensors, monkeypatch):
    monkeypatch.setattr(tensor_packing, "_LARGE", large)
    groups = tensor_packing.pack_tensors(tensors)
    assert sorted(member for group in groups for member in group.members) == list(range(len(tensors)))
    np.testing.assert_allclose(sums_of(groups), [tf.reduce_sum(tensor) for tensor in tensors], rtol=1e-5)


@pytest.mark.parametrize("large", [1, 16, 1500, 10_000])
def test_the_fill_of_a_row_is_no_element(large, tensors, monkeypatch):
    monkeypatch.setattr(tensor_packing, "_LARGE", large)
    groups = tensor_packing.pack_tensors(tensors)
    sizes = tensor_packing.in_order(tf.concat([group.sizes for group in groups], 0), groups)
    np.testing.assert_array_equal(sizes, [tf.size(tensor) for tensor in tensors])
    counts = tensor_statistics.of_gradients(tensors).counts
    np.testing.assert_array_equal(tf.reduce_sum(counts, 1), [tf.size(tensor) for tensor in tensors])


def test_small_ones_share_a_group_and_large_ones_are_not_copied(tensors, monkeypatch):
    monkeypatch.setattr(tensor_packing, "_LARGE", 1500)
    assert [group.members for group in tensor_packing.pack_tensors(tensors)] == [(1,), (0, 2, 3, 4, 5)]


def test_one_small_tensor_needs_no_rows(tensors):
    (group,) = tensor_packing.pack_tensors(tensors[:1])
    assert group.values.shape == (15,)
    assert group.rows == ()


def test_tensors_without_elements_have_no_rows(tensors):
    (group,) = tensor_packing.pack_tensors([tensors[4], tensors[4]])
    assert group.values.shape == (0, tensor_packing.ROW)
    np.testing.assert_array_equal(tensor_statistics.of_gradients([tensors[4], tensors[4]]).amax, [0.0, 0.0])


@pytest.mark.parametrize(("at_most", "sizes"), [(10**6, [6]), (2000, [1, 1, 4]), (1, [1] * 6)])
def test_batches_hold_so_many_elements_or_one_tensor(at_most, sizes, tensors):
    seen = []

    def measure(first, second):
        seen.append(len(first))
        return tf.stack([tf.reduce_sum(tensor) for tensor in first]), tf.stack([tf.size(tensor) for tensor in second])

    sums, counts = tensor_packing.in_batches(measure, tensors, tensors, at_most=at_most)
    assert seen == sizes
    np.testing.assert_array_equal(sums, [tf.reduce_sum(tensor) for tensor in tensors])
    np.testing.assert_array_equal(counts, [tf.size(tensor) for tensor in tensors])


def test_tensor_of_unknown_size_is_a_batch_of_its_own():
    seen = []

    @tf.function(input_signature=[[tf.TensorSpec([size]) for size in (3, None, None, 4)]], autograph=False)
    def measure(tensors):
        return tensor_packing.in_batches(
            lambda some: (seen.append(len(some)) or tf.zeros([len(some)]),), tensors, at_most=9
        )

    measure.get_concrete_function()
    assert seen == [1, 1, 1, 1]


def test_batches_wait_for_each_other_under_xla_too():
    def measure(some):
        return (tf.stack([tf.reduce_sum(tf.cast(tensor, tf.float32)) for tensor in some]),)

    tensors = [tf.ones([2], dtype) for dtype in (tf.float32, tf.float16, tf.float64, tf.bfloat16)]

    @tf.function(jit_compile=True, autograph=False)
    def run(tensors):
        return tensor_packing.in_batches(measure, tensors, at_most=1)[0]

    np.testing.assert_array_equal(run(tensors), [2.0] * 4)
    lowered = run.experimental_get_compiler_ir(tensors)(stage="hlo")
    # What the second reads is known only once the first is: nothing else would make a comparison, or use it.
    assert lowered.count("compare(") == lowered.count(" or(") == 3


def test_small_tensors_count_for_as_many_elements_as_is_said(tensors):
    seen = []
    tensor_packing.in_batches(
        lambda some: (seen.append(len(some)) or tf.zeros([1]),), tensors, at_most=3000, at_least=1000
    )
    assert seen == [2, 3, 1]


def test_histograms_of_many_small_gradients_are_counted_in_batches():
    gradients = [tf.fill([2], float(2**place)) for place in range(8)] * 75
    traced = tf.function(
        lambda: tensor_statistics.of_gradients(gradients).counts, autograph=False
    ).get_concrete_function()
    sizes = [tf.get_static_value(one.inputs[1]) for one in traced.graph.get_operations() if one.type == "DenseBincount"]
    assert sizes == [512 * 512, 512 * 88]
    counts = measure_activations().numpy()
    assert all(counts[place, 150 + place % 8] == 2 for place in range(600))


def test_pairs_are_measured_in_batches(tensors, monkeypatch):
    seen, of_pairs = [], tensor_statistics._of_pairs
    monkeypatch.setattr(statistics, "_of_pairs", lambda *pairs: seen.append(len(pairs[0])) or of_pairs(*pairs))
    monkeypatch.setattr(statistics, "_PAIRS_AT_ONCE", 2000)
    tensor_statistics.of_updates(tensors, tensors)
    assert seen == [1, 1, 4]


def test_batches_of_a_graph_wait_for_each_other(tensors):
    def measure(some):
        return (tf.stack([tf.reduce_sum(tensor) for tensor in some]),)

    traced = tf.function(lambda: tensor_packing.in_batches(measure, tensors, at_most=2000)).get_concrete_function()
    waited_for = {before.name for one in traced.graph.get_operations() for before in one.control_inputs}
    assert waited_for == {"stack", "stack_1"}


@pytest.mark.parametrize("jit_compile", [None, False, True], ids=["eager", "graph", "XLA"])
@pytest.mark.parametrize("at_most", [1, 600, 2500])
def test_batches_change_no_statistics(at_most, jit_compile, tensors, monkeypatch):
    def measured():
        of_both = [
            tensor_statistics.of_gradients,
            lambda some: tensor_statistics.of_updates(some, [2 * t for t in some]),
        ]
        if jit_compile is not None:
            of_both = [tf.function(measure, jit_compile=jit_compile, autograph=False) for measure in of_both]
        return [measure(tensors) for measure in of_both]

    tensors = [*tensors, -tensors[1], tf.zeros([7]), tf.constant([np.inf, -0.0, 1e-40, np.nan])]
    whole = measured()
    monkeypatch.setattr(statistics, "_AT_ONCE", at_most)
    monkeypatch.setattr(statistics, "_PAIRS_AT_ONCE", at_most)
    parts = measured()
    for expected, found in zip(whole, parts, strict=True):
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12)
