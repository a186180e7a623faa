import copy
import gc
import itertools
import pickle
import weakref

import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from conftest import Interrupt, compiled_model, fit, is_locked, small_data, without_replays

import kmp
from kmp.callbacks import (
    GradientHistogram,
    LossScaleLogger,
    Monitor,
    OverflowCounter,
    Report,
    StuckDetector,
    StuckError,
    defaults,
)

pytestmark = pytest.mark.usefixtures("enabled")

KEYS = {"loss_scale", "overflow_count", "grad_norm"}
LOGGERS = [LossScaleLogger, OverflowCounter, GradientHistogram]


def steps_of(callback):
    key = "overflow_count" if isinstance(callback, OverflowCounter) else "loss_scale"
    return callback.run.series(key)[0].tolist()


def test_training_in_every_mode_is_recorded_and_unchanged_and_can_be_recorded_later(compile_mode):
    trained, callbacks = [], without_replays(every_n_steps=10)
    for used in ([], callbacks):
        keras.utils.set_random_seed(0)
        model = compiled_model("adam", **compile_mode)
        history = fit(model, used, batches=21, epochs=2)
        trained.append(model)
    np.testing.assert_equal(*(model.get_weights() for model in trained))
    assert {key: len(values) for key, values in history.items()} == dict.fromkeys({"loss"} | KEYS, 2)
    assert history["loss_scale"] == [2.0**15] * 2
    # Records follow the optimizer's step counter.
    per_call = compile_mode.get("steps_per_execution", 1)
    assert steps_of(callbacks[0]) == {1: [1, 10, 20, 21, 30, 40, 42], 8: [8, 16, 21, 37, 42]}[per_call]
    histograms = callbacks[0].run.histograms
    assert [histogram.step for histogram in histograms] == [1, 10, 20, 30, 40]
    sizes = sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)
    assert {(histogram.total, histogram.loss_scale) for histogram in histograms} == {(sizes, 2.0**15)}
    later, (model, _) = GradientHistogram(every_n_steps=200), trained
    assert "grad_norm" in fit(model, [later], batches=8)
    assert [histogram.step for histogram in later.run.histograms] == [43]
    fit(model, [], batches=8)
    assert model.optimizer.snapshot().histogram.step == 43
    fit(model, [later], batches=8)
    assert [histogram.step for histogram in later.run.histograms] == [43, 59]


class SeveralStepsPerBatch(keras.Sequential):
    """Takes several optimizer steps per batch."""

    steps = 5

    def train_step(self, data):
        for _ in range(self.steps):
            logs = super().train_step(data)
        return logs


def test_records_have_the_optimizer_steps_if_a_batch_takes_several():
    model, callback = SeveralStepsPerBatch(compiled_model().layers), LossScaleLogger(every_n_steps=20)
    model.compile("sgd", "sparse_categorical_crossentropy")
    fit(model, [callback], batches=40)
    assert steps_of(callback) == [5, 80, 180, 200]  # between two reads, each batch counts as one step


def test_logged_norm_is_the_last_finite_one():
    x, y = small_data(batches=5)
    x[3 * 8 :] = np.nan
    callback, model = GradientHistogram(every_n_steps=1), compiled_model()
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[callback]).history
    norms = callback.run.series("grad_norm")[1]
    assert np.isfinite(norms).tolist() == [True, True, True, False, False]
    assert history["grad_norm"] == [norms[2]]
    history = model.fit(x[-8:], y[-8:], verbose=0, callbacks=[callback]).history
    assert np.isnan(history["grad_norm"]).tolist() == [True]  # this training has no finite one


class SeveralBatchesPerStep(keras.Sequential):
    """Takes one optimizer step every four batches."""

    batches = 0

    def train_step(self, data):
        self.batches += 1
        if self.batches % 4 == 0:
            return super().train_step(data)
        return {"loss": 0.0}


def test_records_have_the_optimizer_steps_if_a_step_takes_several_batches_and_an_epoch_without_one_has_all_keys():
    model, callback = SeveralBatchesPerStep(compiled_model().layers), LossScaleLogger(every_n_steps=10)
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    fit(model, [callback], batches=160)
    assert steps_of(callback)[0] == 2
    assert steps_of(callback)[-1] == 40
    history = fit(model, without_replays(), batches=3, epochs=2)
    assert {key: len(values) for key, values in history.items()} == dict.fromkeys({"loss"} | KEYS, 2)
    assert np.isnan(history["grad_norm"]).tolist() == [True, False]


