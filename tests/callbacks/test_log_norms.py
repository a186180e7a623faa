import csv
import math

import keras
import numpy as np
import pytest
from conftest import compiled_model, fit, fit_data, sequential, small_data
from keras import layers

import kmp
from kmp.callbacks import Monitor, defaults

pytestmark = pytest.mark.usefixtures("enabled")


def keys_of(history):
    return [key for key in history if key.startswith("grad_norm/")]


def test_norms_of_the_last_sample_are_in_logs_by_layer():
    model = sequential(layers.Dense(3), layers.Dense(2, name="head"), run_eagerly=True)
    (monitor,) = defaults(every_n_steps=10, replay=False, log_norms=True)
    x, _ = small_data(20)
    history = model.fit(
        x, np.ones((160, 2)), batch_size=8, epochs=2, verbose=0, callbacks=[monitor]
    ).history
    keys = keys_of(history)
    # Keras numbers unnamed layers over all models of the process; these names do not depend on it.
    assert [key.split("/", 1)[1].replace("sequential/", "") for key in keys] == ["dense", "head"]
    samples = {sample.step: sample.by_layer() for sample in monitor.run.samples}
    for epoch, step in enumerate((20, 40)):
        norms = [history[key][epoch] for key in keys]
        assert norms == samples[step].norm.tolist()
        assert math.hypot(*norms) == pytest.approx(history["grad_norm"][epoch])
    assert not any(key.startswith("grad_norm/") for key in monitor.run.metrics)


def test_every_row_of_csv_logger_has_them_if_the_first_step_builds_the_model(tmp_path):
    model = keras.Sequential([layers.Dense(4), layers.Dense(2), kmp.layers.Softmax()])
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    seen = []
    batches = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(keys_of(logs))
    )
    logger = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    fit(model, [Monitor(replay=False, log_norms=True), logger, batches], epochs=2)
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    keys = [key for key in rows[0] if key.startswith("grad_norm/")]
    assert len(keys) == 2
    assert all(float(row[key]) > 0 for row in rows for key in keys)
    assert [sorted(each) for each in seen] == [keys] * 40


def test_norm_is_nan_until_a_sample_is_finite():
    with kmp.enable(loss_scale=2.0**100):
        model = compiled_model(run_eagerly=True)
    history = fit(model, [Monitor(replay=False, log_norms=True)], batches=4)
    assert np.isnan([history[key] for key in ("grad_norm", *keys_of(history))]).all()
    assert len(keys_of(history)) == 2


def test_norms_are_those_of_the_last_sample_that_is_finite():
    model = compiled_model(run_eagerly=True)
    x, y = small_data(6)
    x[-8:] = np.nan  # the last batch
    monitor = Monitor(every_n_steps=1, replay=False, log_norms=True)
    history = fit_data(model, (x, y), [monitor])
    samples = [sample.by_layer().norm.tolist() for sample in monitor.run.samples]
    assert len(samples) == 6
    assert [history[key][-1] for key in keys_of(history)] == samples[-2]


def test_variables_choose_the_layers():
    model = compiled_model(run_eagerly=True)
    first, _ = model.layers[:2]
    monitor = Monitor(replay=False, log_norms=True, variables=first.kernel.path)
    history = fit(model, [monitor], batches=4)
    (key,) = keys_of(history)
    sample = monitor.run.samples[-1]
    assert history[key] == sample.norm.tolist()
    assert sample.names == (first.kernel.path,)
    assert keys_of(fit(model, [Monitor(replay=False)], batches=4)) == []
