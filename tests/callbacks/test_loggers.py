import copy
import gc
import os
import pickle
import weakref
from pathlib import Path

import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from conftest import MODES, Interrupt, compiled_model, fit, is_locked, small_data, without_replays

import kmp
from kmp.callbacks import (
    GradientHistogram,
    LossScaleLogger,
    Monitor,
    OverflowCounter,
    StuckError,
    defaults,
)
from kmp.records import Header, Record

pytestmark = pytest.mark.usefixtures("enabled")

KEYS = {"loss_scale", "overflow_count", "grad_norm"}


def steps_of(callback):
    return callback.run.series("loss_scale")[0].tolist()


# The other tests run in graph mode or eagerly.
@pytest.mark.parametrize(
    "mode", [pytest.param("xla", marks=pytest.mark.exhaustive), "steps_per_execution"]
)
def test_training_is_recorded_and_unchanged(mode):
    weights, callbacks = [], without_replays(every_n_steps=10)
    for used in ([], callbacks):
        keras.utils.set_random_seed(0)
        model = compiled_model(**MODES[mode])
        history = fit(model, used, batches=21, epochs=2)
        weights.append(model.get_weights())
    np.testing.assert_equal(*weights)
    assert {key: len(values) for key, values in history.items()} == dict.fromkeys(
        {"loss"} | KEYS, 2
    )
    assert history["loss_scale"] == [2.0**15] * 2
    # Records follow the optimizer's step counter.
    recorded, sampled = [1, 2, 4, 8, 10, 20, 21, 30, 40, 42], [1, 2, 4, 8, 10, 20, 30, 40]
    if mode == "steps_per_execution":
        recorded, sampled = [8, 16, 21, 37, 42], [1, 10, 20, 30, 40]
    assert steps_of(callbacks[0]) == recorded
    histograms = callbacks[0].run.histograms
    assert [histogram.step for histogram in histograms] == sampled
    sizes = sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)
    assert {(histogram.total, histogram.loss_scale) for histogram in histograms} == {
        (sizes, 2.0**15)
    }


@pytest.mark.parametrize(
    ("steps", "sampled", "verdict"),
    [
        (12, [1, 2, 4, 8], "float16 does not hurt this run: in"),
        (3, [1, 2], "It is not known whether float16 hurts this run. Measured: in 2 batches"),
    ],
)
def test_short_training_is_sampled_each_time_its_steps_have_doubled(steps, sampled, verdict):
    callbacks = defaults()
    fit(compiled_model(run_eagerly=True), callbacks, batches=steps)
    run = callbacks[0].run
    assert [sample.step for sample in run.samples] == sampled
    assert all(sample.has_update for sample in run.samples)
    advice = kmp.advise(run)
    assert advice.verdict.startswith(verdict)
    is_too_short = "only 2 finite samples in 3 steps; to find out: a longer run" in advice.verdict
    assert is_too_short == (steps == 3)


def test_only_a_training_with_the_callback_is_sampled():
    model, histogram, sampled = (
        compiled_model(),
        GradientHistogram(every_n_steps=200),
        [],
    )
    fit(model, [], batches=8)
    for used in ([histogram], [], [histogram]):
        fit(model, used, batches=8)
        sampled.append(model.optimizer.snapshot().sample.step)
    assert sampled == [16, 16, 25]
    assert [each.step for each in histogram.run.histograms] == [9, 10, 12, 16, 25]


class SeveralStepsPerBatch(keras.Sequential):
    def train_step(self, data):
        for _ in range(2):
            logs = super().train_step(data)
        return logs


def test_records_have_the_optimizer_steps_if_a_batch_takes_several():
    model, callback = (
        SeveralStepsPerBatch(compiled_model().layers),
        LossScaleLogger(every_n_steps=6),
    )
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    fit(model, [callback], batches=12)
    # Between two reads, each batch counts as one step.
    assert steps_of(callback) == [2, 6, 18, 24]


def test_logged_norm_is_the_last_finite_one():
    x, y = small_data(batches=5)
    x[3 * 8 :] = np.nan
    callback, model = (
        GradientHistogram(every_n_steps=1),
        compiled_model(run_eagerly=True),
    )
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[callback]).history
    norms = callback.run.series("grad_norm")[1]
    assert np.isfinite(norms).tolist() == [True, True, True, False, False]
    assert history["grad_norm"] == [norms[2]]
    history = model.fit(x[-8:], y[-8:], verbose=0, callbacks=[callback]).history
    assert np.isnan(history["grad_norm"]).tolist() == [True]  # this training has no finite one


