import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled_model, small_data, small_model, values

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
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.Dense(8, name="overflow_origin"),
            keras.layers.Lambda(overflowing_backward),
            keras.layers.Dense(2),
            kmp.layers.Softmax(),
        ]
    )
    model.compile(kmp.LossScaleOptimizer("sgd", **settings), "sparse_categorical_crossentropy")
    return model


def test_streak_of_corrupt_batches_raises_at_patience_and_keeps_the_weights_from_before(compile_mode):
    model = compiled_model("adam", **compile_mode)
    fit(model, data(batches=16))
    before = model.get_weights()
    with pytest.raises(StuckError, match="The batch's x contains NaN or Inf"):
        fit(model, data(slice(0, 250)), defaults())
    per_call = compile_mode.get("steps_per_execution", 1)
    assert model.optimizer.snapshot().step == 16 + -(-100 // per_call) * per_call
    for weight, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, expected)
    assert model.optimizer.snapshot().loss_scale == 2.0**15


def test_streak_is_detected_at_the_exact_step_for_any_start():
    for start in (1, 37, 99, 101):
        model = compiled_model("sgd")
        with pytest.raises(StuckError, match=f"at step {start + 100} the last 100 steps were skipped. Last loss: nan"):
            fit(model, data(slice(start, 250)), [StuckDetector()])


def test_overflow_at_the_min_scale_raises_and_names_the_variable_nearest_the_loss():
    model = overflowing_model(initial_scale=8.0, min_scale=2.0)
    with pytest.raises(StuckError) as caught:
        fit(model, data(), [StuckDetector()])
    message = str(caught.value)
    assert "at step 3 the last 3 steps were skipped with the loss scale at its lowest value" in message
    assert "Loss scale: 2." in message
    assert "Last loss: 0." in message
    assert "Gradients near sequential" in message
    assert "/overflow_origin/bias overflow" in message
    assert "The weights are those from before the skipped steps." in message


def test_message_names_a_weight_with_nan():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="head", bias_initializer=_nan)])
    model.compile("sgd", "mse")
    with pytest.raises(
        StuckError, match=r"before the skipped steps, and sequential\S*/head/bias contains NaN or Inf\."
    ):
        model.fit(np.ones((40, 4)), np.ones((40, 2)), batch_size=8, verbose=0, callbacks=[StuckDetector(patience=5)])


def _nan(shape, dtype=None):
    return keras.ops.full(shape, np.nan, dtype)


def test_patience_applies_to_a_fixed_scale():
    model = overflowing_model(loss_scale=8.0)
    with pytest.raises(StuckError, match="at step 20 the last 20 steps"):
        fit(model, data(), [StuckDetector(patience=20)])


def test_clean_step_resets_the_count():
    x, y = data(slice(0, 250))
    x[90 * 8 : 91 * 8], x[180 * 8 : 181 * 8] = 0.5, 0.5
    model = compiled_model("sgd")
    fit(model, (x, y), [StuckDetector()])
    assert model.optimizer.snapshot().overflow_count == 248


def test_ignored_streak_still_saves_the_checkpoint(tmp_path):
    fit(compiled_model(), data(slice(0, 250)), [StuckDetector(on_stuck="ignore", checkpoint=tmp_path / "a.keras")])
    assert keras.models.load_model(tmp_path / "a.keras").optimizer.snapshot().overflow_count == 100


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
    for weight, expected in zip(values(saved.weights), values(model.weights), strict=True):
        np.testing.assert_array_equal(weight, expected)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_detector_works_in_a_second_fit_and_for_a_second_model():
    detector = StuckDetector(patience=5)
    for model in (compiled_model(), compiled_model()):
        for _ in range(2):
            with pytest.raises(StuckError):
                fit(model, data(slice(0, 250)), [detector])


class Unserializable(keras.Model):
    def __init__(self, argument):
        super().__init__()
        self.net = small_model()

    def call(self, x):
        return self.net(x)


def test_model_that_keras_cannot_save_does_not_hide_why_training_is_stuck(tmp_path):
    model = Unserializable(object())
    model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(StuckError, match="saving them to '.*' failed: .*non-serializable"):
        fit(model, data(slice(0, 250)), [StuckDetector(checkpoint=tmp_path / "stuck.keras")])
    assert list(tmp_path.iterdir()) == []


def test_message_of_a_scale_that_still_falls_names_the_origin_and_what_lets_it_fall():
    model = overflowing_model()
    with pytest.raises(
        StuckError, match=r"overflow starts nearest to the loss at \S*/overflow_origin/bias\. .*patience"
    ):
        fit(model, data(), [StuckDetector(patience=3)])


def test_checkpoint_that_cannot_be_written_does_not_hide_why_training_is_stuck(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StuckError, match="saving them to '.*' failed: .*"):
        fit(compiled_model(), data(slice(0, 250)), [StuckDetector(checkpoint=tmp_path / "file" / "stuck.keras")])


@pytest.mark.parametrize(
    ("arguments", "error_class", "match"),
    [
        ({"patience": 0}, ValueError, "`patience` must be.*patience=0"),
        ({"patience": 2.5}, TypeError, "`patience` must be"),
        ({"on_stuck": "stop"}, ValueError, "`on_stuck` must be one of 'raise', 'warn', 'ignore'.*'stop'"),
        (
            {"checkpoint": "model.h5"},
            ValueError,
            r"`checkpoint` must be the path of a local file that ends in .keras or .weights.h5",
        ),
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
