"""A pass that is cut out of the graph of the training step, and rewritten to other formats."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MODES
from keras import layers, ops

import kmp
from kmp.backend.graph_formats import NotRewritable
from kmp.guarding.guarded_step import guarded_step_of
from kmp.replay.step_program import step_program

pytestmark = pytest.mark.usefixtures("enabled")
SCALE = 2.0**10
X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
Y = X[:, :1]


def trained(*hidden, optimizer="sgd", model_class=keras.Sequential, **options):
    """Returns a model after a step, and the graph of the step."""
    model = model_class([keras.Input((6,)), *hidden, layers.Dense(1, dtype="float32")])
    options = MODES["graph"] | options
    model.compile(kmp.LossScaleOptimizer(optimizer, initial_scale=SCALE), "mse", **options)
    model.fit(X, Y, batch_size=8, verbose=0)
    return model, guarded_step_of(model).graphs[None][0]


def run(graph, x=X, scale=SCALE, *, has_outputs=True, **options):
    outputs = [each for call in graph.calls for each in call.outputs] if has_outputs else []
    program = step_program(
        graph,
        tensors=outputs,
        measure=lambda view: [view.find(each) for each in outputs],
        **options,
    )
    data = tf.nest.map_structure(lambda v, t: tf.cast(v, t.dtype), (x, Y), graph.data)
    return program, program(data, scale)


def error(values, exact):
    values, exact = (np.asarray(tf.cast(each, "float64")) for each in (values, exact))
    return np.linalg.norm(values - exact) / np.linalg.norm(exact)


def state_of(model):
    return [np.asarray(each) for each in (*model.variables, *model.optimizer.variables)]


class Counting(layers.Layer):
    """Assigns variables of TensorFlow, in a branch too, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.steps = tf.Variable(0.0, trainable=False)
        self.large = tf.Variable(0.0, trainable=False)
        self.calls = 0

    def call(self, inputs):
        self.calls += 1
        self.steps.assign_add(1.0)
        tf.cond(self.steps > 0.0, lambda: self.large.assign_add(2.0), lambda: self.large)
        return inputs + tf.cast(0.0 * self.steps, inputs.dtype)


class Noise(layers.Layer):
    def call(self, inputs):
        return inputs + tf.random.normal(tf.shape(inputs), dtype=inputs.dtype)


class NoiseInLoop(layers.Layer):
    def call(self, inputs):
        def body(number, x):
            return number + 1, x + tf.cast(tf.random.normal(tf.shape(x)), x.dtype)

        return tf.while_loop(lambda number, _: number < 2, body, [0, inputs])[1]


class Offset(layers.Layer):
    """Loses what it gets in 16 bits, if no optimization removes its operations."""

    def call(self, inputs):
        return (inputs + 4096.0) - 4096.0


class Masked(layers.Layer):
    """Adds a constant that is infinite in float16, and divides by one that is zero in it."""

    def call(self, inputs):
        with np.errstate(over="ignore"):  # where Keras finds out the shape of the outputs
            masked = inputs + ops.cast(inputs < 9.0, inputs.dtype) * -1e9
        return inputs + ops.softmax(masked) * (1e-9 / (1e-9 + ops.abs(inputs)))


class Overflowing(layers.Layer):
    def call(self, inputs):
        return (inputs * 300.0) * 300.0 * (1 / 9e4)


NETWORKS = {
    "dropout": lambda: [layers.Dense(16, "gelu"), layers.BatchNormalization(), layers.Dropout(0.5)],
    "recurrent": lambda: [layers.Reshape((3, 2)), layers.LSTM(8), layers.LayerNormalization()],
    "python loop": lambda: [layers.Reshape((3, 2)), layers.LSTM(8, unroll=True)],
    "loop": lambda: [layers.Reshape((3, 2)), layers.LSTM(8, use_cudnn=False)],
    "spectral": lambda: [layers.SpectralNormalization(layers.Dense(8)), layers.Dense(4)],
    "embedding": lambda: [
        layers.Lambda(lambda x: ops.cast(ops.abs(x), "int32")),
        layers.Embedding(8, 4),
        layers.Flatten(),
    ],
    "convolution": lambda: [layers.Reshape((2, 3, 1)), layers.Conv2D(4, 2), layers.Flatten()],
}


