import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled_model, sequential, small_data, small_model, values
from keras import layers

import kmp
from kmp.callbacks import StuckDetector, StuckError, defaults

pytestmark = pytest.mark.usefixtures("enabled")


def data(corrupt=slice(0, 0), batches=250):
    x, y = small_data(batches)
    x[corrupt.start * 8 : corrupt.stop * 8] = np.nan
    return x, y


def fit(model, data, callbacks=(), **arguments):
    return model.fit(*data, batch_size=8, shuffle=False, verbose=0, callbacks=callbacks, **arguments).history


@tf.custom_gradient
def overflowing_backward(x):
    return tf.identity(x), lambda gradient: gradient * np.inf


def overflowing_model(**settings):
    """Returns a model whose gradients overflow between `overflow_origin` and the loss at every loss scale."""
    hidden = layers.Dense(8, activation="relu"), layers.Dense(8, name="overflow_origin")
    head = layers.Lambda(overflowing_backward), layers.Dense(2), kmp.layers.Softmax()
    optimizer = kmp.LossScaleOptimizer("sgd", **settings)
    return sequential(*hidden, *head, optimizer=optimizer, loss="sparse_categorical_crossentropy")


def test_streak_of_corrupt_batches_raises_at_patience_and_keeps_the_weights_from_before(compile_mode):
    model = compiled_model("adam", **compile_mode)
    fit(model, data(batches=16))
    before = model.get_weights()
    with pytest.raises(StuckError, match="The batch's x contains NaN or Inf"):
        fit(model, data(slice(0, 250)), defaults())
    per_call = compile_mode.get("steps_per_execution", 1)
    assert model.optimizer.snapshot().step == 16 + -(-100 // per_call) * per_call
    np.testing.assert_equal(model.get_weights(), before)
    assert model.optimizer.snapshot().loss_scale == 2.0**15


def test_streak_is_detected_at_the_exact_step_for_any_start():
    model = compiled_model("sgd")
    for start in (1, 37, 99, 101):
        step = model.optimizer.snapshot().step + start + 100
        with pytest.raises(StuckError, match=f"at step {step} the last 100 steps were skipped. Last loss: nan"):
            fit(model, data(slice(start, 250)), [StuckDetector()])


OF_FALLING_SCALE = r"overflow starts nearest to the loss at \S*/overflow_origin/bias\. .*patience"
AT_MINIMUM = [
    *("at step 3 the last 3 steps were skipped with the loss scale at its lowest value", "Loss scale: 2."),
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
def test_message_says_where_gradients_overflow_and_what_the_scale_does(settings, patience, expected):
    with pytest.raises(StuckError) as caught:
        fit(overflowing_model(**settings), data(), [StuckDetector(patience=patience)])
    for part in expected:
        assert re.search(part, str(caught.value)), part


def test_message_names_a_weight_with_nan():
    model = sequential(layers.Dense(2, name="head", bias_initializer=keras.initializers.Constant(np.nan)))
    expected = r"before the skipped steps, and sequential\S*/head/bias contains NaN or Inf\."
    with pytest.raises(StuckError, match=expected):
        model.fit(np.ones((40, 4)), np.ones((40, 2)), batch_size=8, verbose=0, callbacks=[StuckDetector(patience=5)])


def test_clean_step_resets_the_count():
    x, y = data(slice(0, 250))
    x[90 * 8 : 91 * 8], x[180 * 8 : 181 * 8] = 0.5, 0.5
    model = compiled_model("sgd")
    fit(model, (x, y), [StuckDetector()])
    assert model.optimizer.snapshot().overflow_count == 248


@pytest.mark.parametrize("on_stuck", ["warn", "ignore"])
def test_training_continues_and_converges_if_on_stuck_does_not_raise(on_stuck, recwarn):
    x, y = data(slice(0, 200))
    model = compiled_model(keras.optimizers.Adam(0.02), metrics=["accuracy"])
    for _ in range(3):
        history = fit(model, (x, y), [StuckDetector(on_stuck=on_stuck)])
    messages = [str(warning.message) for warning in recwarn if "Training is stuck" in str(warning.message)]
    assert len(messages) == (3 if on_stuck == "warn" else 0)
    assert history["accuracy"][0] > 0.9


@pytest.mark.parametrize("name", ["stuck.keras", "folder/stuck.weights.h5"])
def test_checkpoint_has_the_weights_from_before_the_streak(tmp_path, name):
    path = tmp_path / name
    model = compiled_model("adam")
    fit(model, data(batches=10))
    with pytest.raises(StuckError, match=f"saved to '{path}'"):
        fit(model, data(slice(0, 250)), defaults(checkpoint=path))
    saved = keras.models.load_model(path) if name.endswith(".keras") else compiled_model("adam")
    if name.endswith(".h5"):
        saved.optimizer.build(saved.trainable_variables)
        saved.load_weights(path)
    np.testing.assert_equal(values(saved.weights), values(model.weights))
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_ignored_streak_still_saves_the_checkpoint(tmp_path):
    fit(compiled_model(), data(slice(0, 250)), [StuckDetector(on_stuck="ignore", checkpoint=tmp_path / "a.keras")])
    assert keras.models.load_model(tmp_path / "a.keras").optimizer.snapshot().overflow_count == 100


def test_detector_works_in_a_second_fit_and_for_a_second_model():
    detector = StuckDetector(patience=5)
    for model in (compiled_model(), compiled_model()):
        for _ in range(2):
            with pytest.raises(StuckError):
                fit(model, data(slice(0, 250)), [detector])


def test_detector_of_default_callbacks_works_without_the_others(tmp_path):
    callbacks = defaults(report=tmp_path / "report.html")
    monitor, detector = callbacks[0], next(each for each in callbacks if isinstance(each, StuckDetector))
    for attached in ([detector], [monitor, detector]):
        with pytest.raises(StuckError, match="Cause: "):
            fit(compiled_model(), data(slice(0, 110)), attached)


class Unserializable(keras.Model):
    def __init__(self, argument):
        super().__init__()
        self.net = small_model()

    def call(self, x):
        return self.net(x)


def test_checkpoint_that_cannot_be_written_does_not_hide_why_training_is_stuck(tmp_path):
    unserializable = Unserializable(object())
    unserializable.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(StuckError, match="saving them to '.*' failed: .*non-serializable"):
        fit(unserializable, data(slice(0, 250)), [StuckDetector(checkpoint=tmp_path / "stuck.keras")])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(StuckError, match="saving them to '.*' failed: .*"):
        fit(compiled_model(), data(slice(0, 250)), [StuckDetector(checkpoint=tmp_path / "file" / "stuck.keras")])


@pytest.mark.parametrize(
    ("arguments", "error_class", "match"),
    [
        ({"patience": 0}, ValueError, "`patience` must be.*patience=0"),
        ({"patience": 2.5}, TypeError, "`patience` must be"),
        ({"on_stuck": "stop"}, ValueError, "`on_stuck` must be one of 'raise', 'warn', 'ignore'.*'stop'"),
        ({"checkpoint": "model.h5"}, ValueError, r"the path of a local file that ends in .keras or .weights.h5"),
        ({"checkpoint": 3}, TypeError, "`checkpoint` must be"),
        ({"optimizer": "adam"}, TypeError, "`optimizer` must be a kmp.LossScaleOptimizer"),
    ],
)
def test_invalid_argument_raises(arguments, error_class, match):
    with pytest.raises(error_class, match=match):
        StuckDetector(**arguments)


def test_detector_rarely_reads_the_optimizer_without_overflows(monkeypatch):
    model, snapshots, reads = compiled_model("sgd"), [], []
    take_snapshot, read_counts = model.optimizer.snapshot, model.optimizer.counters.read_counts
    monkeypatch.setattr(model.optimizer, "snapshot", lambda: snapshots.append(1) or take_snapshot())
    monkeypatch.setattr(model.optimizer.counters, "read_counts", lambda: reads.append(1) or read_counts())
    fit(model, data(), [StuckDetector()])
    assert len(snapshots) == 2  # both before the first step
    # A snapshot reads the counts too. One more at the end, and each time the scale could have fallen to min_scale.
    assert len(reads) <= 2 + 1 + 1 + 250 // 28
