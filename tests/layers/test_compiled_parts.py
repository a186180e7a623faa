"""What XLA compiles of a step in graph mode on a GPU, traced and run here on a CPU."""

import contextlib
import functools
import gc
from typing import ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.saved_model import loader_impl

import kmp
from kmp.backend import compiled_parts
from kmp.backend.compiled_parts import can_compile, in_step, with_rounded_rows
from kmp.backend.xla import traced_for_gpu
from kmp.traffic import traffic_of

MASK = np.random.default_rng(3).random((3, 2, 5, 5)) > 0.4
NORMALIZATIONS = [
    (layers.LayerNormalization, (4, 5, 6)),
    (lambda: layers.LayerNormalization([1, 2], epsilon=1e-12), (4, 5, 6)),
    (lambda: layers.LayerNormalization(scale=False), (37, 6)),
    (lambda: layers.LayerNormalization(center=False, scale=False), (4, 5, 6)),
    (lambda: layers.GroupNormalization(3), (4, 5, 3, 6)),
    (lambda: layers.GroupNormalization(2, center=False), (4, 6)),
    (lambda: layers.GroupNormalization(-1, axis=1), (4, 6, 5, 3)),
    (layers.RMSNormalization, (4, 5, 6)),
    (lambda: layers.RMSNormalization([1, 2], epsilon=1e-2), (4, 5, 6)),
]
FUNCTIONS = {
    "gelu": ops.gelu,
    "exact gelu": keras.activations.gelu,
    "silu": ops.silu,
    "hard_silu": ops.hard_silu,
    "hard_sigmoid": ops.hard_sigmoid,
    "softmax": ops.softmax,
    "softmax of an inner axis": lambda x: ops.softmax(x, axis=1),
}
ATTENTION = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal and masked": {"is_causal": True, "mask": MASK},
}


@pytest.fixture(autouse=True)
def enabled():
    with kmp.enable():
        yield


def with_weights(layer, shape, dtype="mixed_float16"):
    """Returns a layer in another precision, with weights that depend on its class only."""
    layer = type(layer).from_config(layer.get_config() | {"dtype": dtype})
    layer.build((None, *shape[1:]))
    random = np.random.default_rng(1)
    for weight in layer.weights:
        weight.assign(random.uniform(0.5, 2.0, weight.shape))
    return layer


def data(shape, dtype="float16", mean=2.0):
    random = np.random.default_rng(0)
    return tuple(tf.cast(random.normal(*of, shape), dtype) for of in ((mean, 3.0), (0.0, 1.0)))


def gradients_of(function, weights=()):
    """Returns a function that returns results and their gradients."""
    variables = [each.value for each in weights]  # in the call of a layer, Keras casts them

    def gradients(x, upstream):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return [y, *tape.gradient(y, [x, *variables], upstream)]

    return gradients


def penalty_gradient_of(function):
    """Returns a function that returns the gradient of the squared norm of a gradient."""

    def penalty_gradient(x, upstream):
        with tf.GradientTape() as tape:
            tape.watch(x)
            gradient = gradients_of(function)(x, upstream)[1]
            penalty = tf.reduce_sum(tf.cast(gradient, tf.float32) ** 2)
        return [tape.gradient(penalty, x)]

    return penalty_gradient


def compiled_calls(graph):
    return traffic_of(graph).compiled_calls


def on_gpu(function, *arguments, in_a_step=True):
    """Returns what a function returns in a graph for any number of rows, and the graph."""
    specs = [tf.TensorSpec([None, *each.shape[1:]], each.dtype) for each in arguments]
    step = tf.function(function, autograph=False, input_signature=specs)
    with traced_for_gpu(), in_step(in_a_step):
        graph = step.get_concrete_function().graph
    return step(*arguments), graph


def in_float(bits, *tensors):
    return [tf.cast(each, f"float{bits}") for each in tensors]


def assert_close(found, expected, tolerance=1e-3):
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        exact = tf.cast(other, tf.float64).numpy()
        largest = max(np.abs(exact).max(), 1e-6)
        np.testing.assert_allclose(
            tf.cast(one, tf.float64), exact, rtol=0, atol=tolerance * largest
        )


