import functools
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import optimizer_for

from kmp.optimizer.predicated_writes import predicated_writes, supports_predicated_writes

pytestmark = pytest.mark.filterwarnings("ignore:.*did not go through `scale_loss`")

ABSTRACT = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer"}
OPTIMIZERS = {
    name: optimizer_class
    for name, optimizer_class in vars(keras.optimizers).items()
    if isinstance(optimizer_class, type)
    and issubclass(optimizer_class, keras.Optimizer)
    and name not in ABSTRACT
}
OWN_OPTIONS = {
    **dict.fromkeys(("momentum", "beta"), 0.5),
    **dict.fromkeys(("l1_regularization_strength", "l2_regularization_strength", "rms_rate"), 0.1),
    "l2_shrinkage_regularization_strength": 0.1,
    "warmup_steps": 2,
}


def changed_options(optimizer_class):
    """Returns another value for each option that only some optimizers have."""
    parameters = inspect.signature(optimizer_class).parameters
    flags = {
        name: not parameter.default
        for name, parameter in parameters.items()
        if type(parameter.default) is bool
    }
    del flags["use_ema"]
    return flags | {name: value for name, value in OWN_OPTIONS.items() if name in parameters}


def multi_optimizer():
    optimizer_map = keras.optimizers.OptimizerMap(
        keras.optimizers.SGD(0.1), {"a": keras.optimizers.Adam(0.1)}
    )
    return keras.optimizers.MultiOptimizer(optimizer_map)


if not hasattr(keras.optimizers, "MultiOptimizer"):  # Keras 3.12, whose Muon fails on TensorFlow
    del OPTIMIZERS["Muon"]
INNER = {
    **{name: functools.partial(stock, 0.1) for name, stock in OPTIMIZERS.items()},
    **{
        f"{name} with {' '.join(options)}": functools.partial(stock, 0.1, **options)
        for name, stock in OPTIMIZERS.items()
        if (options := changed_options(stock))
    },
    # Options of Keras' base class, which has the code for them: one class stands for all.
    "weight_decay": lambda: keras.optimizers.Adam(0.1, weight_decay=0.01),
    "clipnorm": lambda: keras.optimizers.Adam(0.1, clipnorm=0.5),
    "clipvalue": lambda: keras.optimizers.Adam(0.1, clipvalue=0.5),
    "global_clipnorm": lambda: keras.optimizers.Adam(0.1, global_clipnorm=0.5),
    "ema": lambda: keras.optimizers.Adam(0.1, use_ema=True),
    "ema_overwrite": lambda: keras.optimizers.Adam(0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulation": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    ),
}
PREDICABLE = list(INNER)
if hasattr(keras.optimizers, "MultiOptimizer"):
    INNER["multi"] = multi_optimizer


def weights(smallest=0.0):
    """Weights that an incorrect predicated write changes: zeros of both signs, and a subnormal."""
    first = np.array([[0.5, -0.0, smallest], [0.0, -3.0, 1.0]], "float32")
    return [keras.Variable(first, name="a"), Constrained([1.0, -2.0, 3.0])]


class Constrained(keras.Variable):
    def __init__(self, value):
        super().__init__(value, name="b")
        self.constraint = keras.constraints.NonNeg()


def gradients(step, nonfinite=None):
    first = np.linspace(-1, 1, 6, dtype="float32").reshape(2, 3) * (step + 1)
    second = np.array([0.5, -0.25, 0.125], "float32")
    second[1] = second[1] if nonfinite is None else nonfinite
    return [tf.constant(first), tf.constant(second)]


def bits(variables):
    return [np.asarray(variable.value).tobytes() for variable in variables]


def state_of(optimizer):
    """All variables in an optimizer's attributes, of which Keras' own list may lack some."""
    attributes = {name: value for name, value in vars(optimizer).items() if name != "_variables"}
    return tf.nest.flatten([variables_in(value) for _, value in sorted(attributes.items())])


def variables_in(value):
    if isinstance(value, list | tuple):
        return [variables for item in value if (variables := variables_in(item))]
    return [value] if isinstance(value, keras.Variable) else []


def state(optimizer, variables):
    return bits([*variables, *state_of(optimizer)])


def steps_with_every_pair():
    """Returns steps (element of the gradient, loss) in which each category follows each."""
    kinds = [(element, loss) for loss in (1.0, np.nan) for element in (None, np.inf, np.nan)]
    steps = [
        kind
        for i, first in enumerate(kinds)
        for second in kinds[i + 1 :]
        for kind in (first, second)
    ]
    return [*steps, *(kind for kind in kinds for _ in range(2)), *[(None, 1.0)] * 9]


COMPILERS = {"eager": lambda step: step, "graph": tf.function, "xla": tf.function(jit_compile=True)}
# Each class once under XLA; the writes of each with and without its options are tested below.
UNDER_XLA = [
    name for name in INNER if not any(other.startswith(f"{name} with ") for other in INNER)
]
# Outside XLA, a skipped step runs nothing of the optimizer: only those are special whose step has
# branches of its own, or whose state Keras does not list.
BRANCHING = ["Adam", "Nadam", "ema_overwrite", "accumulation", "schedule", "multi"]


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("eager", "Adam"),
        *[("graph", name) for name in BRANCHING if name in INNER],
        *[pytest.param("xla", name, marks=pytest.mark.slow) for name in UNDER_XLA],
    ],
)
def test_applied_step_equals_the_unscaled_one_and_a_skipped_step_changes_no_bit(mode, name):
    bounds = {"initial_scale": 8.0, "min_scale": 2.0, "max_scale": 16.0, "growth_interval": 2}
    inner, bare, variables, bare_variables = (
        INNER[name](),
        INNER[name](),
        weights(1e-40),
        weights(1e-40),
    )
    optimizer = optimizer_for(*variables, inner=inner, **bounds)
    bare.build(bare_variables)

    @COMPILERS[mode]
    def step(first, second, loss):
        optimizer.scale_loss(loss)
        optimizer.apply([first * optimizer.loss_scale, second * optimizer.loss_scale], variables)

    bare_step = COMPILERS[mode](lambda *gradients: bare.apply(gradients, bare_variables))
    skipped, scales = 0, set()
    for number, (element, loss) in enumerate(
        steps_with_every_pair()[: 10 if mode == "eager" else None]
    ):
        before = state(inner, variables)
        step(*gradients(number % 5, element), tf.constant(loss))
        is_applied = (element, loss) == (None, 1.0)
        if is_applied:
            bare_step(*gradients(number % 5))
        else:
            skipped += 1
            assert state(inner, variables) == before
        snapshot = optimizer.snapshot()
        assert (snapshot.overflow_count, snapshot.overflows_in_a_row > 0) == (
            skipped,
            not is_applied,
        )
        scales.add(snapshot.loss_scale)
    assert scales == ({4.0, 2.0, 8.0} if mode == "eager" else {2.0, 4.0, 8.0, 16.0})
    ours, expected = [*variables, *state_of(inner)], [*bare_variables, *state_of(bare)]
    for actual, value in zip(ours, expected, strict=True):
        np.testing.assert_allclose(actual, value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PREDICABLE)
