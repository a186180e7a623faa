"""Two replicas on virtual devices skip a step together if either of them overflows."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import OverflowsBackward, assert_equal, fit_data, optimizer_for, small_data, take_step
from keras import ops

import kmp

pytestmark = pytest.mark.usefixtures("enabled")

OVERFLOWS_BACKWARD = 64.0  # the input that makes `OverflowsBackward` overflow
# The corrupt value of each batch and the replicas that get it, with a clean batch between any two.
CORRUPT_BATCHES = itertools.product([OVERFLOWS_BACKWARD, np.nan], [(0,), (1,), (0, 1)])
CORRUPTION_BY_STEP = [
    (0.0, ()),
    *itertools.chain(*((corrupt, (0.0, ())) for corrupt in CORRUPT_BATCHES)),
]


@pytest.fixture
def strategy(two_replicas):
    return two_replicas


def make_model(strategy, compiles_step=False, **arguments):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [
            keras.layers.Dense(4, name="scaled", kernel_initializer="identity"),
            OverflowsBackward(),
        ]
        layers += [keras.layers.BatchNormalization(), keras.layers.Dense(2), kmp.layers.Softmax()]
        model = keras.Sequential([keras.Input((4,)), *layers], name="model")
        optimizer = kmp.wrap("adam", jit_compile=compiles_step)
        model.compile(optimizer, "sparse_categorical_crossentropy", **arguments)
    return model


def batches(corruption_by_step):
    """Batches of 8 rows, 4 per replica, each with a corrupt row on some of the replicas."""
    x, y = small_data(len(corruption_by_step))
    for step, (corrupt_value, replicas) in enumerate(corruption_by_step):
        for replica in replicas:
            x[8 * step + 4 * replica] = corrupt_value
    return x, y


def values_per_replica(strategy, variables):
    """Returns a list of the variables' values for each replica."""
    local = [strategy.experimental_local_results(variable.value) for variable in variables]
    return [[value.numpy() for value in values] for values in zip(*local, strict=True)]


class StateRecorder(keras.callbacks.Callback):
    def __init__(self, strategy):
        super().__init__()
        self.strategy, self.recorded = strategy, []

    def on_train_batch_end(self, batch, logs=None):
        assert_shared_state_is_equal(self.strategy, self.model)
        variables = self.model.weights + self.model.optimizer.inner_optimizer.variables
        self.recorded.append(
            (values_per_replica(self.strategy, variables), self.model.optimizer.snapshot())
        )


def assert_each_overflow_skips_its_step_on_both_replicas(recorded):
    first = recorded[0][1]
    assert (first.step, first.overflow_count, first.nonfinite_loss_count, first.loss_scale) == (
        1,
        0,
        0,
        2.0**15,
    )
    steps = zip(itertools.pairwise(recorded), CORRUPTION_BY_STEP[1:], strict=True)
    for (before, after), (corrupt_value, replicas) in steps:
        for old_values, new_values in zip(before[0], after[0], strict=True):
            unchanged = [
                np.array_equal(old, new) for old, new in zip(old_values, new_values, strict=True)
            ]
            assert all(unchanged) if replicas else not any(unchanged[:2])
            assert all(np.isfinite(value).all() for value in new_values)
        is_backward = corrupt_value == OVERFLOWS_BACKWARD
        old, new = before[1], after[1]
        assert new.step == old.step + 1
        assert new.overflow_count == old.overflow_count + bool(replicas)
        assert new.nonfinite_loss_count == old.nonfinite_loss_count + bool(
            replicas and not is_backward
        )
        assert new.loss_scale == old.loss_scale * (0.5 if is_backward else 1.0)
        assert new.overflow_origin == ("model/scaled/bias" if is_backward else old.overflow_origin)


def assert_shared_state_is_equal(strategy, model):
    optimizer = model.optimizer
    shared = [*model.trainable_variables, *optimizer.variables, *optimizer.counters.weights]
    assert_equal(*values_per_replica(strategy, shared))


