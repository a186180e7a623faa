import os

import pytest

from kmp_bench import environment_variables, models
from kmp_bench.environment_variables import NAMES, PERSISTENT, THREADS


def rates_by_variables():
    """Runs in a new process in place of the training."""
    return [100.0 + 10 * sum(name in os.environ for name in NAMES)] * 2


@pytest.mark.exhaustive
def test_each_setting_reaches_its_own_process(monkeypatch):
    monkeypatch.setenv("TF_GPU_THREAD_MODE", "global")
    monkeypatch.setattr(environment_variables, "images_per_second", rates_by_variables)
    measured = environment_variables.measure_environment()
    assert [result.value for result in measured] == [100.0, 120.0, 110.0, 130.0]
    everything = " ".join(f"{name}={value}" for name, value in (THREADS | PERSISTENT).items())
    assert environment_variables.fastest_setting(measured).variant == everything
    assert os.environ["TF_GPU_THREAD_MODE"] == "global"
    assert "TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT" not in os.environ


@pytest.mark.filterwarnings("ignore:.*float16")
def test_rates_are_those_of_blocks_of_a_training(monkeypatch):
    monkeypatch.setattr(models, "convolutional", lambda channels, batch: models.mlp(16, 8))
    rates = environment_variables.images_per_second()
    assert len(rates) == 5
    assert all(rate > 0 for rate in rates)