@pytest.mark.parametrize(("make", "shape"), NORMALIZATIONS)
def test_normalization_is_compiled_and_has_the_gradients_of_float64(make, shape):
    layer, exact = with_weights(make(), shape), with_weights(make(), shape, "float64")
    x, upstream = data(shape)
    found, graph = on_gpu(gradients_of(layer, layer.weights), x, upstream)
    assert compiled_calls(graph) >= 2
    expected = gradients_of(exact, exact.weights)(*in_float(64, x, upstream))
    # Keras rounds the scale of `RMSNormalization` to 16 bits.
    assert_close(found, expected, 2e-3 if make is layers.RMSNormalization else 1e-3)


@pytest.mark.parametrize(("make", "shape"), [NORMALIZATIONS[i] for i in (4, 7)])
def test_normalization_has_the_second_derivatives_of_float64(make, shape):
    layer, exact = with_weights(make(), shape), with_weights(make(), shape, "float64")
    x, upstream = data(shape)
    found, _ = on_gpu(penalty_gradient_of(layer), x, upstream)
    assert_close(found, penalty_gradient_of(exact)(*in_float(64, x, upstream)), 3e-3)


@pytest.mark.parametrize("make", [layers.LayerNormalization, layers.RMSNormalization])
def test_normalization_on_a_gpu_without_triton_has_the_gradients_of_float64(make, monkeypatch):
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [kind])
    details = {"device_name": "Tesla T4", "compute_capability": (7, 5)}
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: details)
    shape = (4, 5, 7)
    layer, exact = with_weights(make(), shape), with_weights(make(), shape, "float64")
    x, upstream = data(shape)
    found, graph = on_gpu(gradients_of(layer, layer.weights), x, upstream)
    assert reads_once(graph)
    assert_close(found, gradients_of(exact, exact.weights)(*in_float(64, x, upstream)), 2e-3)


def reads_once(graph):
    """Whether the statistics of rows are computed apart from what needs them, in one read."""
    [name] = [each for each in operation_names(graph) if "_normalize_rows" in each]
    program = graph._get_function(name).graph
    return any(op.type == "XlaOptimizationBarrier" for op in program.get_operations())


@pytest.mark.parametrize(
    ("capabilities", "has_triton"),
    [([(8, 0)], True), ([(9, 0), (7, 5)], False), ([], True)],
    ids=["A100", "H100 and T4", "none"],
)
def test_normalization_is_compiled_for_the_oldest_gpu(capabilities, has_triton, monkeypatch):
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: capabilities)
    details = lambda gpu: {"compute_capability": gpu}  # noqa: E731
    monkeypatch.setattr(tf.config.experimental, "get_device_details", details)
    layer = with_weights(layers.LayerNormalization(), (4, 5, 6))
    graph = on_gpu(layer, tf.zeros([4, 5, 6], tf.float16))[1]
    assert reads_once(graph) is not has_triton


def test_rows_of_texts_of_any_length_are_compiled_for_few_lengths():
    layer = with_weights(layers.LayerNormalization(epsilon=0.0), (4, 5, 6))
    exact = with_weights(layers.LayerNormalization(epsilon=0.0), (4, 5, 6), "float64")
    spec = tf.TensorSpec([None, None, 6], tf.float16)
    gradients = gradients_of(layer, layer.weights)
    step = tf.function(gradients, autograph=False, input_signature=[spec, spec])
    with traced_for_gpu(), in_step():
        graph = step.get_concrete_function().graph
    assert compiled_calls(graph) == 3
    for length in (1, 11):
        x, upstream = data((3, length, 6))
        found = step(x, upstream)
        assert_close(found, gradients_of(exact, exact.weights)(*in_float(64, x, upstream)))
    assert step(*(tf.zeros([3, 0, 6], tf.float16),) * 2)[0].shape == (3, 0, 6)


