import fit_time
import pytest

from kmp.bench.models import BARE, mlp


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(fit_time, "MODELS", {"tiny": (mlp, 4)})


def test_first_epochs_are_measured_after_a_warmup_of_each_variant(monkeypatch):
    trained = []

    def training(name, variant, mode, steps, folder):
        return lambda: trained.append((variant, steps)) or (steps, 2 * steps)

    monkeypatch.setattr(fit_time, "training", training)
    assert fit_time.first_epochs("tiny", "graph", 7) == dict.fromkeys(fit_time.VARIANTS, (7, 14))
    assert trained == [(variant, steps) for steps in (2, 7) for variant in fit_time.VARIANTS]


def test_seconds_of_later_epochs_are_per_step_relative_to_keras():
    usage = {"Keras": [(10.0, 20.0)], "kmp": [(15.0, 30.0)]}
    cpu, wall = fit_time.comparisons("step", "tiny", "graph", usage, per=10)
    found = [(result.value, result.ratio) for result in (*cpu, *wall)]
    assert found == [(1.0, None), (1.5, 1.5), (2.0, None), (3.0, 1.5)]


def test_later_epoch_is_the_second_of_its_training(monkeypatch, tmp_path):
    clock = iter(range(100))
    monkeypatch.setattr(fit_time, "now", lambda: (float(next(clock)),) * 2)
    usage = fit_time.later_epoch("tiny", BARE, "graph", 3, str(tmp_path))()
    assert usage == (1.0, 1.0)  # the clock is read twice in a row, in the second epoch
