import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import (
    MODES,
    OverflowsBackward,
    compiled_model,
    fit_data,
    sequential,
    small_data,
    small_model,
)
from keras import layers

import kmp
from kmp.callbacks import Monitor, StuckError
from kmp.optimizer.counters import Counters

PER_STREAK = re.compile(r"Steps? \d+ (was|to \d+ were) skipped: ")


def two_outputs(optimizer="sgd", **options):
    """Returns a compiled model with the outputs `age` and `height`."""
    inputs = keras.Input((4,))
    hidden = layers.Dense(4)(inputs)
    outputs = {name: layers.Dense(1, name=name, dtype="float32")(hidden) for name in LOSSES}
    model = keras.Model(inputs, outputs)
    model.compile(optimizer, LOSSES, **options)
    return model


LOSSES = {"age": "mse", "height": "mae"}


def data_of_two(corrupt, batches=12):
    """Returns data with NaN in the heights of batches, which are numbered from 1."""
    x = np.ones((8 * batches, 4), "float32")
    y = {name: np.ones((8 * batches, 1), "float32") for name in LOSSES}
    for batch in corrupt:
        y["height"][8 * batch - 8] = np.nan
    return x, y


def data(corrupt, batches=12):
    """Returns data with NaN in the inputs of batches, which are numbered from 1."""
    x, y = small_data(batches)
    for batch in corrupt:
        x[8 * batch - 8] = np.nan
    return x, y


