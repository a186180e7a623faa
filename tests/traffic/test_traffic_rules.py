import numpy as np
import pytest
import tensorflow as tf

from kmp.traffic import Cost, traffic_of

X = tf.TensorSpec((4, 8), tf.float32)  # 32 elements: 128 bytes


def traffic(function, *specs, owner=None):
    traced = tf.function(function, autograph=False).get_concrete_function(*specs)
    return traffic_of(traced.graph, owner)


def test_operation_reads_its_inputs_and_writes_its_outputs_once():
    counted = traffic(lambda x: tf.cast(tf.exp(x) + x, tf.float16), X)
    assert dict(counted.by_type) == {
        "AddV2": Cost(1, 3 * 128, 3 * 128),
        "Exp": Cost(1, 2 * 128, 2 * 128),
        "Cast": Cost(1, 128 + 64, 128),
    }
    assert list(counted.by_type) == ["AddV2", "Exp", "Cast"]  # the largest first
    assert (counted.kernels, counted.bytes, counted.float32_bytes) == (3, 832, 768)
    assert counted.by_owner == {}


def test_what_passes_a_buffer_on_or_reads_a_variable_is_free():
    variable = tf.Variable(tf.ones((4, 8)))

    def step(x):
        return tf.reshape(tf.identity(x), [-1]), tf.shape(x)[0] + 1, variable.read_value()

    counted = traffic(step, X)
    assert (counted.kernels, counted.bytes) == (0, 0)


def test_update_of_a_variable_reads_and_writes_it_and_an_assignment_passes_the_buffer_on():
    variable = tf.Variable(tf.ones((4, 8)))
    rows = tf.Variable(tf.ones((100, 8)))

    def update(x):
        variable.assign_add(x)
        variable.assign(tf.exp(x))
        rows.scatter_nd_add([[3], [1], [2], [0]], x)

    counted = traffic(update, X)
    assert counted.by_type["AssignAddVariableOp"] == Cost(1, 3 * 128, 3 * 128)
    assert counted.by_type["Exp"] == Cost(1, 2 * 128, 2 * 128)
    assert counted.by_type["ResourceScatterNdAdd"] == Cost(1, 4 * 4 + 3 * 128, 3 * 128)
    assert counted.kernels == 3


def test_lookup_and_slice_read_what_they_write():
    table, ids = tf.TensorSpec((1000, 8), tf.float32), tf.TensorSpec((4,), tf.int32)
    counted = traffic(lambda table, ids: (tf.gather(table, ids), table[:4]), table, ids)
    axis, bounds = 4, 3 * 4  # int32
    assert counted.by_type["GatherV2"] == Cost(1, 4 * 4 + axis + 2 * 128, 2 * 128)
    assert counted.by_type["StridedSlice"] == Cost(1, bounds + 2 * 128, 2 * 128)


def test_what_reaches_no_output_and_no_state_is_pruned():
    def step(x):
        tf.tan(x)
        tf.random.uniform((4, 8))  # moves the state of its generator
        with tf.GradientTape() as tape:
            tape.watch(x)
            image = tf.reshape(x, (1, 4, 1, 8))
            ones = tf.ones(8)
            scale = {"scale": ones, "offset": ones, "mean": [], "variance": []}
            outputs = tf.raw_ops.FusedBatchNormV3(x=image, **scale)
        return tape.gradient(outputs.y, x, tf.reshape(x, (1, 4, 1, 8)))

    types = set(traffic(step, X).by_type) - {"Transpose"}
    assert types == {"RandomUniform", "FusedBatchNormV3", "FusedBatchNormGradV3"}


def test_small_results_of_constants_and_shapes_are_folded():
    counted = traffic(lambda x: x + tf.cast(tf.fill([4, 8], 2), tf.float32) * tf.ones_like(x), X)
    assert dict(counted.by_type) == {"AddV2": Cost(1, 3 * 128, 3 * 128)}
    counted = traffic(lambda: tf.fill([256, 256], 2.0))  # 256 KiB
    assert dict(counted.by_type) == {"Fill": Cost(1, 2 * 4 + 4 + 2**18, 4 + 2**18)}


def test_unknown_shapes_count_no_bytes():
    counted = traffic(tf.exp, tf.TensorSpec((None, 8), tf.float32))
    assert (counted.kernels, counted.bytes) == (1, 0)


def test_larger_side_of_a_branch_is_counted_and_calls_are_followed():
    called = tf.function(lambda x: tf.tan(tf.tan(x)), autograph=False)

    def step(x, scalar):
        return tf.cond(scalar > 0.0, lambda: tf.exp(x), lambda: called(x))

    counted = traffic(step, X, tf.TensorSpec((), tf.float32))
    assert counted.by_type["Tan"] == Cost(2, 4 * 128, 4 * 128)
    assert set(counted.by_type) == {"Greater", "Tan"}
    assert counted.host_decisions == 1