def test_numbers_of_rows_are_rounded_up_to_four_steps_per_power_of_two():
    def with_padded_count(rows):
        return tf.concat([rows, tf.ones_like(rows) * tf.cast(tf.shape(rows)[0], tf.float32)], 1)

    step = tf.function(
        lambda rows: with_rounded_rows(with_padded_count, rows),
        input_signature=[tf.TensorSpec([None, 1])],
    )
    found = [step(tf.fill([count, 1], 2.0)).numpy() for count in (0, 1, 7, 8, 9, 11, 17, 1000)]
    assert [each.shape[0] for each in found] == [0, 1, 7, 8, 9, 11, 17, 1000]
    assert [each[-1].tolist() for each in found[1:]] == [
        [2.0, count] for count in (1, 7, 8, 10, 12, 20, 1024)
    ]


# Of the tests of one function, so that XLA compiles it for one shape.
SHAPE = (9, 4, 2)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_is_compiled_and_has_the_gradient_of_float32(name):
    function = gradients_of(FUNCTIONS[name])
    x, upstream = data(SHAPE, mean=0.0)
    found, graph = on_gpu(function, x, upstream)
    assert compiled_calls(graph) == 2
    assert_close(found, function(*in_float(32, x, upstream)))


def test_function_has_the_second_derivative_of_float32():
    function = penalty_gradient_of(FUNCTIONS["softmax of an inner axis"])
    x, upstream = data(SHAPE, mean=0.0)
    found, _ = on_gpu(function, x, upstream)
    assert_close(found, function(*in_float(32, x, upstream)))


NONFINITE = [np.inf, -np.inf, np.nan]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_inf_and_nan_arrive_where_they_do_in_float32_under_xla(name):
    function = gradients_of(FUNCTIONS[name])
    # One of them in each row: as an input, or as a gradient of finite inputs on either side.
    inputs = np.tile(np.array([0.5, -4.0, -1.0, 4.0])[:, None], (SHAPE[0], 1, SHAPE[2]))
    upstream = np.ones_like(inputs)
    for row, value in enumerate(NONFINITE):
        inputs[row, 0, 0] = upstream[row + 3, 1, 0] = upstream[row + 6, 3, 0] = value
    x, upstream = tf.constant(inputs, tf.float16), tf.constant(upstream, tf.float16)
    found, graph = on_gpu(function, x, upstream)
    assert compiled_calls(graph) == 2
    exact = in_float(32, x, upstream)
    expected = tf.function(function, jit_compile=True, autograph=False)(*exact)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.isfinite(one), np.isfinite(other))
    # TensorFlow's own kernels return more NaN only in gradients of the hard functions.
    y, gradient = (~np.isfinite(each) for each in tf.function(function, autograph=False)(*exact))
    assert np.isfinite(found[0][y]).sum() == 0
    if not name.startswith("hard"):
        assert np.isfinite(found[1][gradient]).sum() == 0


@pytest.mark.parametrize("name", ["softmax", "LayerNormalization", "BatchNormalization"])
def test_forward_accumulator_has_the_directional_derivative_of_float32(name):
    by_row = with_weights(layers.LayerNormalization(), (3, 5, 7))
    by_channel = with_weights(layers.BatchNormalization(), (3, 5, 7))
    function = {
        "softmax": ops.softmax,
        "LayerNormalization": by_row,
        "BatchNormalization": lambda x: by_channel(x, training=True),
    }[name]

    def directional_derivative(x, direction):
        with tf.autodiff.ForwardAccumulator(x, direction) as accumulator:
            y = function(x)
        return accumulator.jvp(y)

    x, direction = data((3, 5, 7), mean=0.0)
    found, graph = on_gpu(directional_derivative, x, direction)
    assert compiled_calls(graph) >= 1
    expected = directional_derivative(*in_float(32, x, direction))
    assert_close([found], [expected], 5e-3)