@pytest.mark.parametrize("network", NETWORKS)
def test_program_is_what_trains_and_changes_nothing(network):
    model, graph = trained(*NETWORKS[network]())
    before = state_of(model)
    program, own = run(graph)
    assert all(map(np.array_equal, before, state_of(model)))

    weights = [np.asarray(each) for each in model.trainable_variables]
    loss = model.train_on_batch(X, Y)
    assert float(own.losses[0]) == pytest.approx(loss, rel=1e-6)
    for variable, start in zip(model.trainable_variables, weights, strict=True):
        assigned = program.assigned(variable)
        value = start if assigned is None else assigned
        gradient = tf.cast(tf.convert_to_tensor(own.gradients[id(variable)]), "float32") / SCALE
        np.testing.assert_allclose(value - 0.01 * gradient, variable, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("network", NETWORKS)
def test_program_in_float32_is_that_of_a_model_in_float32(network):
    model, graph = trained(*NETWORKS[network]())
    _, own = run(graph)
    program, exact = run(graph, dtype="float32")
    assert {each.dtype.name for each in exact.measured} <= {"float32", "int32"}
    kmp.disable()
    keras.config.set_dtype_policy("float32")
    single = keras.Sequential([keras.Input((6,)), *NETWORKS[network](), layers.Dense(1)])
    single.compile("sgd", "mse", jit_compile=False)
    # The seeds of dropout too. Its masks differ, because it draws in the dtype.
    single.set_weights(model.get_weights())
    weights = [np.asarray(each) for each in single.trainable_variables]
    loss = single.train_on_batch(X, Y)
    assert float(own.losses[0]) == pytest.approx(float(exact.losses[0]), rel=0.02)
    if network == "dropout":
        return
    assert float(exact.losses[0]) == pytest.approx(loss, rel=1e-5)
    assert any(error(*pair) > 1e-5 for pair in zip(own.measured, exact.measured, strict=True))
    pairs = zip(model.trainable_variables, single.trainable_variables, weights, strict=True)
    for variable, other, start in pairs:
        assigned = program.assigned(variable)
        value = start if assigned is None else assigned
        gradient = tf.convert_to_tensor(exact.gradients[id(variable)])
        np.testing.assert_allclose(0.01 * gradient / SCALE, value - other, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("mode", ["xla", "steps_per_execution"])
def test_program_of_a_step_in_a_loop_or_compiled(mode):
    _, graph = trained(layers.Dense(8, "tanh"), layers.Dropout(0.2), **MODES[mode])
    _, own = run(graph, as_trained=True, has_outputs=False)
    _, exact = run(graph, dtype="float32", as_trained=True, has_outputs=False)
    own, exact = (list(each.gradients.values()) for each in (own, exact))
    assert all(0.0 < error(*pair) < 0.02 for pair in zip(own, exact, strict=True))


def test_program_of_a_replica(one_replica):
    with one_replica.scope():
        model, graph = trained(layers.Dense(8), layers.BatchNormalization(), jit_compile=True)
    program, own = run(graph, as_trained=True)
    variable = model.layers[1].moving_mean
    assert np.isfinite(own.losses[0])
    assert not np.array_equal(program.assigned(variable), variable)


def test_variables_of_tensorflow_and_python_state_are_unchanged():
    layer = Counting()
    model, graph = trained(layers.Dense(4), layer)
    before = [float(layer.steps), float(layer.large), layer.calls]
    program, _ = run(graph)
    assert [float(layer.steps), float(layer.large), layer.calls] == before
    assert float(program.assigned(layer.steps)) == before[0] + 1.0
    assert float(program.assigned(layer.large)) == before[1] + 2.0
    assert program.assigned(model.layers[0].kernel) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: layers.Dropout(0.5),
        lambda: layers.GaussianNoise(1.0),
        Noise,
        NoiseInLoop,
    ],
)
def test_random_numbers_are_the_same_in_both_formats(make):
    layer = make()
    _, graph = trained(layer)
    _, own = run(graph)
    program, exact = run(graph, dtype="float32")
    index = next(i for i, call in enumerate(graph.calls) if call.name == layer.name)
    assert 0.0 < error(own.measured[index], exact.measured[index]) < 1e-3
    again = program((tf.constant(X), tf.constant(Y)), SCALE)
    assert np.array_equal(again.measured[index], exact.measured[index])


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x * tf.cast(tf.random.gamma([6], 2.0), x.dtype),
        lambda x: x * tf.cast(tf.random.shuffle(tf.range(6)), x.dtype),
        lambda x: x * tf.cast(tf.random.categorical(tf.cast(x, "float32"), 1), x.dtype),
    ],
)
def test_random_numbers_that_no_seed_can_repeat_are_refused(draw):
    _, graph = trained(layers.Lambda(draw))
    with pytest.raises(NotRewritable, match="draws other numbers each time"):
        step_program(graph)