@pytest.mark.parametrize(("dtype", "expected"), [("int32", 0), ("int64", 1), ("float32", 1)])
def test_host_waits_for_a_predicate_that_the_device_computes(dtype, expected):
    limit = tf.Variable(2, dtype=dtype)
    branch = traffic(lambda x: tf.cond(limit + 1 > 2, lambda: tf.exp(x), lambda: x), X)
    assert branch.host_decisions == expected
    loop = traffic(lambda x: tf.while_loop(lambda _: limit > 2, lambda y: [tf.exp(y)], [x]), X)
    assert loop.host_decisions == expected


def test_loop_counts_its_maximum_number_of_iterations_if_it_is_known():
    def loop(x, maximum=None):
        functions = lambda i, y: i < 5, lambda i, y: (i + 1, tf.exp(y))
        return tf.while_loop(*functions, (0, x), maximum_iterations=maximum)

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = loop(x, 5)[1]
        return tape.gradient(outputs, x)

    assert dict(traffic(lambda x: loop(x, 5), X).by_type) == {"Exp": Cost(5, 10 * 128, 10 * 128)}
    assert traffic(loop, X).by_type["Exp"] == Cost(1, 2 * 128, 2 * 128)
    assert traffic(gradient, X).by_type["Mul"] == Cost(5, 15 * 128, 15 * 128)


def test_compiled_call_reads_and_writes_each_variable_once():
    large, small = tf.Variable(tf.ones((200, 100))), tf.Variable(tf.ones(10))  # 80,000 and 40 bytes

    @tf.function(jit_compile=True, autograph=False)
    def update(gradient, other):
        large.assign(large - tf.cast(gradient, tf.float32) * 0.1)
        small.assign_add(other)

    specs = tf.TensorSpec((200, 100), tf.float16), tf.TensorSpec(10)
    counted = traffic(update, *specs)
    in_float32 = 2 * 80_000 + 3 * 40
    assert counted.compiled_calls == 1
    assert counted.compiled == Cost(2, 40_000 + in_float32, in_float32)
    assert (counted.kernels, counted.bytes) == (2, 40_000 + in_float32)
    assert counted.host_decisions == 0


def test_gradient_of_a_compiled_function_is_compiled():
    @tf.function(jit_compile=True, autograph=False)
    def function(x):
        return tf.exp(tf.tanh(x))

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = function(x)
        return tape.gradient(outputs, x)

    counted = traffic(step, X)
    assert (counted.compiled_calls, counted.compiled.kernels) == (2, 2)
    assert not set(counted.by_type) & {"Exp", "Tanh", "TanhGrad"}


def test_kept_bytes_are_those_of_forward_tensors_that_the_backward_pass_reads():
    weights = tf.Variable(tf.ones((8, 8)))

    def step(x):
        with tf.GradientTape() as tape:
            # The gradients of both read the buffer of `hidden`, of 32 elements.
            hidden = tf.tanh(tf.cast(x @ weights, tf.float16))
            scaled = tf.reshape(hidden, (8, 4)) * tf.reshape(hidden, (8, 4))
            outputs = scaled + 1.0  # reads nothing
        gradient = tape.gradient(outputs, weights)
        with tf.name_scope("gradients"):
            gradient += tf.cast(tf.raw_ops.ZerosLike(x=outputs)[0, 0], tf.float32)  # reads a shape
        weights.assign_sub(gradient * 0.1)

    assert traffic(step, X).kept_bytes == 64


def test_bytes_are_attributed_to_the_owners_of_operations():
    def owner(name, op):
        scopes = name.split("/")
        return next((scope for scope in scopes if scope in ("a", "b", "c")), "")

    called = tf.function(tf.exp, autograph=False)

    def step(x, scalar):
        with tf.name_scope("a"):
            first = tf.exp(x)
        with tf.name_scope("b"):
            second = tf.cond(scalar > 0.0, lambda: called(x), lambda: x)
        third = tf.cast(first, tf.float16)  # no scope: belongs to what reads it
        with tf.name_scope("c"):
            third = tf.tanh(third)
        return second, tf.add_n([first, first]), third, tf.tan(x)

    counted = traffic(step, X, tf.TensorSpec(()), owner=owner)
    assert counted.by_owner["a"] == Cost(2, 5 * 128, 5 * 128)  # Exp, AddN
    assert counted.by_owner["b"] == Cost(2, 4 + 4 + 1 + 2 * 128, 4 + 4 + 2 * 128)  # Greater, Exp
    assert counted.by_owner["c"] == Cost(2, 128 + 64 + 2 * 64, 128)  # Cast, Tanh
    assert counted.by_owner[""] == Cost(1, 2 * 128, 2 * 128)  # Tan
    assert np.sum([cost.bytes for cost in counted.by_owner.values()]) == counted.bytes