def test_monitor_copies_a_snapshot_only_after_new_steps(monkeypatch):
    model, (monitor, *_), snapshots = compiled_model(), without_replays(every_n_steps=5), []
    snapshot = model.optimizer.snapshot
    monkeypatch.setattr(model.optimizer, "snapshot", lambda: snapshots.append(1) or snapshot())
    fit(model, [monitor], batches=20)
    assert len(snapshots) == 2 + 5  # two at the start; then steps 1, 5, 10, 15, 20, and not at the end of the epoch


def test_histogram_equals_that_of_numpy():
    model, callback = compiled_model(run_eagerly=True), GradientHistogram(every_n_steps=1)
    batches = []
    apply = model.optimizer.apply
    model.optimizer.apply = lambda grads, variables: (
        batches.append([np.array(gradient) for gradient in grads]),
        apply(grads, variables),
    )
    fit(model, [callback], batches=3)
    for histogram, gradients in zip(callback.run.histograms, batches, strict=True):
        flat = np.concatenate([gradient.ravel() for gradient in gradients])
        exponents = np.frexp(flat[flat != 0])[1] - 1
        counts = np.array([np.sum(exponents == exponent) for exponent in histogram.exponents])
        np.testing.assert_array_equal(histogram.by_exponent, counts)
        assert histogram.zeros == np.sum(flat == 0)


def test_overflows_are_counted_and_the_rate_is_since_the_last_record():
    model = compiled_model(kmp.LossScaleOptimizer("sgd", initial_scale=2.0**28))
    callback = OverflowCounter(every_n_steps=10)
    history = fit(model, [callback], epochs=2)
    total = model.optimizer.snapshot().overflow_count
    assert 5 < total < 20
    assert history["overflow_count"][-1] == total
    records = [record for record in callback.run.rows if "metrics" not in record]
    assert [record["step"] for record in records] == [1, 10, 20, 30, 40]
    assert records[1]["overflow_rate"] == (records[1]["overflow_count"] - 1) / 9
    assert max(callback.run.last("overflows_by_variable").values()) == total
    assert "overflows_by_variable" not in records[-1]  # unchanged since the record before


def test_every_epoch_has_a_histogram_of_the_chosen_variables():
    callbacks = without_replays(every_n_steps=50, variables="*/kernel")
    fit(compiled_model(), callbacks, epochs=4)
    run = callbacks[0].run
    assert [histogram.step for histogram in run.histograms] == [1, 21, 50, 61]
    assert run.series("grad_zeros")[1].tolist() == [histogram.zero_fraction for histogram in run.histograms]
    assert {name.split("/")[-1] for sample in run.samples for name in sample.names} == {"kernel"}


def test_later_callbacks_get_the_same_keys_for_every_batch_and_epoch():
    keys = []
    recorder = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: keys.append(set(logs)),
        on_epoch_end=lambda epoch, logs: keys.append(set(logs)),
    )
    fit(compiled_model(), [*without_replays(every_n_steps=7), recorder], batches=10)
    assert keys == [{"loss"} | KEYS] * 11


def test_generators_and_datasets_work():
    x, y = small_data()
    generator = (batch for batch in itertools.repeat((x[:8], y[:8])))
    data = generator, tf.data.Dataset.from_tensor_slices((x, y)).batch(8).repeat()
    model, callbacks = compiled_model(), without_replays(every_n_steps=5)
    options = {"steps_per_epoch": 12, "epochs": 2, "shuffle": False, "validation_data": (x, y), "verbose": 0}
    for source in data:
        assert set(model.fit(source, callbacks=callbacks, **options).history) >= KEYS | {"val_loss"}
    assert steps_of(callbacks[0]) == [1, 5, 10, 12, 15, 20, 24, 25, 30, 35, 36, 40, 45, 48]


def test_train_on_batch_works_with_a_callback_list():
    model, loggers = compiled_model(), without_replays(every_n_steps=2)
    x, y = small_data()
    callbacks = keras.callbacks.CallbackList(loggers, model=model)
    callbacks.on_train_begin()
    for batch in range(5):
        logs = model.train_on_batch(x[:8], y[:8], return_dict=True)
        callbacks.on_train_batch_end(batch, logs)
    callbacks.on_train_end()
    assert steps_of(loggers[0]) == [1, 2, 4]
    assert [histogram.step for histogram in loggers[0].run.histograms] == [1, 2, 4]