@pytest.mark.parametrize("is_compiled", [False, True], ids=["", "compiled step and passes"])
def test_overflow_or_empty_batch_on_any_replica_skips_the_step_on_all_and_a_stuck_training_stops(
    strategy, is_compiled
):
    model = make_model(strategy, is_compiled, jit_compile=is_compiled)
    recorder = StateRecorder(strategy)
    x, y = batches([*CORRUPTION_BY_STEP, (0.0, ())])
    fit_data(model, (x[:-7], y[:-7]), [recorder])  # one row in the last batch, on the first replica
    assert_each_overflow_skips_its_step_on_both_replicas(recorder.recorded[:-1])
    (old_values, before), (new_values, after) = recorder.recorded[-2:]
    for old, new in zip(old_values, new_values, strict=True):
        assert_equal(old, new)
    assert (after.step, after.overflow_count) == (before.step + 1, before.overflow_count)
    assert after.loss_scale == before.loss_scale
    with pytest.raises(kmp.callbacks.StuckError, match="the last 3 steps"):
        fit_data(
            model,
            (np.full_like(x[:-7], np.nan), y[:-7]),
            [kmp.callbacks.Monitor(replay=False, patience=3)],
        )


def test_custom_loop_skips_the_step_on_all_replicas_and_guard_restores_each(strategy):
    model = make_model(strategy, compiles_step=True)
    optimizer, loss_function = (
        model.optimizer,
        keras.losses.SparseCategoricalCrossentropy(reduction="sum"),
    )
    with strategy.scope():
        optimizer.build(model.trainable_variables)

    def forward_and_apply(x, y):
        with kmp.guard(optimizer, model):
            take_step(
                optimizer,
                model.trainable_variables,
                lambda: loss_function(y, model(x, training=True)) / 8,
            )

    step = tf.function(lambda x, y: strategy.run(forward_and_apply, args=(x, y)))
    data = tf.data.Dataset.from_tensor_slices(batches(CORRUPTION_BY_STEP)).batch(
        8, drop_remainder=True
    )
    recorded = []
    for x, y in strategy.experimental_distribute_dataset(data):
        step(x, y)
        assert_shared_state_is_equal(strategy, model)
        recorded.append((values_per_replica(strategy, model.weights), optimizer.snapshot()))
    assert_each_overflow_skips_its_step_on_both_replicas(recorded)


def test_compiled_step_trains_as_the_other_and_has_no_branch(strategy):
    weights, (x, y) = [], batches(CORRUPTION_BY_STEP)
    for jit_compile in (False, True):
        model = make_model(strategy, jit_compile)
        histogram = kmp.callbacks.GradientHistogram(every_n_steps=4)
        fit_data(model, (x, y), [histogram])
        weights.append(
            [
                *model.get_weights(),
                *(each.numpy() for each in model.optimizer.inner_optimizer.variables),
            ]
        )
        assert {sample.step for sample in histogram.run.samples} >= {4, 8, 12}
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    gradients = [tf.zeros(variable.shape) for variable in model.trainable_variables]

    @tf.function(autograph=False)
    def step():
        model.optimizer.scale_loss(1.0)
        model.optimizer.apply(gradients, model.trainable_variables)

    graph = tf.function(lambda: strategy.run(step.python_function)).get_concrete_function().graph
    compiled = [op for op in graph.get_operations() if op.node_def.attr["_XlaMustCompile"].b]
    assert len(compiled) == 4  # a check and an update on each replica
    # Samples are decided on the host.
    assert all(
        "CPU:0" in op.inputs[0].op.device
        for op in graph.get_operations()
        if op.type in ("If", "StatelessIf")
    )