class SeveralBatchesPerStep(keras.Sequential):
    batches = 0

    def train_step(self, data):
        self.batches += 1
        if self.batches % 4 == 0:
            return super().train_step(data)
        return {"loss": 0.0}


def test_steps_of_several_batches_are_counted_and_an_epoch_without_one_has_all_keys():
    model, callback = (
        SeveralBatchesPerStep(compiled_model().layers),
        LossScaleLogger(every_n_steps=10),
    )
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    fit(model, [callback], batches=24)
    assert steps_of(callback) == [1, 2, 3, 4, 5, 6]
    history = fit(model, without_replays(), batches=3, epochs=2)
    assert {key: len(values) for key, values in history.items()} == dict.fromkeys(
        {"loss"} | KEYS, 2
    )
    assert np.isnan(history["grad_norm"]).tolist() == [True, False]


def test_monitor_copies_a_snapshot_only_after_new_steps(monkeypatch):
    model, (monitor, *_), snapshots = (
        compiled_model(run_eagerly=True),
        without_replays(every_n_steps=5),
        [],
    )
    snapshot = model.optimizer.snapshot
    monkeypatch.setattr(model.optimizer, "snapshot", lambda: snapshots.append(1) or snapshot())
    fit(model, [monitor], batches=10)
    # Two at the start; then steps 1, 2, 4, 5, 10, and not at the end of the epoch.
    assert len(snapshots) == 2 + 5


def test_overflows_are_counted_and_the_rate_is_since_the_last_record():
    model = compiled_model(kmp.LossScaleOptimizer("sgd", initial_scale=2.0**28))
    callback = OverflowCounter(every_n_steps=10)
    history = fit(model, [callback], epochs=2)
    total = model.optimizer.snapshot().overflow_count
    assert 5 < total < 20
    assert history["overflow_count"][-1] == total
    records = [record for record in callback.run.rows if not record.metrics]
    assert [record.step for record in records] == [1, 2, 4, 8, 10, 20, 30, 40]
    fourth, eighth = records[2:4]
    new = eighth.overflow_count - fourth.overflow_count
    assert eighth.overflow_rate == new / 4 > 0


def test_every_epoch_has_a_histogram_of_the_chosen_variables():
    callbacks = without_replays(every_n_steps=10, variables="*/kernel")
    fit(compiled_model(run_eagerly=True), callbacks, batches=4, epochs=4)
    run = callbacks[0].run
    assert [histogram.step for histogram in run.histograms] == [1, 2, 4, 5, 8, 10, 13]
    assert run.series("grad_zeros")[1].tolist() == [
        histogram.zero_fraction for histogram in run.histograms
    ]
    assert {name.split("/")[-1] for sample in run.samples for name in sample.names} == {"kernel"}


def test_later_callbacks_get_the_same_keys_for_every_batch_and_epoch():
    keys = []
    recorder = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: keys.append(set(logs)),
        on_epoch_end=lambda epoch, logs: keys.append(set(logs)),
    )
    fit(compiled_model(run_eagerly=True), [*without_replays(every_n_steps=3), recorder], batches=4)
    assert keys == [{"loss"} | KEYS] * 5


def test_callbacks_listed_before_the_monitor_get_its_keys_too(tmp_path):
    table = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    best = keras.callbacks.ModelCheckpoint(
        tmp_path / "best.weights.h5",
        "loss_scale",
        mode="max",
        save_weights_only=True,
        save_best_only=True,
    )
    x, y = small_data(2)
    model = compiled_model(run_eagerly=True)
    model.fit(x, y, 8, 1, 0, [table, best, *without_replays()])
    assert set((tmp_path / "log.csv").read_text().splitlines()[0].split(",")) >= KEYS
    assert (tmp_path / "best.weights.h5").exists()


def test_train_on_batch_works_with_a_callback_list():
    model, loggers = compiled_model(run_eagerly=True), without_replays(every_n_steps=2)
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
    frequent, rare = (GradientHistogram(every_n_steps=number) for number in (2, 3))
    fit(compiled_model(run_eagerly=True), [frequent, rare], batches=10)
    assert [histogram.step for histogram in frequent.run.histograms] == [1, 2, 4, 6, 8, 10]
    assert [histogram.step for histogram in rare.run.histograms] == [1, 2, 3, 6, 9]