@pytest.mark.parametrize("name", ATTENTION)
def test_weights_of_attention_are_compiled_and_have_the_derivatives_of_float32(name):
    def attention(x):
        return ops.dot_product_attention(x, 2 * x, x, scale=0.05, **ATTENTION[name])

    x, upstream = data((3, 5, 2, 7), mean=0.0)
    found, graph = on_gpu(gradients_of(attention), x, upstream)
    assert compiled_calls(graph) == 2
    # The products are rounded to 16 bits, as by Keras.
    assert_close(found, gradients_of(attention)(*in_float(32, x, upstream)), 5e-3)


def test_masked_softmax_is_compiled_and_has_the_gradients_of_float32():
    x, upstream = data((3, 2, 5, 5), mean=0.0)
    mask = tf.constant(MASK & (np.arange(5) != 3)[:, None])  # a row has no place
    layer, exact = layers.Softmax(), layers.Softmax(dtype="float32")
    found, graph = on_gpu(gradients_of(lambda x: layer(x, mask=mask)), x, upstream)
    assert compiled_calls(graph) == 2
    expected = gradients_of(lambda x: exact(x, mask=mask))(*in_float(32, x, upstream))
    assert_close(found, expected)


def test_bfloat16_is_rounded_once():
    shape = (4, 5, 6)
    layer, exact = (
        with_weights(layers.LayerNormalization(), shape, dtype)
        for dtype in ("mixed_bfloat16", "float64")
    )
    x, _ = data(shape, "bfloat16")
    found, _ = on_gpu(layer, x)
    assert_close([found], [exact(tf.cast(x, tf.float64))], 2.0**-8)


def test_large_mean_does_not_cancel_the_deviations():
    shape = (4, 8, 8, 6)
    for make in (lambda: layers.GroupNormalization(3), layers.LayerNormalization):
        layer, exact = with_weights(make(), shape), with_weights(make(), shape, "float64")
        x, upstream = data(shape, mean=1000.0)
        found, _ = on_gpu(gradients_of(layer, layer.weights), x, upstream)
        expected = gradients_of(exact, exact.weights)(*in_float(64, x, upstream))
        assert_close(found, expected, 2e-3)


@pytest.mark.parametrize(
    "make", [lambda: layers.GroupNormalization(2), lambda: layers.LayerNormalization([1, 2, 3])]
)
def test_one_outlier_does_not_cancel_the_deviations(make):
    shape = (2, 64, 64, 4)
    layer, exact = with_weights(make(), shape), with_weights(make(), shape, "float64")
    x, upstream = (each.numpy() for each in data(shape, mean=0.0))
    x[0, 0, 0, 0] = x[1, -1, -1, -1] = 2e4
    found, _ = on_gpu(gradients_of(layer, layer.weights), tf.constant(x), tf.constant(upstream))
    expected = gradients_of(exact, exact.weights)(*in_float(64, x, upstream))
    assert_close(found[2:], expected[2:], 5e-6)


def test_step_reads_and_writes_16_bits_and_keeps_only_the_inputs():
    layer = with_weights(layers.LayerNormalization(), (4, 50, 60))

    def backward(x, upstream):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(3 * x)
        return [y, *tape.gradient(y, [x, *(each.value for each in layer.weights)], upstream)]

    x, upstream = data((4, 50, 60))
    with traced_for_gpu(), in_step():
        call = tf.function(backward, autograph=False)
        graph = call.get_concrete_function(x, upstream).graph
    outputs = [out for op in graph.get_operations() for out in op.outputs]
    large = [out for out in outputs if out.shape.num_elements() == tf.size(x)]
    assert {out.dtype for out in large} == {tf.float16}
    assert traffic_of(graph).kept_bytes == 4 * 50 * 60 * 2


def test_batch_without_rows_has_no_rows_and_gradients_of_zero():
    for make, shape in (NORMALIZATIONS[0], NORMALIZATIONS[4], NORMALIZATIONS[2]):
        layer = with_weights(make(), shape)
        x, upstream = (tf.zeros([0, *shape[1:]], tf.float16) for _ in range(2))
        found, graph = on_gpu(gradients_of(layer, layer.weights), x, upstream)
        assert compiled_calls(graph) >= 2
        assert found[0].shape == found[1].shape == x.shape
        for gradient in found[2:]:
            np.testing.assert_array_equal(gradient, tf.zeros_like(gradient))