def test_two_histograms_with_different_every_n_steps_each_have_their_samples():
    frequent, rare = GradientHistogram(every_n_steps=4), GradientHistogram(every_n_steps=6)
    fit(compiled_model(), [frequent, rare])
    assert [histogram.step for histogram in frequent.run.histograms] == [1, 4, 8, 12, 16, 20]
    assert [histogram.step for histogram in rare.run.histograms] == [1, 6, 12, 18]


@pytest.fixture
def gan():
    gan, _ = models.gan()
    gan.compile(generator=kmp.wrap("adam"), discriminator=kmp.wrap("sgd"))
    return gan


def fit_gan(gan, callbacks):
    gan.fit(np.ones((160, 3)), np.ones((160, 6)), batch_size=8, verbose=0, callbacks=callbacks)


def test_each_optimizer_of_a_gan_is_logged_into_its_own_folder(gan, tmp_path):
    optimizers = gan.optimizers
    callbacks = [LossScaleLogger(tmp_path / name, 10, optimizer=used) for name, used in optimizers.items()]
    fit_gan(gan, callbacks)
    assert [steps_of(callback) for callback in callbacks] == [[1, 10, 20]] * 2
    shared = [LossScaleLogger(tmp_path / "one", optimizer=optimizer) for optimizer in optimizers.values()]
    with pytest.raises(ValueError, match="`log_dir` is in use for another optimizer"):
        fit_gan(gan, shared)


def test_callbacks_warn_if_their_optimizer_takes_no_step(gan):
    with pytest.warns(UserWarning, match="took no step") as caught:
        fit_gan(gan, [LossScaleLogger(), *without_replays(every_n_steps=2)])
    assert any("LossScaleLogger: the optimizer it reads took no step" in str(each.message) for each in caught)
    assert [optimizer.snapshot().step for optimizer in gan.optimizers.values()] == [20, 20]


def test_callbacks_reused_for_another_model_read_only_that_model(tmp_path):
    callbacks = without_replays(tmp_path, every_n_steps=5)
    fit(compiled_model(kmp.LossScaleOptimizer("sgd", initial_scale=64.0)), callbacks, epochs=2)
    second = compiled_model(kmp.LossScaleOptimizer("sgd", initial_scale=128.0))
    fit(second, callbacks)
    for run in (callbacks[0].run, kmp.load_run(tmp_path)):
        assert run.series("loss_scale")[0].tolist() == [1, 5, 10, 15, 20]
        assert set(run.series("loss_scale")[1]) == {128.0}
        assert list(run.metrics) == ["learning_rate", "loss"]
    fit(second, callbacks)
    assert steps_of(callbacks[0]) == [1, 5, 10, 15, 20, 21, 25, 30, 35, 40]


def test_interrupted_training_keeps_no_reference_to_the_optimizer(tmp_path):
    model = compiled_model()
    with pytest.raises(KeyboardInterrupt):
        fit(model, [*without_replays(tmp_path, every_n_steps=2), Interrupt()])
    optimizer = weakref.ref(model.optimizer)
    del model
    keras.backend.clear_session()
    gc.collect()
    assert optimizer() is None


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_model_that_needs_no_loss_scale_trains_without_records_and_this_is_logged_once(policy, tmp_path, caplog):
    kmp.enable(policy)
    model = compiled_model()
    shared = without_replays(tmp_path, report=tmp_path / "r.html")
    single = [callback() for callback in (*LOGGERS, StuckDetector)]
    for callbacks in (shared, [*single, Report(tmp_path / "single.html", single[0].run)]):
        assert set(fit(model, callbacks, batches=2)) == {"loss"}
        assert callbacks[0].run.rows == []
    messages = [record.getMessage() for record in caplog.records if "nothing to read" in record.getMessage()]
    assert len(messages) == 1
    assert f"is keras's SGD. The model computes in {'bfloat16' if policy != 'float32' else policy}" in messages[0]
    assert "kmp.wrap(optimizer, loss_scale=1.0)" in messages[0]
    assert list(tmp_path.iterdir()) == []


def test_model_that_needs_no_loss_scale_has_records_with_a_wrapped_optimizer():
    kmp.enable("float32")
    callbacks = without_replays()
    history = fit(compiled_model(kmp.wrap("sgd", loss_scale=1.0)), callbacks)
    assert history["loss_scale"] == [1.0]
    assert [sample.step for sample in callbacks[0].run.samples] == [1]


