import fit_time
import pytest

from kmp_bench.models import BARE, mlp


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(fit_time, "MODELS", {"tiny": (mlp, 4)})


def test_first_epochs_are_measured_after_a_warmup_of_each_variant(monkeypatch):
    trained = []

    def training(name, variant, mode, steps, folder):
        return lambda epochs: trained.append((variant, steps, epochs)) or (steps, 0)

    monkeypatch.setattr(fit_time, "training", training)
    assert fit_time.first_epochs("tiny", "graph", 7) == dict.fromkeys(fit_time.VARIANTS, 7)
    assert trained == [(variant, steps, 1) for steps in (2, 7) for variant in fit_time.VARIANTS]


def test_last_epoch_is_the_second_of_two(monkeypatch, tmp_path):
    clock = iter([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    train = fit_time.training("tiny", BARE, "graph", 3, str(tmp_path))
    monkeypatch.setattr(fit_time.time, "process_time", lambda: next(clock))
    assert train(epochs=2) == (31.0, 8.0)
