"""`audit` and `convert` look into custom layers, `Lambda`s, functions and subclassed models."""

import inspect
import random
import re

import keras
import numpy as np
import pytest
from keras import layers, ops

import kmp


def model_of(function, shape=(8,)):
    """A model with a function or layer between two layers, and linear outputs."""
    inputs = keras.Input(shape)
    hidden = layers.Dense(8, name="before")(inputs)
    return keras.Model(inputs, layers.Dense(2, name="after")(function(hidden)))


class Code(layers.Layer):
    """A layer whose code is a function."""

    def __init__(self, function, **arguments):
        super().__init__(**arguments)
        self.function = function

    def call(self, x):
        return self.function(x)

    def get_config(self):
        return {**super().get_config(), "function": self.function}


def contrastive(x):
    scores = x / ops.sqrt(ops.sum(x * x, axis=-1, keepdims=True))
    return ops.exp(scores / 0.07)


def temperature(x):
    return ops.exp(layers.LayerNormalization()(x) / 0.07)


UNSAFE = {
    "exponential": lambda x: 2.0 * ops.exp(x),
    "square": lambda x: x * x,
    "contrastive": contrastive,
    "small epsilon": lambda x: x / (ops.abs(x) + 1e-12),
    "logarithm of a sigmoid": lambda x: ops.log(ops.sigmoid(x)),
    "mask": lambda x: x + ops.cast(x > 0, x.dtype) * -1e9,
    "bounded, then large": lambda x: 1000.0 * ops.tanh(x) * 100.0,
    "large offset": lambda x: (x + 6e4) * 2.0,
    "repeated factors": lambda x: x * 16.0 * 16.0 * 16.0 * 16.0,
    "vanishing factors": lambda x: ops.tanh(x) * 1e-4 * 1e-4 * 1e4 * 1e4,
    "index": lambda x: ops.one_hot(ops.cast(ops.sigmoid(x) * 4095.0, "int32")[:, 0], 8),
    "positions": lambda x: x + ops.sin(ops.tanh(x) * 1e4),
}
SAFE = {
    "radial basis": lambda x: ops.exp(-ops.square(ops.tanh(x))),
    "softplus by hand": lambda x: ops.log(1.0 + ops.exp(-ops.abs(x))) + ops.relu(x),
    "softsign by hand": lambda x: x / (1.0 + ops.abs(x)),
    "gate": lambda x: x * ops.sigmoid(x),
    "product of gates": lambda x: x * ops.sigmoid(x) * ops.tanh(x),
    "sum of a few": lambda x: ops.sum(ops.reshape(x, (-1, 4, 2)), axis=-1),
    "root of one plus": lambda x: ops.sqrt(1.0 + ops.abs(x)),
    "float32 inside": lambda x: ops.cast(ops.tanh(ops.square(ops.cast(x, "float32"))), x.dtype),
}


@pytest.mark.parametrize("wrap", [Code, layers.Lambda], ids=["layer", "lambda"])
@pytest.mark.parametrize("name", UNSAFE)
def test_unsafe_code_stays_float32_and_its_line_is_named(name, wrap):
    function = UNSAFE[name]
    model = model_of(wrap(function, name="code"))
    reason = kmp.audit(model).plan.float32["code"]
    first = inspect.getsourcelines(function)[1]
    found = re.search(r"test_custom_code\.py:(\d+)", reason)
    assert found is not None, reason
    assert 0 <= int(found[1]) - first <= 3


@pytest.mark.parametrize("wrap", [Code, layers.Lambda], ids=["layer", "lambda"])
@pytest.mark.parametrize("name", SAFE)
def test_safe_code_runs_in_16_bits(name, wrap):
    model = model_of(wrap(SAFE[name], name="code"))
    assert list(kmp.audit(model).plan.float32) == ["after"]
    x = np.random.default_rng(0).uniform(-3.0, 3.0, (4, 8)).astype("float32")
    exact, found = np.asarray(model(x)), np.asarray(kmp.convert(model)(x), "float32")
    np.testing.assert_allclose(found, exact, atol=0.02 * np.std(exact))


def sigmoid(x):
    """Has the name of a function of Keras, and computes another one."""
    return ops.exp(x)


class Cell(layers.Layer):
    """A recurrent layer without gates."""

    state_size = output_size = 8

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 8))

    def call(self, x, states):
        state = ops.exp(ops.matmul(x, self.kernel) + states[0])
        return state, [state]