def test_skipped_writes_change_no_bit_and_applied_writes_equal_plain_ones(name):
    predicated, predicated_weights = INNER[name](), weights()
    bare, bare_weights = INNER[name](), weights()
    predicated.build(predicated_weights)
    bare.build(bare_weights)
    all_variables = [*predicated_weights, *state_of(predicated)]
    for step in range(3):  # accumulate and update every other step
        before = bits(all_variables)
        with predicated_writes(predicated, predicated_weights, tf.constant(True)):
            predicated.apply(gradients(step, np.nan), predicated_weights)
        assert bits(all_variables) == before
        with predicated_writes(predicated, predicated_weights, tf.constant(False)):
            predicated.apply(gradients(step), predicated_weights)
        bare.apply(gradients(step), bare_weights)
        assert state(predicated, predicated_weights) == state(bare, bare_weights)
    assert bits(all_variables) != before


def test_variables_have_their_own_methods_again_after_an_error():
    sgd, variable = keras.optimizers.SGD(), tf.Variable([1.0])
    sgd.build([])
    before = dict(vars(variable))
    with pytest.raises(KeyError), predicated_writes(sgd, [variable], tf.constant(True)):
        raise KeyError
    assert vars(variable) == before


def test_skipped_sparse_updates_change_no_row():
    table = keras.Variable(np.tile(np.array([0.5, -0.0, 0.0], "float32"), (5, 1)))
    sgd = keras.optimizers.SGD()
    sgd.build([])

    @tf.function(jit_compile=True)
    def write(skip):
        rows = tf.IndexedSlices(
            tf.fill([3, 3], np.nan), tf.constant([0, 4, 0]), tf.constant([5, 3])
        )
        with predicated_writes(sgd, [table], skip):
            table.value.scatter_add(rows)
            table.value.scatter_sub(rows)
            table.value.scatter_update(rows)

    before = bits([table])
    write(tf.constant(True))
    assert bits([table]) == before
    write(tf.constant(False))
    np.testing.assert_array_equal(np.isnan(table.numpy()).any(1), [True, False, False, False, True])


