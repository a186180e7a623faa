import functools
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled_model, optimizer_for, values

import kmp
from kmp.backend import xla


def test_is_tracing_is_true_only_in_graphs_for_xla():
    recorded = {}

    def record(name):
        recorded[name] = xla.is_tracing()
        return tf.constant(0)

    def branch():
        return tf.cond(tf.random.uniform([]) > 2, lambda: record("in a branch"), lambda: 0)

    record("eager")
    tf.function(record)("graph")
    tf.function(record, jit_compile=True)("xla")
    tf.function(branch, jit_compile=True)()
    tf.function(lambda: tf.function(record, jit_compile=True)("xla within graph"))()
    assert recorded == {
        "eager": False,
        "graph": False,
        "xla": True,
        "in a branch": True,
        "xla within graph": True,
    }


@pytest.mark.parametrize("jit_compile", [True, False])
def test_step_is_compiled_with_xla_if_asked_for(jit_compile):
    is_compiled = []

    class Recording(keras.optimizers.SGD):
        def update_step(self, *args):
            is_compiled.append(xla.is_tracing())
            super().update_step(*args)

    variable = keras.Variable([1.0])
    optimizer = optimizer_for(variable, inner=Recording(), jit_compile=jit_compile)
    optimizer.scale_loss(1.0)
    tf.function(lambda: optimizer.apply([tf.ones(1)], [variable]))()
    assert is_compiled == [jit_compile]


def step_of(optimizer, variables, is_sparse, x):
    rows = tf.IndexedSlices(tf.stack([[x, 2.0]]), tf.constant([2]), tf.constant([4, 2]))
    gradient = rows if is_sparse else tf.fill([4, 2], x)
    optimizer.apply([gradient, tf.constant([8.0])], variables, unscaled=False)


@pytest.mark.parametrize(
    ("run_step", "is_sparse"), [("eager", True), ("graph", False)], indirect=["run_step"]
)
@pytest.mark.filterwarnings("ignore:.*did not go through `scale_loss`")
def test_compiled_optimizer_matches_the_uncompiled_one(run_step, is_sparse):
    results = []
    for jit_compile in (False, True):
        variables = [
            keras.Variable(np.ones((4, 2), "float32"), name="a"),
            keras.Variable([3.0], name="b"),
        ]
        accumulation = {"gradient_accumulation_steps": 2} if is_sparse else {}
        inner = keras.optimizers.Adam(0.1, weight_decay=0.01, **accumulation)
        optimizer = optimizer_for(
            *variables, inner=inner, initial_scale=8.0, jit_compile=jit_compile
        )
        optimizer.sampler.start(optimizer.counters, every_n_steps=4)
        step = run_step(functools.partial(step_of, optimizer, variables, is_sparse))
        for x in (1.0, np.inf, 1.0, np.nan, 1.0):
            step(tf.constant(x))
        snapshot = optimizer.snapshot()
        results.append(
            (
                values([*variables, *inner.variables]),
                snapshot.sample,
                replace(snapshot, sample=None),
            )
        )
    (plain_values, plain_sample, plain_snapshot), (compiled_values, sample, snapshot) = results
    for plain, compiled in zip(plain_values, compiled_values, strict=True):
        # The rounding error of 1 - 0.999 is a hundred times that of 0.999, relatively.
        np.testing.assert_allclose(compiled, plain, rtol=1e-5)
    assert snapshot == plain_snapshot
    assert (snapshot.overflow_count, sample.step, sample.names) == (2, 4, plain_sample.names)
    np.testing.assert_array_equal(sample.counts, plain_sample.counts)


def test_wrap_uses_jit_compile_of_enable_unless_given_and_it_is_validated():
    assert kmp.wrap("sgd").jit_compile == "auto"
    with kmp.enable(jit_compile=True) as handle:
        assert "jit_compile=True" in repr(handle)
        assert kmp.wrap("sgd").jit_compile is True
        assert compiled_model().optimizer.jit_compile is True
        assert kmp.wrap("sgd", jit_compile=False).jit_compile is False
    for call in (
        lambda: kmp.LossScaleOptimizer("sgd", jit_compile=1),
        lambda: kmp.enable(jit_compile="on"),
    ):
        with pytest.raises(TypeError, match="`jit_compile` must be True, False or 'auto'"):
            call()