@pytest.fixture
def gan():
    gan, _ = models.gan()
    gan.compile(generator=kmp.wrap("adam"), discriminator=kmp.wrap("sgd"))
    gan.run_eagerly = True
    return gan


def fit_gan(gan, callbacks):
    gan.fit(np.ones((80, 3)), np.ones((80, 6)), batch_size=8, verbose=0, callbacks=callbacks)


def test_each_optimizer_of_a_gan_is_logged_into_its_own_folder(gan, tmp_path):
    optimizers = gan.optimizers
    callbacks = [
        LossScaleLogger(tmp_path / name, 10, optimizer=used) for name, used in optimizers.items()
    ]
    fit_gan(gan, callbacks)
    assert [steps_of(callback) for callback in callbacks] == [[1, 2, 4, 8, 10]] * 2
    shared = [
        LossScaleLogger(tmp_path / "one", optimizer=optimizer) for optimizer in optimizers.values()
    ]
    with pytest.raises(
        ValueError, match="`log_dir` is in use by another callback.*each optimizer its own folder"
    ):
        fit_gan(gan, shared)


def test_callbacks_warn_if_their_optimizer_takes_no_step(gan):
    other = kmp.wrap("sgd")
    with pytest.warns(UserWarning, match="LossScaleLogger: the optimizer it reads took no step"):
        fit_gan(gan, [LossScaleLogger(optimizer=other), *without_replays(every_n_steps=2)])
    assert [optimizer.snapshot().step for optimizer in gan.optimizers.values()] == [10, 10]


def test_reused_callbacks_read_only_the_last_model_and_release_the_log_for_one_without_records(
    tmp_path,
):
    callbacks, options = without_replays(tmp_path, every_n_steps=2), {"run_eagerly": True}
    fit(
        compiled_model(kmp.LossScaleOptimizer("sgd", initial_scale=64.0), **options),
        callbacks,
        batches=8,
    )
    second = compiled_model(kmp.LossScaleOptimizer("sgd", initial_scale=128.0), **options)
    fit(second, callbacks, batches=4)
    for run in (callbacks[0].run, kmp.load_run(tmp_path)):
        assert run.series("loss_scale")[0].tolist() == [1, 2, 4]
        assert set(run.series("loss_scale")[1]) == {128.0}
        assert list(run.metrics) == ["learning_rate", "loss"]
    with pytest.raises(KeyboardInterrupt):
        fit(second, [*callbacks, Interrupt()])
    assert steps_of(callbacks[0]) == [1, 2, 4, 5, 6, 8, 10]
    assert is_locked(tmp_path)
    kmp.disable()
    keras.config.set_dtype_policy("float32")
    fit(compiled_model(run_eagerly=True), callbacks, batches=2)
    assert (callbacks[0].run.rows, callbacks[0].run.header) == ([], Header())
    assert not is_locked(tmp_path)


def test_interrupted_training_keeps_no_reference_to_the_optimizer(tmp_path):
    model = compiled_model()
    with pytest.raises(KeyboardInterrupt):
        fit(model, [*without_replays(tmp_path, every_n_steps=2), Interrupt()])
    optimizer = weakref.ref(model.optimizer)
    del model
    keras.backend.clear_session()
    gc.collect()
    assert optimizer() is None
    # Closes those of the first.
    fit(compiled_model(run_eagerly=True), [LossScaleLogger(tmp_path / "next")], batches=1)
    assert str(tmp_path / "kmp.jsonl") not in {
        os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()
    }


def test_model_that_was_not_compiled_under_enable_has_records_if_it_is_wrapped(tmp_path, caplog):
    kmp.disable()
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = compiled_model(run_eagerly=True)
    shared = without_replays(tmp_path, report=tmp_path / "r.html")
    single = [callback() for callback in (LossScaleLogger, OverflowCounter, GradientHistogram)]
    for callbacks in (shared, single):
        assert set(fit(model, callbacks, batches=2)) == {"loss"}
        assert callbacks[0].run.rows == []
    (message,) = [
        record.getMessage() for record in caplog.records if "nothing to read" in record.getMessage()
    ]
    assert "is keras's SGD. The model computes in bfloat16" in message
    assert message.endswith("model.compile(kmp.wrap('adam'), ...)")
    assert list(tmp_path.iterdir()) == []
    callbacks = without_replays()
    history = fit(compiled_model(kmp.wrap("sgd"), run_eagerly=True), callbacks, batches=2)
    assert history["loss_scale"] == [1.0]
    assert [sample.step for sample in callbacks[0].run.samples] == [1, 2]