def test_layers_of_one_shape_share_a_program_and_weights_that_need_no_gradient_cost_none():
    stack = [with_weights(layers.LayerNormalization(), (4, 5, 6)) for _ in range(3)]
    x, _ = data((4, 5, 6))

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for layer in stack:
                y = layer(y)
        return tape.gradient(y, x)

    _, graph = on_gpu(gradient, x)
    calls = [op for op in graph.get_operations() if "PartitionedCall" in op.type]
    assert len({op.get_attr("f").name for op in calls}) == 3  # values and both gradients
    assert (len(calls), compiled_calls(graph)) == (9, 6)  # TensorFlow prunes what nothing needs


@pytest.mark.parametrize("where", ["CPU", "eager", "XLA", "no step", "unknown sizes", "float32"])
def test_code_of_keras_runs_elsewhere(where):
    dtype = "float32" if where == "float32" else "mixed_float16"
    layer = with_weights(layers.LayerNormalization(), (4, 5, 6), dtype)
    plain = layers.LayerNormalization.call
    x, _ = data((4, 5, 6), dtype.removeprefix("mixed_"))
    size = None if where == "unknown sizes" else 5
    if where == "unknown sizes":
        layer, plain = layers.Softmax(), layers.Softmax.call
    spec = tf.TensorSpec([None, size, 6], x.dtype)

    def both(x):
        outputs = layer(x), plain(layer, x)
        return outputs if where == "float32" else (*outputs, keras.activations.gelu(x))

    program = tf.function(
        both, autograph=False, jit_compile=where == "XLA" or None, input_signature=[spec]
    )
    with (
        contextlib.nullcontext() if where == "CPU" else traced_for_gpu(),
        in_step(where != "no step"),
    ):
        found = both(x) if where == "eager" else program(x)
        if where != "eager":
            assert compiled_calls(program.get_concrete_function().graph) == 0
    np.testing.assert_array_equal(found[0], found[1])


def model_with_parts():
    x = inputs = keras.Input((6, 16))
    x = x + layers.MultiHeadAttention(1, 8)(x, x)
    x = layers.Dense(8, activation="gelu")(layers.LayerNormalization()(x))
    x = layers.BatchNormalization()(x)
    return keras.Model(inputs, layers.Dense(1, dtype="float32")(layers.Flatten()(x)))


def needs_xla(folder):
    """Whether a node of a saved model calls a function that XLA must compile."""
    graph = loader_impl.parse_saved_model(str(folder)).meta_graphs[0].graph_def
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    return any(node.attr["_XlaMustCompile"].b for node in nodes)


def test_model_is_trained_and_evaluated_with_compiled_parts_and_its_export_needs_no_xla(tmp_path):
    random = np.random.default_rng(0)
    x = random.normal(size=(12, 6, 16)).astype("float32")
    y = x.mean((1, 2))[:, None]
    model = model_with_parts()
    model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
    with traced_for_gpu():
        # The last batch has fewer rows.
        history = model.fit(x, y, batch_size=8, epochs=3, verbose=0, validation_data=(x, y)).history
        model.predict(x, batch_size=8, verbose=0)
        model.export(tmp_path / "model", verbose=False)
        tf.saved_model.save(model, tmp_path / "saved")
    assert not needs_xla(tmp_path / "model")
    assert not needs_xla(tmp_path / "saved")
    assert history["loss"][-1] < history["loss"][0]
    model.make_test_function(force=True)
    assert model.evaluate(x, y, verbose=0) == pytest.approx(history["val_loss"][-1], rel=2e-2)


class NotesWhetherPartsCompile(layers.Layer):
    noted: ClassVar[list[bool]] = []

    def call(self, x):
        with traced_for_gpu():  # in the thread of a replica
            self.noted.append(can_compile(x))
        return x


