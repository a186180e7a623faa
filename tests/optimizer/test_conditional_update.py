import functools
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import kmp
from kmp.optimizer import conditional_update

pytestmark = pytest.mark.filterwarnings("ignore:.*before any loss went through")

NOT_GATED = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer"}
KINDS = {
    name: kind
    for name, kind in vars(keras.optimizers).items()
    if isinstance(kind, type) and issubclass(kind, keras.Optimizer) and name not in NOT_GATED
}
if not hasattr(keras.optimizers, "MultiOptimizer"):  # Keras 3.12, whose Muon fails on TensorFlow by itself
    del KINDS["Muon"]
VALUES = {
    "momentum": 0.9,
    "weight_decay": 0.01,
    "clipnorm": 0.5,
    "clipvalue": 0.01,
    "global_clipnorm": 0.5,
    "gradient_accumulation_steps": 2,
    "ema_overwrite_frequency": 2,
    "warmup_steps": 2,
    "l1_regularization_strength": 0.1,
    "l2_regularization_strength": 0.1,
    "l2_shrinkage_regularization_strength": 0.1,
    "beta": 0.5,
    "rms_rate": 0.2,
}


def cases():
    """Each optimizer as it is, and with each of its options that has another value to try."""
    for name, kind in KINDS.items():
        yield pytest.param(kind, {}, id=name)
        for option, parameter in inspect.signature(kind).parameters.items():
            if isinstance(parameter.default, bool):
                yield pytest.param(kind, {option: not parameter.default}, id=f"{name}-{option}")
            elif option in VALUES:
                more = {"use_ema": True} if option == "ema_overwrite_frequency" else {}
                yield pytest.param(kind, {option: VALUES[option]} | more, id=f"{name}-{option}")
        yield pytest.param(kind, {"learning_rate": schedule()}, id=f"{name}-schedule")


def schedule():
    return keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)


def weights(smallest=0.0):
    """Zeros of both signs among them, and a subnormal number if asked for: what a careless gate changes."""
    first = np.array([[0.5, -0.0, smallest], [0.0, -3.0, 1.0]], "float32")
    return [keras.Variable(first, name="a"), Constrained([1.0, -2.0, 3.0])]


class Constrained(keras.Variable):
    def __init__(self, value):
        super().__init__(value, name="b")
        self.constraint = keras.constraints.NonNeg()


def gradients(step, bad=None):
    first = np.linspace(-1, 1, 6, dtype="float32").reshape(2, 3) * (step + 1)
    second = np.array([0.5, -0.25, 0.125], "float32")
    second[1] = second[1] if bad is None else bad
    return [tf.constant(first), tf.constant(second)]


def bits(variables):
    return [np.asarray(variable.value).tobytes() for variable in variables]


def optimizer_state(optimizer):
    """All that an optimizer keeps by name; Keras' own list leaves out some of it, depending on who builds it."""
    kept = {name: value for name, value in vars(optimizer).items() if name != "_variables"}
    return tf.nest.flatten([plain(value) for _, value in sorted(kept.items())])


def plain(value):
    if isinstance(value, list | tuple):
        return [found for item in value if (found := plain(item))]
    return [value] if isinstance(value, keras.Variable) else []


def state(optimizer, variables):
    return bits([*variables, *optimizer_state(optimizer)])


@pytest.mark.parametrize(("kind", "options"), list(cases()))
def test_closed_gate_leaves_every_bit_and_an_open_one_changes_nothing(kind, options):
    gated, gated_weights, bare, bare_weights = kind(**options), weights(), kind(**options), weights()
    gated.build(gated_weights)
    bare.build(bare_weights)
    everything = [*gated_weights, *optimizer_state(gated)]
    for step in range(5):
        before = bits(everything)
        with conditional_update._gated([*gated_weights, *conditional_update._written_by(gated)], tf.constant(True)):
            gated.apply(gradients(step, np.nan), gated_weights)
        assert bits(everything) == before
        with conditional_update._gated([*gated_weights, *conditional_update._written_by(gated)], tf.constant(False)):
            gated.apply(gradients(step), gated_weights)
        bare.apply(gradients(step), bare_weights)
        assert state(gated, gated_weights) == state(bare, bare_weights)
    assert bits(everything) != before


def test_gate_leaves_no_trace_on_the_variables_also_after_an_error():
    variable = tf.Variable([1.0])
    before = dict(vars(variable))
    with pytest.raises(KeyError), conditional_update._gated([variable], tf.constant(True)):
        raise KeyError
    assert vars(variable) == before


def test_rows_of_a_sparse_update_are_left_out():
    table = keras.Variable(np.tile(np.array([0.5, -0.0, 0.0], "float32"), (5, 1)))

    @tf.function(jit_compile=True)
    def add(skips):
        rows = tf.IndexedSlices(tf.fill([3, 3], np.nan), tf.constant([0, 4, 0]), tf.constant([5, 3]))
        with conditional_update._gated([table], skips):
            table.value.scatter_add(rows)
            table.value.scatter_sub(rows)
            table.value.scatter_update(rows)

    before = bits([table])
    add(tf.constant(True))
    assert bits([table]) == before
    add(tf.constant(False))
    np.testing.assert_array_equal(np.isnan(table.numpy()).any(1), [True, False, False, False, True])


def operations(function):
    return {op.type for op in function.get_concrete_function().graph.get_operations()}


@pytest.mark.parametrize("inner", [keras.optimizers.Adam, keras.optimizers.AdamW, keras.optimizers.SGD])
def test_xla_gets_a_gate_and_graph_mode_a_branch(inner):
    variables = weights()
    optimizer = kmp.LossScaleOptimizer(inner(), min_scale=1.0)
    optimizer.build(variables)

    def step():
        optimizer.apply(gradients(0), variables)

    branches = {"If", "StatelessIf"}
    assert not branches & operations(tf.function(step, jit_compile=True))
    assert "If" in operations(tf.function(step))