def operation_types(function):
    return {op.type for op in function.get_concrete_function().graph.get_operations()}


class MyAdam(keras.optimizers.Adam):
    """A custom class: kmp does not know its writes."""


@pytest.mark.parametrize("inner_class", [keras.optimizers.Adam, MyAdam])
def test_xla_predicates_writes_except_of_custom_classes_and_graph_mode_branches(inner_class):
    optimizer = optimizer_for(*weights(), inner=inner_class())

    def step():
        return optimizer.apply(gradients(0))

    has_branch = "If" in operation_types(tf.function(step, jit_compile=True))
    assert has_branch == (inner_class is MyAdam)
    assert "If" in operation_types(tf.function(step))


def test_every_optimizer_of_keras_but_the_multi_optimizer_supports_predicated_writes():
    assert [name for name in INNER if supports_predicated_writes(INNER[name]())] == PREDICABLE


class Counting(keras.constraints.Constraint):
    """Writes a variable that it owns."""

    def __init__(self):
        self.calls = keras.Variable(0.0)

    def __call__(self, value):
        self.calls.assign_add(1.0)
        return value


def test_custom_constraint_or_learning_rate_uses_the_branch():
    variable, constraint = Constrained([1.0]), Counting()
    variable.constraint = constraint
    assert not supports_predicated_writes(keras.optimizers.SGD(lambda: 0.1))
    optimizer = optimizer_for(variable)
    step = tf.function(
        lambda x: optimizer.apply([x], [variable]), jit_compile=True, autograph=False
    )
    for x, calls in ((np.nan, 0), (1.0, 1)):
        step(tf.constant([x]))
        assert float(constraint.calls) == calls


def test_skipped_step_keeps_weights_that_only_the_inner_optimizer_was_built_on():
    inner = keras.optimizers.SGD(0.5, use_ema=True, ema_overwrite_frequency=1)
    trained, frozen = keras.Variable([1.0, 1.0]), keras.Variable([7.0, 7.0])
    inner.build([trained, frozen])
    optimizer = optimizer_for(trained, inner=inner)
    step = tf.function(lambda x: optimizer.apply([x], [trained]), jit_compile=True, autograph=False)
    step(tf.constant([np.nan, 1.0]))
    np.testing.assert_array_equal(frozen, [7.0, 7.0])
    np.testing.assert_array_equal(trained, [1.0, 1.0])


@pytest.mark.parametrize(("first_is_compiled", "sparse"), [(False, True), (True, False)])
def test_one_trace_works_with_and_without_xla(first_is_compiled, sparse):
    table = keras.Variable(np.ones((4, 2), "float32"))
    optimizer = optimizer_for(table, loss_scale=2.0)

    @tf.function(autograph=False)
    def step(x):
        rows = tf.IndexedSlices(tf.reshape(x, [1, 2]), tf.constant([1]), tf.constant([4, 2]))
        optimizer.apply([rows if sparse else tf.tile(tf.reshape(x, [1, 2]), [4, 1])], [table])

    for jit_compile in (first_is_compiled, not first_is_compiled):
        outer = tf.function(functools.partial(step), jit_compile=jit_compile, autograph=False)
        before = table.numpy().copy()
        outer(tf.constant([1.0, np.nan]))
        np.testing.assert_array_equal(table, before)
        outer(tf.constant([1.0, 1.0]))
        np.testing.assert_array_equal(table[1], before[1] - 0.5)
    assert optimizer.snapshot().overflow_count == 2


def test_skipped_step_changes_no_bit_of_a_large_variable():
    table = keras.Variable(np.zeros((2**22 + 1,), "float32"))
    table.value.assign(tf.concat([[-0.0, 1e-40, 1.0], table.value[3:]], 0))
    optimizer = optimizer_for(table, inner=keras.optimizers.SGD(0.5))

    @tf.function(jit_compile=True)
    def step(first):
        optimizer.scale_loss(1.0)
        gradient = tf.concat([[first], tf.ones([2**22])], 0) * optimizer.loss_scale
        optimizer.apply([gradient], [table])

    before = table.numpy()
    step(tf.constant(np.inf))
    assert table.numpy().tobytes() == before.tobytes()
    step(tf.constant(1.0))
    np.testing.assert_array_equal(table.numpy()[:4], [-0.5, -0.5, 0.5, -0.5])
