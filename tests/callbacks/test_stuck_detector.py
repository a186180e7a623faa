import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MODES, OverflowsBackward, compiled_model, fit_data, sequential, small_data
from keras import layers

import kmp
from kmp.callbacks import LossScaleLogger, Monitor, StuckError, defaults

pytestmark = pytest.mark.usefixtures("enabled")


def data(corrupt=slice(0, 0), batches=250):
    x, y = small_data(batches)
    x[corrupt.start * 8 : corrupt.stop * 8] = np.nan
    return x, y


@tf.custom_gradient
def overflowing_backward(x):
    return tf.identity(x), lambda gradient: gradient * np.inf


def overflowing_model(**settings):
    """Returns a model whose gradients overflow at every loss scale.

    They overflow between `overflow_origin` and the loss.
    """
    hidden = layers.Dense(8, activation="relu"), layers.Dense(8, name="overflow_origin")
    head = layers.Lambda(overflowing_backward), layers.Dense(2), kmp.layers.Softmax()
    optimizer = kmp.LossScaleOptimizer("sgd", **settings)
    options = {
        "optimizer": optimizer,
        "loss": "sparse_categorical_crossentropy",
        "run_eagerly": True,
    }
    return sequential(*hidden, *head, **options)


def test_streak_of_corrupt_batches_raises_at_patience_and_keeps_the_weights_from_before():
    model = compiled_model("adam", **MODES["steps_per_execution"])
    fit_data(model, data(batches=16))
    before = model.get_weights()
    with pytest.raises(StuckError, match="The batch's x contains NaN or Inf") as caught:
        fit_data(model, data(slice(0, 250)), defaults())
    assert "The weights are those from before the skipped steps." in str(caught.value)
    assert model.optimizer.snapshot().step == 16 + 104
    np.testing.assert_equal(model.get_weights(), before)
    assert model.optimizer.snapshot().loss_scale == 2.0**15


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32"])
@pytest.mark.parametrize("replay", [False, True])
def test_message_about_a_model_without_a_loss_scale_does_not_name_one(policy, replay):
    kmp.enable(policy)
    model = compiled_model("sgd", run_eagerly=True)
    with pytest.raises(StuckError) as caught:
        fit_data(model, data(slice(0, 30), 30), [Monitor(patience=10, replay=replay)])
    message = str(caught.value)
    assert re.match(r"Training is stuck: at step 10 the last 10 steps were skipped\. Last", message)
    cause = "The batch's x contains NaN or Inf." if replay else "The loss is NaN or Inf."
    assert f"\nCause: {cause}\n" in message
    assert "scal" not in message


def test_streak_is_detected_at_the_exact_step_for_any_start_and_a_clean_step_ends_it():
    model = compiled_model("sgd")
    for start in (1, 37, 101):
        step = model.optimizer.snapshot().step + start + 20
        with pytest.raises(
            StuckError, match=f"at step {step} the last 20 steps were skipped. Last loss: nan"
        ):
            fit_data(model, data(slice(start, 250)), [Monitor(replay=False, patience=20)])


OF_FALLING_SCALE = r"overflow starts nearest to the loss at \S*/overflow_origin/bias\. .*patience"
AT_MINIMUM = [
    *(
        "at step 3 the last 3 steps were skipped with the loss scale at its lowest value",
        "Loss scale: 2.",
    ),
    *("Last loss: 0.", r"Gradients near sequential\S*/overflow_origin/bias overflow"),
    "The weights are those from before the skipped steps.",
]


@pytest.mark.parametrize(
    ("settings", "patience", "expected"),
    [
        ({"initial_scale": 8.0, "min_scale": 2.0}, 100, AT_MINIMUM),
        ({"loss_scale": 8.0}, 20, ["at step 20 the last 20 steps"]),  # a fixed scale cannot fall
        ({}, 3, [OF_FALLING_SCALE]),
    ],
    ids=["lowest scale", "fixed scale", "falling scale"],
)
def test_message_says_where_gradients_overflow_and_what_the_scale_does(
    settings, patience, expected
):
    with pytest.raises(StuckError) as caught:
        fit_data(overflowing_model(**settings), data(), [Monitor(replay=False, patience=patience)])
    for part in expected:
        assert re.search(part, str(caught.value)), part