def test_program_outlives_another_one_of_the_same_step():
    _, graph = trained(NoiseInLoop())
    first, exact = run(graph, dtype="float32")
    second = step_program(graph, "float32")
    del first
    gc.collect()
    again = second((tf.constant(X), tf.constant(Y)), SCALE)
    assert np.array_equal(again.losses, exact.losses)


def test_function_takes_the_largest_element():
    def scaled(x):
        return x * tf.cast(tf.argmax(x, -1), x.dtype)[:, None]

    model, graph = trained(layers.Lambda(tf.function(scaled)), layers.Dense(4))
    _, exact = run(graph, dtype="float32")
    assert float(exact.losses[0]) == pytest.approx(model.train_on_batch(X, Y), rel=1e-2)


def test_batch_without_targets_or_weights():
    model, _ = trained(layers.Dense(4))
    model.train_on_batch(X, Y)
    graph = guarded_step_of(model).graphs[None][0]
    assert graph.data[2] is None
    own = step_program(graph)((tf.constant(X), tf.constant(Y), None), SCALE)
    assert float(own.losses[0]) == pytest.approx(model.train_on_batch(X, Y), rel=1e-6)


class Accumulating(keras.Sequential):
    """Applies gradients from variables."""

    def build(self, shape):
        super().build(shape)
        self.sums = [tf.Variable(tf.zeros(v.shape)) for v in self.trainable_variables]

    def train_step(self, data):
        variables = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(data[0], training=True) - data[1]) ** 2)
            scaled = self.optimizer.scale_loss(loss)
        for total, gradient in zip(self.sums, tape.gradient(scaled, variables), strict=True):
            total.assign(0.5 * total + gradient)
        self.optimizer.apply(self.sums, variables)
        return {"loss": loss}


def test_gradients_that_the_step_does_not_compute_are_refused():
    _, graph = trained(layers.Dense(4), model_class=Accumulating)
    with pytest.raises(RuntimeError, match="gradients that it does not compute"):
        step_program(graph)


def test_constants_may_have_another_shape_than_their_values():
    def offset(x):
        values = tf.constant([1e-9, 0.0, 0.0, 1e-9], x.dtype, shape=[2, 2])
        return x + tf.cast(1e9 * tf.cast(tf.reduce_sum(values), "float32"), x.dtype)

    _, graph = trained(layers.Lambda(offset, name="offset"))
    _, own = run(graph)
    _, exact = run(graph, dtype="float32")
    index = next(i for i, call in enumerate(graph.calls) if call.name == "offset")
    np.testing.assert_allclose(exact.measured[index], X + 2.0, rtol=1e-5)
    assert error(own.measured[index], X) < 1e-3


