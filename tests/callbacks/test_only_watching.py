"""Whatever fails in the watching ends the watching, with a warning, and not the training."""

import warnings

import numpy as np
import pytest
from conftest import compiled_model, fit, small_data
from msgspec import UNSET

from kmp.callbacks import Monitor

pytestmark = pytest.mark.usefixtures("enabled")


def fails(*_, **__):
    raise RuntimeError("no")


def test_failure_in_the_middle_of_a_training_is_a_warning(monkeypatch):
    model = compiled_model(run_eagerly=True)
    monkeypatch.setattr(model.optimizer, "snapshot", fails)
    with pytest.warns(UserWarning, match="Monitor stops: RuntimeError: no. The training contin"):
        history = fit(model, [Monitor(replay=False)], batches=4)
    assert np.isfinite(history["loss"]).all()


def test_failure_at_the_beginning_of_a_later_training_is_a_warning(monkeypatch):
    model, monitor = compiled_model(run_eagerly=True), Monitor(replay=False)
    fit(model, [monitor], batches=2)
    monkeypatch.setattr(model.optimizer.counters, "read_counts", fails)
    with pytest.warns(UserWarning, match="Monitor stops: RuntimeError: no"):
        fit(model, [monitor], batches=2)
    assert model.optimizer.iterations.numpy() == 4


def test_warning_of_another_package_that_is_an_error_does_not_end_the_training():
    x, y = small_data(12)
    model = compiled_model(run_eagerly=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        with pytest.warns(UserWarning, match="Training is stuck"):
            model.fit(
                x * np.nan,
                y,
                batch_size=8,
                verbose=0,
                callbacks=[Monitor(replay=False, patience=5, on_nonfinite="warn")],
            )


def test_training_that_stays_stuck_is_not_recorded_in_each_batch():
    x, y = small_data(200)
    model = compiled_model()
    monitor = Monitor(every_n_steps=50, patience=10, on_nonfinite="ignore")
    model.fit(x * np.nan, y, batch_size=8, verbose=0, callbacks=[monitor])
    assert len([row for row in monitor.run.rows if row.overflow_count is not UNSET]) < 50