def test_message_says_why_several_replicas_have_no_replay(two_replicas):
    with two_replicas.scope():
        model = compiled_model()
    with pytest.raises(StuckError) as caught:
        fit_data(model, data(slice(0, 250)), defaults())
    message = str(caught.value)
    assert "no replay shows where (2 replicas); a run on one replica names the first" in message
    assert "kmp.callbacks.defaults()" not in message


def test_message_names_a_weight_with_nan():
    head = layers.Dense(2, name="head", bias_initializer=keras.initializers.Constant(np.nan))
    model = sequential(head, run_eagerly=True)
    expected = r"before the skipped steps, and sequential\S*/head/bias contains NaN or Inf\."
    with pytest.raises(StuckError, match=expected):
        model.fit(
            np.ones((40, 4)),
            np.ones((40, 2)),
            batch_size=8,
            verbose=0,
            callbacks=[Monitor(replay=False, patience=5)],
        )


def test_message_does_not_speak_of_the_weights_if_a_later_step_of_the_execution_changed_them():
    kmp.enable(initial_scale=8.0, min_scale=8.0)
    parts = layers.Dense(4, kernel_initializer="identity"), OverflowsBackward(), layers.Dense(1)
    model = sequential(*parts, steps_per_execution=5, jit_compile=False)
    x = np.ones((40, 4), "float32")
    x[:8] = 100
    with pytest.raises(StuckError, match="a step since the last check was skipped") as caught:
        model.fit(
            x,
            np.ones((40, 1)),
            batch_size=8,
            shuffle=False,
            verbose=0,
            callbacks=[Monitor(replay=False)],
        )
    assert "weights" not in str(caught.value)


@pytest.mark.parametrize(("on_nonfinite", "stuck"), [("warn", 2), ("ignore", 0)])
def test_training_continues_where_it_is_not_to_end(on_nonfinite, stuck, recwarn):
    x, y = data(slice(2, 6), batches=14)
    x[8 * 8 : 12 * 8] = np.nan
    model = compiled_model(run_eagerly=True)
    fit_data(model, (x, y), [Monitor(replay=False, patience=3, on_nonfinite=on_nonfinite)])
    assert sum("Training is stuck" in str(warning.message) for warning in recwarn) == stuck
    snapshot = model.optimizer.snapshot()
    assert (snapshot.step, snapshot.overflow_count) == (14, 8)


def test_detector_works_in_a_second_fit_and_for_a_second_model():
    monitor = Monitor(replay=False, patience=3)
    for model in (compiled_model(run_eagerly=True), compiled_model(run_eagerly=True)):
        for _ in range(2):
            with pytest.raises(StuckError):
                fit_data(model, data(slice(0, 250)), [monitor])


@pytest.mark.parametrize(
    ("arguments", "error_class", "match"),
    [
        ({"patience": 0}, ValueError, "`patience` must be.*patience=0"),
        ({"patience": 2.5}, TypeError, "`patience` must be"),
        (
            {"on_nonfinite": "stop"},
            ValueError,
            "`on_nonfinite` must be one of .skip., .raise., .*'stop'",
        ),
    ],
)
def test_invalid_argument_raises(arguments, error_class, match):
    with pytest.raises(error_class, match=match):
        Monitor(**arguments)


def test_monitor_rarely_reads_the_optimizer_without_overflows(monkeypatch):
    model, snapshots, reads = compiled_model("sgd"), [], []
    take_snapshot, read_counts = model.optimizer.snapshot, model.optimizer.counters.read_counts
    monkeypatch.setattr(model.optimizer, "snapshot", lambda: snapshots.append(1) or take_snapshot())
    monkeypatch.setattr(
        model.optimizer.counters, "read_counts", lambda: reads.append(1) or read_counts()
    )
    fit_data(model, data(batches=100), [LossScaleLogger()])
    quiet = len(reads)
    reads.clear()
    snapshots.clear()
    fit_data(model, data(batches=100), [Monitor(replay=False)])
    # Two before the first step; steps 1, 2, 4 and so on up to 64; and the last one.
    assert len(snapshots) == 10
    # Each time the scale could have fallen to min_scale; and at the start, for the samples.
    assert len(reads) - quiet <= 100 // 28 + 22
