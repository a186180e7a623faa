"""One decision on all replicas: two virtual devices, an overflow on either alone, on both, on neither."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import OverflowsBackward, small_data
from keras import ops

import kmp

pytestmark = pytest.mark.usefixtures("enabled")

SPOILT = 64.0
WHERE = {"neither": (), "first": (0,), "second": (1,), "both": (0, 1)}


@pytest.fixture
def strategy(two_replicas):
    return two_replicas


def make_model(strategy, optimizer="adam", **arguments):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        inputs = keras.Input((4,))
        x = keras.layers.Dense(4, name="scaled", kernel_initializer="identity", use_bias=True)(inputs)
        x = OverflowsBackward()(x)
        x = keras.layers.BatchNormalization(name="stock")(x)
        outputs = kmp.layers.Softmax()(keras.layers.Dense(2)(x))
        model = keras.Model(inputs, outputs)
        model.compile(
            optimizer, "sparse_categorical_crossentropy", **({"run_eagerly": True} if "eager" in arguments else {})
        )
    return model


def batches(kind, replicas, batches=3):
    """Batches of 8 rows, of which either replica gets 4; the middle one is spoilt on `replicas`."""
    x, y = small_data(batches)
    for replica in replicas:
        x[8 + 4 * replica] = SPOILT if kind == "backward" else kind
    return x, y


def fit(model, data, callbacks=(), **arguments):
    return model.fit(*data, batch_size=8, shuffle=False, verbose=0, callbacks=callbacks, **arguments).history


def on_each(strategy, variables):
    """The values of variables on each replica: a list of arrays for each."""
    local = [strategy.experimental_local_results(variable.value) for variable in variables]
    return [[part.numpy() for part in parts] for parts in zip(*local, strict=True)]


def shared_state(model):
    optimizer = model.optimizer
    return [*model.trainable_variables, *optimizer.variables, *optimizer.counters.weights]


class States(keras.callbacks.Callback):
    """Keeps the weights after each batch, as each replica has them."""

    def __init__(self, strategy):
        super().__init__()
        self.strategy, self.seen = strategy, []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(on_each(self.strategy, self.model.weights + self.model.optimizer.inner_optimizer.variables))


@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize("kind", ["backward", np.nan, np.inf], ids=str)
@pytest.mark.parametrize("where", WHERE)
def test_overflow_on_any_replica_skips_the_step_on_all_and_leaves_no_trace(strategy, where, kind, mode):
    model, states = make_model(strategy, **{mode: True}), States(strategy)
    fit(model, batches(kind, WHERE[where]), [states, *kmp.callbacks.defaults()])
    first, second, third = states.seen
    for replica in (0, 1):
        unchanged = [np.array_equal(a, b) for a, b in zip(first[replica], second[replica], strict=True)]
        assert all(unchanged) if WHERE[where] else not any(unchanged[:2])
        assert not np.array_equal(second[replica][0], third[replica][0])
        assert all(np.isfinite(value).all() for value in third[replica])
    for one, other in zip(*on_each(strategy, shared_state(model)), strict=True):
        np.testing.assert_array_equal(one, other)
    found, skipped = model.optimizer.snapshot(), bool(WHERE[where])
    assert (found.step, found.overflow_count) == (3, int(skipped))
    assert found.nonfinite_loss_count == (kind != "backward" and skipped)
    assert found.loss_scale == 2.0 ** (14 if kind == "backward" and skipped else 15)
    assert found.overflow_origin == ("scaled/bias" if kind == "backward" and skipped else found.overflow_origin)
    assert np.isfinite(model.predict(small_data(1)[0], verbose=0)).all()


def test_histogram_counts_the_gradients_of_both_replicas(strategy):
    model, callbacks = make_model(strategy), kmp.callbacks.defaults(every_n_steps=2)
    fit(model, batches("backward", ()), callbacks)
    elements = sum(variable.numpy().size for variable in model.trainable_variables)
    assert [histogram.total for histogram in callbacks[0].run.histograms] == [2 * elements, 2 * elements]


@pytest.mark.parametrize("kind", ["backward", np.nan], ids=str)
@pytest.mark.parametrize("where", WHERE)
def test_custom_loop_takes_one_decision_and_its_guard_restores_each_replica(strategy, where, kind):
    model = make_model(strategy)
    optimizer, loss_of = model.optimizer, keras.losses.SparseCategoricalCrossentropy(reduction="sum")
    with strategy.scope():
        optimizer.build(model.trainable_variables)

    def forward_and_apply(x, y):
        with kmp.guard(optimizer, model):
            with tf.GradientTape() as tape:
                scaled = optimizer.scale_loss(loss_of(y, model(x, training=True)) / 8)
            optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)

    step = tf.function(lambda x, y: strategy.run(forward_and_apply, args=(x, y)))
    data = tf.data.Dataset.from_tensor_slices(batches(kind, WHERE[where])).batch(8, drop_remainder=True)
    seen = []
    for x, y in strategy.experimental_distribute_dataset(data):
        step(x, y)
        seen.append(on_each(strategy, model.weights))
    for replica in (0, 1):
        unchanged = [np.array_equal(a, b) for a, b in zip(seen[0][replica], seen[1][replica], strict=True)]
        assert all(unchanged) if WHERE[where] else not any(unchanged[:2])
        assert all(np.isfinite(value).all() for value in seen[2][replica])
    for one, other in zip(*on_each(strategy, shared_state(model)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert optimizer.snapshot().overflow_count == bool(WHERE[where])


def test_cause_survives_functions_of_their_own(strategy):
    with strategy.scope():
        weight = keras.Variable([1.0], name="weight")
        optimizer = kmp.LossScaleOptimizer("sgd")
        optimizer.build([weight])

    scale = tf.function(lambda loss: strategy.run(optimizer.scale_loss, args=(loss,)))
    step = tf.function(lambda gradient: strategy.run(lambda g: optimizer.apply([g], [weight]), args=(gradient,)))

    def of_each(*values):
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(values[context.replica_id_in_sync_group])
        )

    scale(of_each(1.0, np.inf))
    step(of_each([1.0], [1.0]))
    scale(of_each(1.0, 1.0))
    step(of_each([np.inf], [1.0]))
    found = optimizer.snapshot()
    assert (found.overflow_count, found.nonfinite_loss_count, found.loss_scale) == (2, 1, 2.0**14)


def test_optimizer_that_a_step_would_have_to_build_is_an_error(strategy):
    model = make_model(strategy)
    gradients = [tf.ones_like(variable.value) for variable in model.trainable_variables]
    step = tf.function(lambda: strategy.run(lambda: model.optimizer.apply(gradients, model.trainable_variables)))
    with pytest.raises(ValueError, match=r"call `optimizer.build\(model.trainable_variables\)` under `strategy.scope"):
        step()


def test_apply_and_guard_outside_a_replica_are_errors(strategy):
    with strategy.scope():
        weight = keras.Variable([1.0])
        optimizer = kmp.LossScaleOptimizer("sgd")
        optimizer.build([weight])
        optimizer.scale_loss(1.0)
        with pytest.raises(ValueError, match=r"`apply` must be called in a replica context, as in `strategy.run"):
            optimizer.apply([tf.constant([1.0])], [weight])
        with (
            pytest.raises(ValueError, match="`guard` must be used in a replica context"),
            kmp.guard(optimizer, keras.layers.Dense(1)),
        ):
            pass


def test_sum_over_replicas_that_overflows_is_seen_before_it_is_applied(strategy):
    kmp.enable("float16", initial_scale=1.0)
    with strategy.scope():
        kernel = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), kernel])
        squares = lambda y, p: ops.mean(ops.square(ops.cast(p, "float32") - ops.cast(y, "float32")), -1)  # noqa: E731
        model.compile("sgd", squares)
    x = np.full((16, 1), 200.0, "float32")
    fit(model, (x, x))
    assert np.isfinite(model.get_weights()[0]).all()
    assert model.optimizer.snapshot().overflow_count == 2


def test_replica_without_a_row_of_the_last_batch_costs_a_step_and_not_the_scale(strategy):
    x, y = small_data(8)
    model = make_model(strategy)
    fit(
        model, (x[:57], y[:57]), kmp.callbacks.defaults(), epochs=3
    )  # the last batch has one row, for the first replica
    found = model.optimizer.snapshot()
    assert (found.step, found.overflow_count, found.loss_scale) == (24, 3, 2.0**15)
    assert all(np.isfinite(value).all() for value in model.get_weights())


def test_batch_that_is_skipped_is_left_out_of_the_metrics_of_all_replicas(strategy):
    model = make_model(strategy)
    with strategy.scope():
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=[keras.metrics.MeanMetricWrapper(one, "rows")])
    fit(model, batches(np.nan, (1,), 8))
    (rows,) = [metric for outer in model.metrics for metric in getattr(outer, "metrics", []) if metric.name == "rows"]
    assert float(rows.count.numpy()) == 7 * 8


def one(y, prediction):
    return ops.ones(ops.shape(y)[:1])


def test_stuck_run_is_told_under_replicas(strategy):
    x, y = small_data(30)
    x[:] = np.nan
    with pytest.raises(kmp.callbacks.StuckError, match="the last 12 steps"):
        fit(make_model(strategy), (x, y), [kmp.callbacks.StuckDetector(patience=12)])