def reports(model, data, monitor, **options):
    """Trains a model. Returns the warnings per streak, each with the batch after which it came."""
    found = []

    class Batches(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            for each in caught[len(found) :]:
                assert issubclass(each.category, UserWarning)
                found.append((batch + 1, str(each.message)))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        fit_data(model, data, [monitor, Batches()], **options)
    return [(batch, text) for batch, text in found if PER_STREAK.match(text)]


@pytest.mark.parametrize(
    ("policy", "mode"),
    [
        pytest.param("mixed_float16", "graph", marks=pytest.mark.exhaustive),
        ("mixed_float16", "compiled step"),
        ("mixed_bfloat16", "eager"),
        ("float32", "xla"),
    ],
)
def test_nonfinite_loss_is_reported_at_its_step_once_per_streak(policy, mode):
    with kmp.enable(policy):
        optimizer = kmp.wrap(keras.optimizers.SGD(), jit_compile=mode == "compiled step")
        model = two_outputs(optimizer, **MODES[mode])
    monitor = Monitor(repair=False, patience=30)
    assert reports(model, data_of_two([3, 4, 5, 9]), monitor) == [
        (
            step,
            f"Step {step} was skipped: the loss 'height_loss' is NaN, and the batch's y['height']"
            " contains NaN or Inf in 1 of 8 rows (0). The weights are unchanged. After 30 skipped"
            " steps in a row, a StuckError ends the training and names the cause.",
        )
        for step in (3, 9)
    ]
    assert model.optimizer.snapshot().overflow_count == 4


@pytest.mark.parametrize(
    "policy", ["mixed_float16", pytest.param("float32", marks=pytest.mark.exhaustive)]
)
def test_step_is_exact_in_an_execution_of_several(policy):
    with kmp.enable(policy):
        model = compiled_model(**MODES["steps_per_execution"])
    (report,) = reports(model, data([11], 16), Monitor(replay=False, on_nonfinite="warn"))
    batch, text = report
    assert batch == 16
    assert text == (
        "Step 11 was skipped: the loss is NaN. The weights are unchanged. After 100 skipped steps"
        " in a row, a warning names the cause."
    )


class OwnLogs(keras.Sequential):
    """Returns its losses in the logs and keeps no metrics, as generative models do."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, variables), variables)
        return {"d_loss": loss, "g_loss": keras.ops.sum(y)}


def test_loss_is_named_as_a_train_step_of_the_user_returns_it():
    with kmp.enable():
        model = OwnLogs(small_model().layers)
        model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    ((batch, text),) = reports(model, data([5]), Monitor(replay=False))
    assert batch == 5
    assert text.startswith("Step 5 was skipped: the loss 'd_loss' is NaN. ")


def test_overflow_at_a_falling_loss_scale_is_not_reported():
    with kmp.enable(initial_scale=2.0**30):
        model = compiled_model()
    assert reports(model, data([]), Monitor(replay=False, on_nonfinite="raise")) == []
    assert model.optimizer.snapshot().overflow_count > 5


def overflowing_backward():
    """Returns a model whose gradients overflow where its inputs exceed 32."""
    parts = layers.Dense(4, kernel_initializer="identity"), OverflowsBackward(), layers.Dense(1)
    return sequential(*parts, jit_compile=False)


def data_of_overflows(corrupt, batches=40):
    x = np.ones((8 * batches, 4), "float32")
    for batch in corrupt:
        x[8 * batch - 8] = 100
    return x, np.ones((8 * batches, 1))


def test_nonfinite_gradients_without_a_loss_scale_are_reported_at_the_next_check():
    with kmp.enable("mixed_bfloat16"):
        model = overflowing_backward()
    monitor = Monitor(replay=False)
    (report,) = reports(model, data_of_overflows([7]), monitor)
    batch, text = report
    assert 7 < batch <= 33
    expected = r"Step 7 was skipped: the loss is finite, but the gradient of \S*/bias is NaN or Inf"
    assert re.match(expected, text)
    (report,) = reports(model, data_of_overflows(range(3, 41)), monitor)
    assert re.match(r"Steps 43 to \d\d were skipped: the loss is finite", report[1])


def test_streak_is_reported_once_where_each_call_of_fit_trains_a_batch():
    with kmp.enable("float32"):
        model = compiled_model(run_eagerly=True)
    monitor = Monitor(replay=False)
    found = [reports(model, data(corrupt, 1), monitor) for corrupt in ([], [1], [1], [], [1])]
    assert [len(each) for each in found] == [0, 1, 0, 0, 1]


def test_replicas_report_the_loss_of_any_of_them(two_replicas):
    with kmp.enable("float32"), two_replicas.scope():
        model = compiled_model(jit_compile=False)
    assert [batch for batch, _ in reports(model, data([4, 5], 8), Monitor())] == [4]


def test_many_streaks_are_counted_without_a_warning():
    with kmp.enable("float32"):
        model = compiled_model(jit_compile=False)
    found = reports(model, data(range(2, 40, 2), 40), Monitor(replay=False))
    assert [batch for batch, _ in found] == list(range(2, 22, 2))
    marked = [" Later ones are counted without a warning." in text for _, text in found]
    assert marked == [False] * 9 + [True]
    assert model.optimizer.snapshot().overflow_count == 19


@pytest.mark.parametrize(("policy", "replay"), [("mixed_float16", True), ("float32", False)])
def test_raise_ends_the_training_at_the_first_step_and_keeps_the_weights(policy, replay):
    with kmp.enable(policy):
        model = compiled_model(run_eagerly=True)
    fit_data(model, data([], 2))
    before = model.get_weights()
    monitor = Monitor(replay=replay, on_nonfinite="raise")
    cause = r"The batch's x contains NaN or Inf\." if replay else r".*NaN or Inf"
    # The second call of `fit` goes on with the same streak.
    for step, steps in ((3, "Step 3 was"), (4, "Steps 3 to 4 were")):
        expected = rf"^{steps} skipped: the loss is NaN.*\nCause: {cause}"
        with pytest.raises(StuckError, match=expected) as caught:
            fit_data(model, data([1, 2]), [monitor])
        assert "The weights are those from before the skipped steps." in str(caught.value)
        assert model.optimizer.snapshot().step == step
    np.testing.assert_equal(model.get_weights(), before)
    assert monitor.run.last("nonfinite_loss_count") == 2


def test_learning_rate_is_lowered_once_per_streak_and_recorded(tmp_path):
    with kmp.enable("float32"):
        model = compiled_model(keras.optimizers.Adam(0.5), run_eagerly=True)
    (monitor,) = kmp.callbacks.defaults(
        tmp_path, replay=False, on_nonfinite="lower_learning_rate", patience=4
    )
    found = reports(model, data([3, 4, 8]), monitor)
    assert [batch for batch, _ in found] == [3, 8]
    assert " The learning rate is lowered from 0.5 to 0.25. After 4 skipped steps" in found[0][1]
    run = kmp.load_run(tmp_path)
    steps, rates = run.series("lowered_learning_rate")
    assert (steps.tolist(), rates.tolist()) == ([3, 8], [0.25, 0.125])
    assert run.metrics["learning_rate"][1].tolist() == [0.125]
    with pytest.raises(StuckError, match="the last 4 steps were skipped"):
        fit_data(model, data(range(1, 9)), [monitor])
    assert float(model.optimizer.learning_rate) == 0.0625


def test_learning_rate_that_a_schedule_sets_cannot_be_lowered():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 100, 0.9)
    with kmp.enable("float32"):
        model = compiled_model(keras.optimizers.Adam(schedule))
    expected = (
        r"on_nonfinite='lower_learning_rate' sets the learning rate, but Adam computes it by"
        r" ExponentialDecay\. Write .*Adam\(learning_rate=1e-3\), or on_nonfinite='skip'\."
    )
    with pytest.raises(ValueError, match=expected):
        fit_data(model, data([]), [Monitor(on_nonfinite="lower_learning_rate")])


def test_ignore_says_nothing():
    with kmp.enable("float32"):
        model = compiled_model(run_eagerly=True)
    monitor = Monitor(replay=False, on_nonfinite="ignore", patience=2)
    assert reports(model, data(range(2, 9)), monitor) == []


def test_metric_that_is_always_nan_costs_no_reads(monkeypatch):
    def undefined(y_true, y_pred):
        return keras.ops.full((), np.nan)

    reads = []
    read_counts = Counters.read_counts
    monkeypatch.setattr(Counters, "read_counts", lambda self: reads.append(1) or read_counts(self))
    counts = []
    for metrics in ([], [undefined]):
        with kmp.enable("float32"):
            model = compiled_model(metrics=metrics, jit_compile=False)
        reads.clear()
        assert reports(model, data([], 64), Monitor(replay=False)) == []
        counts.append(len(reads))
    assert counts[0] == counts[1] < 50