class Custom(keras.optimizers.SGD):
    """An optimizer whose writes kmp does not know."""


@pytest.mark.parametrize(
    ("jit_compile", "inner", "has_gpu", "is_compiled"),
    [
        ("auto", keras.optimizers.Adam, True, True),
        ("auto", keras.optimizers.Adam, False, False),
        ("auto", Custom, True, False),
        (False, keras.optimizers.Adam, True, False),
        (True, Custom, False, True),
    ],
)
def test_auto_compiles_the_step_of_a_graph_on_a_gpu(
    monkeypatch, jit_compile, inner, has_gpu, is_compiled
):
    devices = [tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")] * has_gpu
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind=None: devices)
    variable = keras.Variable([1.0, 2.0])
    optimizer = optimizer_for(variable, inner=inner(0.5), jit_compile=jit_compile)

    def compiles(step):
        step.get_concrete_function()
        graph = step.get_concrete_function().graph
        return any(op.node_def.attr["_XlaMustCompile"].b for op in graph.get_operations())

    def step():
        optimizer.scale_loss(1.0)
        optimizer.apply([tf.constant([1.0, 2.0])], [variable])

    assert compiles(tf.function(step, autograph=False)) == is_compiled
    # An eager loop may change values of Python later.
    assert optimizer.compiles_step == (jit_compile is True)


def test_own_optimizer_under_a_strategy_warns_and_the_step_is_not_compiled(two_replicas):
    with two_replicas.scope():
        weight = keras.Variable([1.0])
        optimizer = kmp.LossScaleOptimizer(Custom(1.0), jit_compile=True)
        with pytest.warns(
            UserWarning,
            match="`jit_compile=True` does nothing here: under a distribution strategy, only",
        ):
            optimizer.build([weight])

    def step():
        optimizer.scale_loss(1.0)
        optimizer.apply([tf.fill([1], optimizer.loss_scale / 4)], [weight])

    two_replicas.run(tf.function(step))
    assert float(weight[0]) == 1.0 - 2 * 0.25


@pytest.mark.parametrize(
    "name", ["adam", pytest.param("rmsprop", marks=pytest.mark.exhaustive), "sgd", "adagrad"]
)
def test_compiled_sparse_gradients_of_any_number_of_rows_train_as_those_of_keras(name):
    """An optimizer computes with each row of a sparse gradient, also with several of one index."""

    def trained(wrap):
        table = keras.Variable(np.ones((6, 2), "float32"))
        optimizer = wrap(
            keras.optimizers.get({"class_name": name, "config": {"learning_rate": 0.1}})
        )
        optimizer.build([table])

        @tf.function(
            input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([None], tf.int32)],
            autograph=False,
        )
        def step(rows, indices):
            gradient = tf.IndexedSlices(optimizer.scale_loss(rows), indices, tf.constant([6, 2]))
            optimizer.apply([gradient], [table])

        for indices in ([3, 1, 3], [0, 5, 0, 0, 2]):
            step(tf.ones([len(indices), 2]) * 0.5, tf.constant(indices))
        return table.numpy()

    compiled = functools.partial(kmp.LossScaleOptimizer, jit_compile=True, loss_scale=4.0)
    np.testing.assert_allclose(trained(compiled), trained(lambda inner: inner), rtol=1e-5)


@pytest.mark.parametrize("name", ["adagrad", "rmsprop", "adadelta"])
def test_compiled_update_of_a_table_has_no_branch_that_the_host_waits_for(name):
    table = keras.Variable(np.ones((6, 2), "float32"))
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.get(name), jit_compile=True)
    optimizer.build([table])

    def step(rows):
        with xla.traced_for_gpu():
            gradient = tf.IndexedSlices(rows, tf.constant([3, 1, 3]), tf.constant([6, 2]))
            optimizer.apply([gradient], [table], unscaled=False)

    function = tf.function(step, autograph=False, jit_compile=True)
    graph = function.get_concrete_function(tf.TensorSpec([3, 2])).graph
    types = {op.type for op in graph.get_operations()}
    assert not types & {"If", "StatelessIf", "While", "StatelessWhile"}