@pytest.mark.parametrize(("method", "replicas"), [("evaluate", 2), ("predict", 1)])
def test_evaluate_and_predict_compile_parts_and_exports_and_calls_do_not(
    method, replicas, two_replicas, tmp_path
):
    strategy = two_replicas if replicas == 2 else tf.distribute.get_strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), NotesWhetherPartsCompile(), layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    noted = NotesWhetherPartsCompile.noted
    noted.clear()
    x = np.zeros((4, 4))
    model.predict(x, verbose=0) if method == "predict" else model.evaluate(x, x, verbose=0)
    assert noted[-replicas:] == [True] * replicas  # the model may be built before
    noted.clear()
    tf.function(model)(x)
    model.export(tmp_path / "model", verbose=False)
    assert noted
    assert not any(noted)


@pytest.mark.parametrize("method", ["test_step", "predict_step"])
def test_step_of_the_model_itself_is_called(method):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    setattr(model, method, lambda data: {"own": tf.constant(3.0)})
    x = np.zeros((4, 4))
    call = model.predict if method == "predict_step" else model.evaluate
    for _ in range(2):
        options = {"return_dict": True} if method == "test_step" else {}
        assert call(x, verbose=0, batch_size=4, **options)["own"] == 3.0
        model.make_predict_function(force=True)
        model.make_test_function(force=True)


@pytest.mark.parametrize("compiles", [True, False])
def test_steps_compile_parts_unless_the_optimizer_must_not_compile(compiles):
    stack = [layers.Dense(4), layers.LayerNormalization(), layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *stack])
    options = {} if compiles else {"jit_compile": False}
    model.compile(kmp.wrap("sgd", **options), "mse", jit_compile=False)
    x, y = tf.zeros([4, 4]), tf.zeros([4, 1])
    step = tf.function(lambda x, y: model.train_step((x, y)), autograph=False)
    with traced_for_gpu():
        names = operation_names(step.get_concrete_function(x, y).graph)
    assert any("_normalize_rows" in name for name in names) is compiles


def operation_names(graph):
    calls = [op for op in graph.get_operations() if "PartitionedCall" in op.type]
    return [op.get_attr("f").name for op in calls]


def test_replicas_compile_parts():
    devices = tf.config.list_logical_devices("CPU")
    strategy = tf.distribute.MirroredStrategy([device.name for device in devices])
    with strategy.scope():
        layer = with_weights(layers.LayerNormalization(), (4, 5, 6))
    x, _ = data((4, 5, 6))

    def of_replica(x):
        with traced_for_gpu(), in_step():
            return layer(x)

    found = tf.function(lambda x: strategy.run(of_replica, (x,)), autograph=False)(x)
    exact = with_weights(layers.LayerNormalization(), (4, 5, 6), "float64")(tf.cast(x, tf.float64))
    for each in strategy.experimental_local_results(found):
        assert_close([each], [exact])


def test_no_shape_of_a_part_warns_that_it_is_traced(caplog):
    for size in range(2, 12):
        on_gpu(ops.gelu, tf.zeros([2, size], tf.float16))
    assert "retracing" not in caplog.text


def test_graphs_are_freed_with_the_programs_of_a_search_over_widths(monkeypatch):
    uncached = compiled_parts._program.__wrapped__
    monkeypatch.setattr(compiled_parts, "_program", functools.lru_cache(maxsize=4)(uncached))
    programs = set()

    def trace(widths):
        for width in widths:
            spec = tf.TensorSpec([None, width], tf.float16)
            step = tf.function(
                gradients_of(ops.hard_sigmoid), autograph=False, input_signature=[spec, spec]
            )
            with traced_for_gpu(), in_step():
                graph = step.get_concrete_function().graph
            programs.update(operation_names(graph))
            del step, graph
        gc.collect()
        return sum(isinstance(each, FuncGraph) for each in gc.get_objects())

    trace(range(1, 3))
    assert len(programs) == 4  # two for each width
    live = trace(range(3, 6))
    assert trace(range(6, 12)) <= live