def test_callbacks_reused_for_a_model_without_records_drop_those_of_the_first_model_and_release_its_log(tmp_path):
    callbacks = without_replays(tmp_path, every_n_steps=5)
    with pytest.raises(KeyboardInterrupt):
        fit(compiled_model(), [*callbacks, Interrupt()])
    assert callbacks[0].run.rows
    assert is_locked(tmp_path)
    kmp.enable("float32")
    fit(compiled_model(), callbacks, batches=2)
    assert (callbacks[0].run.rows, callbacks[0].run.header) == ([], {})
    assert not is_locked(tmp_path)


@pytest.mark.filterwarnings("ignore:.*trains without kmp's loss scale")
def test_error_for_a_float16_model_says_how_to_add_a_loss_scale_optimizer():
    model = compiled_model(auto_scale_loss=False)
    with pytest.raises(ValueError, match=r"computes in float16 and float32\. Compile the model after kmp.enable\(\)"):
        fit(model, without_replays())


@pytest.mark.parametrize(
    ("make", "arguments", "match"),
    [
        (defaults, {"every_n_steps": 0}, "`every_n_steps` must be.*every_n_steps=0"),
        (LossScaleLogger, {"every_n_steps": 1.5}, "every_n_steps=1.5"),
        (OverflowCounter, {"every_n_steps": float("nan")}, "every_n_steps=nan"),
        (GradientHistogram, {"every_n_steps": True}, "every_n_steps=True"),
        (defaults, {"every_n_steps": 2**70}, "`every_n_steps` must be"),
        (LossScaleLogger, {"log_dir": 3}, "`log_dir` must be.*log_dir=3"),
        (OverflowCounter, {"log_dir": ""}, "`log_dir` must be the path of a local folder"),
        (GradientHistogram, {"log_dir": "gs://bucket/x"}, "gs://bucket/x"),
        (defaults, {"log_dir": "a\0b"}, "`log_dir` must be"),
        (Monitor, {"optimizer": keras.optimizers.SGD()}, "`optimizer` must be"),
        (defaults, {"variables": 3}, "`variables` must be"),
        *((defaults, {"reference": reference}, "`reference` must be") for reference in (1, "batch", (1,))),
        (defaults, {"float32_fallback": 3}, "`float32_fallback` must be"),
        *((defaults, {"report": report}, "`report` must be") for report in (3, "report.pdf")),
    ],
)
def test_invalid_argument_raises_an_error_that_names_it(make, arguments, match):
    with pytest.raises((ValueError, TypeError), match=match):
        make(**arguments)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda callbacks: pickle.loads(pickle.dumps(callbacks))])
def test_copied_or_unpickled_callbacks_work_together(copied, monkeypatch):
    written = []
    monkeypatch.setattr(kmp.report, "write", lambda runs, path: written.extend(runs.values()))
    originals = without_replays(every_n_steps=1000, report="r.html")
    callbacks = copied(originals)
    x, y = small_data(batches=110)
    with pytest.raises(StuckError):
        compiled_model().fit(x * np.nan, y, batch_size=8, verbose=0, callbacks=callbacks)
    assert [id(run) for run in written] == [id(callbacks[0].run)]
    assert written[0].last("overflows_in_a_row") == 100  # the loggers read once more before the error
    assert originals[0].run.rows == []


def test_records_are_in_order_after_a_skipped_first_step(enabled):
    x, y = small_data()
    x[0] = np.nan
    callbacks = without_replays(every_n_steps=5)
    compiled_model().fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=callbacks)
    run = callbacks[0].run
    steps = [row["step"] for row in run.rows if not {"replay", "metrics"} & row.keys()]
    # The first sample is not finite, so the next step is sampled too.
    assert steps == [1, 2, 5, 10, 15, 20]
    assert [bool(np.isnan(sample.update_norm).all()) for sample in run.samples] == [True, *[False] * 5]


@pytest.mark.filterwarnings("ignore:.*quantize")  # of Keras, for the first layer
def test_scales_that_keras_overwrites_with_their_gradient_are_not_sampled():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, kernel_initializer="zeros")])
    model.quantize("float8")
    model.compile("sgd", "mse")
    callback = GradientHistogram()
    x = np.random.default_rng(0).normal(0.0, 1000.0, (64, 8))
    history = model.fit(x, np.zeros((64, 4)), verbose=0, callbacks=[callback]).history
    assert history["grad_norm"] == [0.0]
    assert {name.split("/")[-1] for name in callback.run.samples[0].names} == {"kernel", "bias"}
