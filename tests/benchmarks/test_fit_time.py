import weakref
from pathlib import Path

import pytest

from kmp.bench import fit_time, runner, small_models
from kmp.bench.fit_time import Usage
from kmp.bench.optimizer_step import BARE, KERAS, OURS
from kmp.bench.small_models import WITH_CALLBACKS


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(fit_time.TASKS, "tiny", lambda: small_models.mlp(4))


@pytest.mark.usefixtures("tiny")
def test_first_epochs_take_seconds_and_later_ones_seconds_per_step_relative_to_keras(monkeypatch):
    trained = []
    seconds = {KERAS: 1.0, OURS: 1.5, WITH_CALLBACKS: 2.0, BARE: 0.5}

    def later_epoch(model, task, steps, callbacks):
        name = WITH_CALLBACKS if callbacks else model
        return lambda: trained.append(name) or Usage(seconds[name] * steps, 2 * seconds[name] * steps)

    def run_in_subprocess(call):
        assert call == "fit_time.first_epochs('tiny', 'graph', 10)"
        return {name: [10 * own, 20 * own] for name, own in seconds.items()}

    monkeypatch.setattr(fit_time, "_later_epoch", later_epoch)
    monkeypatch.setattr(fit_time, "compiled_model", lambda task, policy, variant, mode: variant)
    comparisons = list(fit_time.measure(["tiny"], ["graph"], 10, 2, run_in_subprocess))
    assert {
        results[0].section: {result.variant: (result.value, result.ratio) for result in results}
        for results in comparisons
    } == {
        section: {name: (per * own, None if name == KERAS else own) for name, own in seconds.items()}
        for section, per in (
            ("first epoch: CPU time", 10),
            ("first epoch: wall time", 20),
            ("step of `fit`: CPU time", 1),
            ("step of `fit`: wall time", 2),
        )
    }
    assert {(result.case, result.mode) for results in comparisons for result in results} == {
        ("tiny, 10 steps", "graph")
    }
    assert trained == list(seconds) * 3  # a warm-up round, and two rounds


@pytest.mark.usefixtures("tiny")
def test_first_epochs_are_measured_after_a_warmup_of_each_variant(monkeypatch):
    trained = []

    def first_epoch(task, variant, mode, steps):
        trained.append((variant, steps))
        return Usage(steps, 2 * steps)

    monkeypatch.setattr(fit_time, "first_epoch", first_epoch)
    measured = fit_time.first_epochs("tiny", "graph", 7)
    assert trained == [(variant, steps) for steps in (2, 7) for variant in fit_time.VARIANTS]
    assert measured == dict.fromkeys(fit_time.VARIANTS, (7, 14))


@pytest.mark.slow
def test_first_epochs_run_in_a_new_process():
    measured = runner._run_in_subprocess("fit_time.first_epochs('MLP of width 128', 'graph', 3)")
    assert list(measured) == list(fit_time.VARIANTS)
    assert all(seconds > 0 for usage in measured.values() for seconds in usage)


def test_epoch_continues_the_training_of_its_model():
    task = small_models.mlp(4)
    model = small_models.compiled_model(task, "float32", OURS, "graph")
    train = fit_time.epoch(model, task, 3)
    for steps in (3, 6):
        usage = train()
        assert int(model.optimizer.iterations.numpy()) == steps
        assert usage.cpu > 0
        assert usage.wall > 0


def test_only_one_variant_has_callbacks(tmp_path):
    with_callbacks = [name for name in fit_time.VARIANTS if fit_time._callbacks(name, str(tmp_path))]
    assert with_callbacks == [WITH_CALLBACKS]


def test_model_and_log_of_a_first_epoch_are_freed(monkeypatch):
    models, folders = [], []
    compiled_model, make_callbacks = fit_time.compiled_model, fit_time._callbacks

    def recorded(*arguments):
        model = compiled_model(*arguments)
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr(fit_time, "compiled_model", recorded)
    monkeypatch.setattr(fit_time, "_callbacks", lambda name, log: folders.append(log) or make_callbacks(name, log))
    fit_time.first_epoch(small_models.mlp(4), WITH_CALLBACKS, "graph", 2)
    assert [model() for model in models] == [None]
    assert [Path(folder).exists() for folder in folders] == [False]


def test_later_epoch_is_the_second_of_its_training(monkeypatch):
    task, clock = small_models.mlp(4), iter(range(100))
    monkeypatch.setattr(fit_time, "_now", lambda: Usage(*[float(next(clock))] * 2))
    model = small_models.compiled_model(task, "float32", BARE, "graph")
    usage = fit_time._later_epoch(model, task, 3, [])()
    assert int(model.optimizer.iterations.numpy()) == 6
    assert usage == Usage(1.0, 1.0)  # two readings of the clock in a row, those of the second epoch