def test_report_over_a_file_of_the_user_is_an_error_before_the_training(tmp_path):
    file = tmp_path / "report.html"
    file.write_text("mine")
    model = compiled_model(run_eagerly=True)
    with pytest.raises(FileExistsError, match="not a report of kmp.*name another one: `report`"):
        fit(model, without_replays(report=file), batches=1)
    assert int(model.optimizer.iterations) == 0
    with pytest.raises(FileExistsError, match="not a report of kmp.*name another one: `path`"):
        kmp.report.write({"first": kmp.records.Run([Record(step=1)])}, file)
    assert file.read_text() == "mine"


@pytest.mark.filterwarnings("ignore:.*trains without kmp's loss scale")
def test_error_for_a_float16_model_says_how_to_add_a_loss_scale_optimizer():
    model = compiled_model(auto_scale_loss=False)
    with pytest.raises(
        ValueError,
        match=r"computes in float16 and float32\. Compile the model after kmp.enable\(\)",
    ):
        fit(model, without_replays())


@pytest.mark.parametrize(
    ("make", "arguments", "match"),
    [
        (LossScaleLogger, {"every_n_steps": 0}, "`every_n_steps` must be.*every_n_steps=0"),
        (defaults, {"log_dir": "a\0b"}, "`log_dir` must be the path of a local folder"),
        (Monitor, {"optimizer": keras.optimizers.SGD()}, "`optimizer` must be"),
        (defaults, {"variables": 3}, "`variables` must be"),
        *(
            (defaults, {name: "auto"}, f"`{name}` must be True or False")
            for name in ("replay", "repair")
        ),
        (defaults, {"report": "report.pdf"}, "`report` must be"),
    ],
)
def test_invalid_argument_raises_an_error_that_names_it(make, arguments, match):
    with pytest.raises((ValueError, TypeError), match=match):
        make(**arguments)


def test_copied_and_unpickled_callbacks_have_the_records_and_work_together(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(kmp.report, "write", lambda runs, path: written.extend(runs.values()))
    originals = [Monitor(every_n_steps=1000, patience=10, report=tmp_path / "r.html")]
    fit(compiled_model(run_eagerly=True), originals, batches=2)
    before = originals[0].run.replays
    (monitor,) = callbacks = pickle.loads(pickle.dumps(copy.deepcopy(originals)))
    assert monitor.run.replays == before
    x, y = small_data(batches=12)
    with pytest.raises(StuckError):
        compiled_model(run_eagerly=True).fit(
            x * np.nan, y, batch_size=8, verbose=0, callbacks=callbacks
        )
    assert written[-1] is monitor.run
    # The monitor reads once more before the error.
    assert monitor.run.last("overflows_in_a_row") == 10
    assert monitor.run.replays[-1][1].batch.nonfinite
    assert originals[0].run.replays == before


def test_records_are_in_order_after_a_skipped_first_step():
    x, y = small_data(10)
    x[0] = np.nan
    callbacks = without_replays(every_n_steps=5)
    model = compiled_model(run_eagerly=True)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=callbacks)
    run = callbacks[0].run
    steps = [row.step for row in run.rows if not row.metrics]
    # The first sample is not finite, so the next step is sampled too.
    assert steps == [1, 2, 4, 5, 10]
    assert [bool(np.isnan(sample.update_norm).all()) for sample in run.samples] == [
        True,
        *[False] * 4,
    ]


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


def test_loop_whose_step_was_traced_before_the_training_began_warns_that_it_samples_nothing():
    model = compiled_model(kmp.wrap("sgd"))
    x, y = small_data(1)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            scaled_loss = model.optimizer.scale_loss(model.compute_loss(x, y, model(x)))
        model.optimizer.apply(
            tape.gradient(scaled_loss, model.trainable_variables), model.trainable_variables
        )

    step()
    histogram = GradientHistogram()
    histogram.set_model(model)
    histogram.on_train_begin()
    histogram.on_train_batch_begin(0)
    step()
    histogram.on_train_batch_end(0)
    with pytest.warns(
        UserWarning, match=r"no gradients were sampled.*tf\.function\(step\.python_function\)"
    ):
        histogram.on_train_end()