def test_what_may_write_in_ways_of_its_own_takes_the_branch():
    class MyAdam(keras.optimizers.Adam):
        pass

    assert all(conditional_update.has_predicable_writes(kind) for kind in KINDS.values())
    assert not conditional_update.has_predicable_writes(MyAdam)
    variables = weights()
    optimizer = kmp.LossScaleOptimizer(MyAdam())
    optimizer.build(variables)
    assert "If" in operations(tf.function(lambda: optimizer.apply(gradients(0), variables), jit_compile=True))


class Counting(keras.constraints.Constraint):
    """Keeps a variable of its own."""

    def __init__(self):
        self.calls = keras.Variable(0.0)

    def __call__(self, value):
        self.calls.assign_add(1.0)
        return value


def test_code_of_a_users_own_takes_the_branch():
    variable, constraint = Constrained([1.0]), Counting()
    variable.constraint = constraint
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.SGD(lambda: 0.1))
    assert not conditional_update._calls_only_keras(optimizer.inner_optimizer, [])
    optimizer = kmp.LossScaleOptimizer("sgd")
    optimizer.build([variable])
    step = tf.function(lambda x: optimizer.apply([x], [variable]), jit_compile=True, autograph=False)
    for x, calls in ((np.nan, 0), (1.0, 1)):
        step(tf.constant([x]))
        assert float(constraint.calls) == calls


def test_weights_that_only_the_inner_optimizer_knows_are_held_too():
    inner = keras.optimizers.SGD(0.5, use_ema=True, ema_overwrite_frequency=1)
    trained, frozen = keras.Variable([1.0, 1.0]), keras.Variable([7.0, 7.0])
    inner.build([trained, frozen])
    optimizer = kmp.LossScaleOptimizer(inner)
    optimizer.build([trained])
    step = tf.function(lambda x: optimizer.apply([x], [trained]), jit_compile=True, autograph=False)
    step(tf.constant([np.nan, 1.0]))
    np.testing.assert_array_equal(frozen, [7.0, 7.0])
    np.testing.assert_array_equal(trained, [1.0, 1.0])


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_one_trace_serves_within_xla_and_outside(first, sparse):
    table = keras.Variable(np.ones((4, 2), "float32"))
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=1.0)
    optimizer.build([table])

    @tf.function(autograph=False)
    def step(x):
        rows = tf.IndexedSlices(tf.reshape(x, [1, 2]), tf.constant([1]), tf.constant([4, 2]))
        optimizer.apply([rows if sparse else tf.tile(tf.reshape(x, [1, 2]), [4, 1])], [table])

    for jit_compile in (first, not first):
        outer = tf.function(functools.partial(step), jit_compile=jit_compile, autograph=False)
        before = table.numpy().copy()
        outer(tf.constant([1.0, np.nan]))
        np.testing.assert_array_equal(table, before)
        outer(tf.constant([1.0, 1.0]))
        np.testing.assert_array_equal(table[1], before[1] - 0.5)
    assert optimizer.snapshot().overflow_count == 2


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="Keras 3.12 has none")
def test_several_optimizers_in_one_take_the_branch():
    assert not conditional_update.has_predicable_writes(keras.optimizers.MultiOptimizer)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_compiled_step_skips_without_a_trace_and_else_steps_as_without_loss_scale(name):
    scaled, bare = KINDS[name](0.1), KINDS[name](0.1)
    scaled_weights, bare_weights = weights(1e-40), weights(1e-40)
    optimizer = kmp.LossScaleOptimizer(scaled, initial_scale=1024.0)
    optimizer.build(scaled_weights)
    bare.build(bare_weights)

    @tf.function(jit_compile=True)
    def step(first, second):
        scale = optimizer.dynamic_scale.value
        optimizer.apply([first * scale, second * scale], scaled_weights)

    @tf.function(jit_compile=True)
    def bare_step(first, second):
        bare.apply([first, second], bare_weights)

    for number, bad in enumerate((None, np.inf, None, np.nan, -np.inf, None)):
        before = state(scaled, scaled_weights)
        step(*gradients(number, bad))
        if bad is None:
            bare_step(*gradients(number))
        else:
            assert state(scaled, scaled_weights) == before
    for expected, found in zip(
        [*bare_weights, *optimizer_state(bare)], [*scaled_weights, *optimizer_state(scaled)], strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    assert optimizer.snapshot().overflow_count == 3


@pytest.mark.slow
@pytest.mark.parametrize("inner", [keras.optimizers.Adam, keras.optimizers.SGD])
@pytest.mark.parametrize("option", [{}, {"gradient_accumulation_steps": 2}])
def test_compiled_sparse_step_skips_without_a_trace(inner, option):
    table = keras.Variable(np.ones((6, 2), "float32"))
    optimizer = kmp.LossScaleOptimizer(inner(0.1, **option), initial_scale=1.0)
    optimizer.build([table])

    @tf.function(jit_compile=True)
    def step(values):
        optimizer.apply([tf.IndexedSlices(values, tf.constant([1, 4]), tf.constant([6, 2]))], [table])

    for bad in (1.0, np.nan, 1.0, np.inf):
        before = state(optimizer.inner_optimizer, [table])
        step(tf.constant([[1.0, 1.0], [1.0, bad]]))
        assert (state(optimizer.inner_optimizer, [table]) == before) == (not np.isfinite(bad))
    assert np.isfinite(table.numpy()).all()
    assert ops.all(table[0] == 1.0) or inner is keras.optimizers.Adam