def test_nonfinite_loss_is_remembered_between_separate_functions(strategy):
    with strategy.scope():
        weight = keras.Variable([1.0], name="weight")
        optimizer = optimizer_for(weight)

    def per_replica(*values):
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(values[context.replica_id_in_sync_group])
        )

    scale = tf.function(lambda loss: strategy.run(optimizer.scale_loss, args=(loss,)))
    step = tf.function(
        lambda gradient: strategy.run(lambda g: optimizer.apply([g], [weight]), args=(gradient,))
    )
    for losses, gradients in (((1.0, np.inf), ([1.0], [1.0])), ((1.0, 1.0), ([np.inf], [1.0]))):
        scale(per_replica(*losses))
        step(per_replica(*gradients))
    snapshot = optimizer.snapshot()
    assert (snapshot.overflow_count, snapshot.nonfinite_loss_count, snapshot.loss_scale) == (
        2,
        1,
        2.0**14,
    )


def test_building_the_optimizer_in_a_step_and_calls_outside_a_replica_context_raise(strategy):
    with strategy.scope():
        weight, optimizer = keras.Variable([1.0]), kmp.LossScaleOptimizer("sgd")
        step = tf.function(
            lambda: strategy.run(lambda: optimizer.apply([tf.ones(1)], [weight], unscaled=False))
        )
        with pytest.raises(
            ValueError,
            match=r"call `optimizer.build\(model.trainable_variables\)` under `strategy.sc",
        ):
            step()
        optimizer.build([weight])
        optimizer.scale_loss(1.0)
        with pytest.raises(
            ValueError, match=r"`unscale` must be called in a replica context, as in `strategy.run"
        ):
            optimizer.unscale([])
        with pytest.raises(
            ValueError, match=r"`apply` must be called in a replica context, as in `strategy.run"
        ):
            optimizer.apply([tf.constant([1.0])], [weight])
        with pytest.raises(ValueError, match="`guard` must be used in a replica context"):
            kmp.guard(optimizer, keras.layers.Dense(1)).__enter__()


def test_overflow_of_the_sum_over_replicas_skips_the_step(strategy):
    kmp.enable("float16", initial_scale=1.0)
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), layer])

        def loss(y, p):
            error = ops.cast(p, "float32") - ops.cast(y, "float32")
            return ops.mean(ops.square(error), -1)

        model.compile("sgd", loss)
    x = np.full((16, 1), 200.0, "float32")
    fit_data(model, (x, x))
    assert np.isfinite(model.get_weights()[0]).all()
    assert model.optimizer.snapshot().overflow_count == 2


class AveragedInput(keras.layers.Layer):
    """Keeps the mean of its inputs, as the mean over replicas."""

    def build(self, shape):
        self.average = self.add_weight(shape=(), trainable=False, aggregation="mean")

    def call(self, inputs):
        self.average.assign(ops.mean(ops.cast(inputs, "float32")))
        return inputs


def test_layers_are_restored_on_each_replica_and_a_nan_loss_on_one_is_in_the_metrics_of_none(
    strategy,
):
    with strategy.scope():
        normalized = keras.layers.SpectralNormalization(
            keras.layers.Dense(2, kernel_initializer="identity")
        )
        layers = [AveragedInput(), normalized, OverflowsBackward(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((2,)), *layers])
        rows = keras.metrics.MeanMetricWrapper(
            lambda y, prediction: ops.ones(ops.shape(y)[:1]), "rows"
        )
        model.compile("sgd", "mse", metrics=[rows], jit_compile=False)
    states = []

    def record(batch, logs):
        states.append(
            values_per_replica(
                strategy, [layers[0].average, normalized.layer.kernel, normalized.vector_u]
            )
        )

    x = np.repeat([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [0.25, 0.25]], 8, axis=0)
    x[12], x[20] = OVERFLOWS_BACKWARD, np.nan  # on the second replica
    fit_data(model, (x, np.ones(32)), [keras.callbacks.LambdaCallback(on_train_batch_end=record)])
    assert [replicas[0][0] for replicas in states] == [0.5, 0.5, 0.5, 0.25]
    for skipped in states[1:3]:
        for actual, expected in zip(skipped, states[0], strict=True):
            assert_equal(actual, expected)
    assert model.optimizer.snapshot().overflow_count == 2
    assert float(rows.count.numpy()) == 3 * 8  # the overflow of the gradients had a finite loss