@pytest.mark.parametrize(
    "layer",
    [
        layers.Dense(8, sigmoid, name="code"),
        layers.Activation(sigmoid, name="code"),
        layers.LSTM(8, recurrent_activation=sigmoid, name="code"),
        layers.RNN([layers.LSTMCell(8), layers.GRUCell(8, sigmoid)], name="code"),
        layers.RNN(Cell(), name="code"),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_activations_and_cells_of_the_user_are_looked_into(layer):
    reason = kmp.audit(model_of(layer, shape=(4, 8))).plan.float32["code"]
    assert re.fullmatch(r"test_custom_code\.py:\d+: exponentials overflow float16.*", reason)


class Steep(layers.ReLU):
    """A subclass of a layer of Keras that computes something else."""

    def call(self, x):
        return ops.exp(super().call(x))


def test_subclass_of_a_known_layer_is_looked_into_if_it_overrides_call():
    reason = kmp.audit(model_of(Steep(name="code"))).plan.float32["code"]
    assert re.fullmatch(r"test_custom_code\.py:\d+: exponentials overflow float16.*", reason)


def test_sum_of_an_unknown_number_of_bounded_numbers_stays_float32():
    class Counts(layers.Layer):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            self.dense = layers.Dense(8)

        def call(self, x):
            return self.dense(ops.sum(ops.sigmoid(x), axis=(1, 2)))

        def compute_output_shape(self, shape):
            return shape[0], 8

    inputs = keras.Input((None, None, 8))
    outputs = layers.Dense(2, name="last")(Counts(name="code")(inputs))
    assert "code" in kmp.audit(keras.Model(inputs, outputs)).plan.float32


@pytest.mark.parametrize(
    "wrap",
    [
        lambda layer: layer,
        lambda layer: layers.Activation(layer, name="code"),
        lambda layer: layers.Dense(8, activation=layer, name="code"),
    ],
    ids=["layer", "Activation", "Dense"],
)
@pytest.mark.parametrize("name", ["user's call", "argument"])
def test_layer_as_an_activation_is_looked_into_as_the_layer_is(wrap, name):
    layer = Steep(name="code") if name == "user's call" else layers.ELU(alpha=1e5, name="code")
    assert "code" in kmp.audit(model_of(wrap(layer))).plan.float32


def test_class_of_the_user_may_have_the_name_of_one_of_keras():
    class Einsum(layers.Layer):
        def call(self, x):
            return ops.einsum("bi,bi->bi", x, x)

    class Last(layers.GlobalAveragePooling1D):
        def call(self, x):
            return x[:, -1]

    assert "code" in kmp.audit(model_of(Einsum(name="code"))).plan.float32
    model = model_of(Last(name="code"), shape=(4, 8))
    assert list(kmp.audit(model).plan.float32) == ["after"]


@pytest.mark.parametrize(
    "softmax",
    [lambda: ops.softmax, layers.Softmax, lambda: layers.Activation("softmax")],
    ids=["operation", "layer", "Activation"],
)
def test_probabilities_of_bounded_logits_are_not_small(softmax):
    inputs = keras.Input((8,))
    hidden = layers.Dense(8, "tanh")(inputs)
    outputs = layers.Dense(2, name="last")(ops.log(softmax()(hidden)))
    found = kmp.audit(keras.Model(inputs, outputs)).plan.float32
    assert not any("log" in path for path in found)


def sinusoid(x):
    """Sines of quotients by powers that are computed of constants, in the dtype of the data."""
    positions = ops.cast(ops.arange(8), x.dtype)
    divisors = 10000.0 ** (2.0 * (positions // 2.0) / 8.0)
    return x + ops.sin(ops.tanh(x) / divisors)


def test_error_of_a_power_is_relative_so_that_a_quotient_by_it_is_bounded():
    assert list(kmp.audit(model_of(Code(sinusoid, name="code"))).plan.float32) == ["after"]


def test_activation_of_gates_in_a_wrapper_is_looked_at():
    layer = layers.Bidirectional(layers.GRU(8, recurrent_activation="exponential"), name="code")
    assert "code" in kmp.audit(model_of(layer, shape=(4, 8))).plan.float32


class HasUnbuilt(layers.Layer):
    """Calls a layer that is built in the training only."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.later = layers.Dense(8)

    def call(self, x, training=False):
        return self.later(x) if training else x

    def build(self, shape):
        self.built = True


def test_layers_are_not_built_by_an_audit():
    model = model_of(HasUnbuilt(name="code"))
    kmp.audit(model)
    kmp.convert(model)
    assert not model.get_layer("code").later.built
    assert model(np.ones((2, 8), "float32"), training=True).shape == (2, 2)


class Remembers(layers.Layer):
    """Keeps what it was called with, and creates a layer with a seed."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.calls, self.known, self.count = [], {}, 0

    def call(self, x):
        self.count += 1
        self.calls.append(x.shape)
        self.known[len(self.known)] = x.shape
        self.add_loss(ops.mean(x))
        return layers.Dropout(0.5)(x)


def test_audit_changes_no_state():
    model = model_of(Remembers(name="code"))
    layer, state = model.get_layer("code"), random.getstate()
    before = list(layer.calls), dict(layer.known), layer.count, len(layer.losses)
    kmp.audit(model)
    assert (list(layer.calls), dict(layer.known), layer.count, len(layer.losses)) == before
    assert random.getstate() == state
    assert layer.dtype_policy.name == "float32"


class Branches(keras.Model):
    """Two ways through each of many steps."""

    def __init__(self):
        super().__init__()
        self.first, self.last = layers.Dense(4), layers.Dense(2)

    def call(self, x):
        x = self.first(x)
        for _ in range(30):
            x = ops.relu(x) + ops.abs(x)
        return self.last(x)


def test_code_with_many_branches_is_looked_into_at_once():
    model = Branches()
    model(np.ones((2, 4), "float32"))
    assert kmp.audit(model).plan.float32 == {}


def test_residual_stream_of_bounded_functions_stays_in_16_bits():
    inputs = keras.Input((8,))
    x = layers.Dense(8)(inputs)
    for _ in range(12):
        x = layers.Add()([x, layers.Activation("tanh")(x)])
    model = keras.Model(inputs, layers.Dense(2, name="last")(x))
    assert list(kmp.audit(model).plan.float32) == ["last"]


def test_layers_of_a_model_in_a_custom_layer_are_looked_into():
    class Holds(layers.Layer):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            hidden = layers.Dense(8, "exponential", name="steep"), layers.Dense(8, name="flat")
            self.inner = keras.Sequential([keras.Input((8,)), *hidden], name="inner")

        def call(self, x):
            return self.inner(x)

    plan = kmp.audit(model_of(Holds(name="code"))).plan
    assert [path for path in plan.float32 if path.endswith("steep")] == ["code/inner/steep"]
    assert "code/inner/flat" not in plan.float32


class CannotBeTraced(keras.Model):
    """Needs the values of its inputs."""

    def __init__(self):
        super().__init__()
        self.steep = layers.Dense(8, "exponential", name="steep")
        self.by_hand = layers.Lambda(ops.log, name="by_hand")
        self.last = layers.Dense(2, name="last")

    def call(self, x):
        return self.last(self.by_hand(self.steep(x * float(np.mean(x)))))


def test_layers_that_no_trace_reaches_are_judged_alone():
    model = CannotBeTraced()
    model(np.ones((2, 4), "float32"))
    assert set(kmp.audit(model).plan.float32) == {"steep", "by_hand"}


def test_masked_scores_of_a_softmax_in_float32_are_no_problem():
    def attention(x):
        scores = ops.where(x > 0, x, -3e4)
        return x * ops.cast(ops.softmax(ops.cast(scores, "float32")), x.dtype)

    assert list(kmp.audit(model_of(Code(attention, name="code"))).plan.float32) == ["after"]


def test_errors_of_data_do_not_add_up_over_many_blocks():
    inputs = keras.Input((8,))
    x = layers.Dense(8)(inputs)
    for _ in range(40):
        x = layers.Add()([x, layers.Multiply()([layers.Dense(8, "tanh")(x), x])])
    model = keras.Model(inputs, layers.Dense(2, name="last")(x))
    for policy in ("mixed_float16", "mixed_bfloat16"):
        assert list(kmp.audit(model, policy=policy).plan.float32) == ["last"]


def test_end_of_a_range_that_the_format_does_not_have_is_none():
    def gate(x):
        return 2.0 * ops.sigmoid(ops.clip(x, -1e9, 7.0) + 1.0)

    assert list(kmp.audit(model_of(Code(gate, name="code"))).plan.float32) == ["after"]


@pytest.mark.parametrize(
    "product",
    [
        lambda x: ops.matmul(x, ops.transpose(x, (0, 2, 1))),
        lambda x: ops.einsum("bij,bkj->bik", x, x),
        lambda x: layers.Dot((2, 2))([x, x]),
    ],
)
def test_product_of_bounded_numbers_has_as_many_terms_as_its_operands(product):
    inputs = keras.Input((4, 16))
    bounded = layers.Dense(768, "tanh")(inputs)
    outputs = layers.Dense(2, name="last")(ops.exp(product(bounded)))
    assert any("exp" in path for path in kmp.audit(keras.Model(inputs, outputs)).plan.float32)


class ClippedBlock(layers.Layer):
    """Keeps its numbers in float16's range by limits that are weights, as Gemma 4 does."""

    def build(self, shape):
        self.dense = layers.Dense(8, dtype=self.dtype_policy)
        self.dense.build(shape)
        limit = keras.initializers.Constant(65504.0)
        self.limit = self.add_weight(shape=(), initializer=limit, trainable=False)
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        clipped = ops.clip(self.dense(x), -self.limit, self.limit)
        exact = ops.cast(clipped, "float32")
        variance = ops.mean(ops.square(exact), axis=-1, keepdims=True)
        normalized = exact * ops.power(variance + 1e-6, -0.5)
        return ops.cast(normalized, self.compute_dtype) + clipped * self.scale


def test_numbers_that_are_clipped_to_the_range_of_float16_are_as_large_as_the_data():
    inputs = keras.Input((8,))
    outputs = layers.Dense(2, name="last")(ClippedBlock(name="block")(inputs))
    assert kmp.audit(keras.Model(inputs, outputs)).plan.float32.keys() == {"last"}