def test_constants_have_their_exact_values_in_float32():
    _, graph = trained(layers.Dense(4), Masked())
    _, own = run(graph)
    _, exact = run(graph, dtype="float32")
    assert not np.isfinite(own.losses[0])
    assert np.isfinite(exact.losses[0])


def test_layer_computes_in_float32_with_its_backward_pass():
    _, graph = trained(layers.Dense(8), Overflowing(name="overflowing"), layers.Dense(4, "relu"))
    _, own = run(graph)
    _, exact = run(graph, dtype="float32")
    assert not np.isfinite(own.losses[0])
    assert np.isfinite(exact.losses[0])
    overflowing = [call for call in graph.calls if call.name == "overflowing"]
    _, repaired = run(graph, dtype="float32", only=overflowing)
    dtypes = [each.dtype.name for each in repaired.measured]
    assert dtypes == ["float16", "float32", "float16", "float32", "float32"]
    assert float(repaired.losses[0]) == pytest.approx(float(exact.losses[0]), rel=0.01)
    for name, gradient in exact.gradients.items():
        assert error(repaired.gradients[name], gradient) < 0.01


def test_other_16_bit_format():
    _, graph = trained(layers.Dense(8, "gelu"), layers.Dense(4))
    _, exact = run(graph, dtype="float32")
    _, own = run(graph)
    _, other = run(graph, dtype="bfloat16")
    assert other.measured[0].dtype.name == "bfloat16"
    assert error(own.measured[0], exact.measured[0]) < error(other.measured[0], exact.measured[0])


def test_what_xla_simplifies_is_lost_in_graph_mode_only():
    _, graph = trained(Offset(), **MODES["xla"])
    _, exact = run(graph, dtype="float32")
    _, own = run(graph)
    _, compiled = run(graph, as_trained=True)
    assert error(own.measured[0], exact.measured[0]) > 0.5
    assert error(compiled.measured[0], exact.measured[0]) < 1e-3


def test_state_at_the_beginning_may_be_another():
    normalization = layers.BatchNormalization(momentum=0.5)
    _, graph = trained(normalization)
    program = step_program(graph, "float32")
    data = tf.constant(X), tf.constant(Y)
    handle = normalization.moving_mean.value.handle
    program(data, SCALE, {id(handle): np.full(6, 10.0)})
    expected = 5.0 + 0.5 * X.mean(0)
    np.testing.assert_allclose(program.assigned(normalization.moving_mean), expected, rtol=1e-3)


def test_step_that_writes_a_file_is_refused():
    class Writing(layers.Layer):
        def call(self, inputs):
            tf.py_function(lambda: None, [], [])
            return inputs

    _, graph = trained(Writing())
    with pytest.raises(RuntimeError, match="a pass would change tf.py_function"):
        step_program(graph)


def test_function_with_variables_and_random_numbers_in_16_bits_computes_in_float32():
    class Half(layers.Layer):
        def build(self, shape):
            self.half = self.add_weight(shape=(6,), dtype="float16", trainable=False)

        def call(self, inputs):
            def body(n, x):
                self.half.value.assign_add(tf.fill([6], tf.cast(n, "float16") + 1.0))
                noise = tf.random.uniform((6,), dtype="float16")
                return n + 1, x + tf.cast(self.half.value + noise, x.dtype)

            return tf.while_loop(lambda n, _: n < 2, body, [0, inputs])[1]

    model, graph = trained(Half())
    before = state_of(model)
    _, own = run(graph)
    _, exact = run(graph, dtype="float32")
    assert float(own.losses[0]) == pytest.approx(float(exact.losses[0]), rel=1e-2)
    assert float(own.losses[0]) != float(exact.losses[0])
    np.testing.assert_equal(state_of(model), before)
