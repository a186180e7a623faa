import pytest
import training_cost
from measuring import WITH_CALLBACKS

from kmp.bench.models import OURS, mlp


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(training_cost, "MODELS", {"tiny": (mlp, 4)})


@pytest.mark.parametrize("variant", [OURS, WITH_CALLBACKS])
def test_training_takes_cpu_time_and_wall_time(variant):
    cpu, wall = training_cost.seconds_of_training("tiny", 2, variant)
    assert cpu > 0
    assert wall > 0


def test_each_length_has_a_comparison_in_both_times(monkeypatch):
    rates = {"steps_per_second": 20.0}
    trained = []

    def in_new_process(function, *arguments):
        trained.append(arguments)
        return rates.get(function.__name__, (2.0, 1.0))

    monkeypatch.setattr(training_cost, "in_new_process", in_new_process)
    results = [result for group in training_cost.measure(is_quick=True) for result in group]
    assert [each.section for each in results] == [
        *["training: CPU time"] * 2,
        *["training: wall time"] * 2,
    ]
    assert [each.value for each in results] == [2.0, 2.0, 1.0, 1.0]
    assert trained[1:] == [("tiny", 4, OURS), ("tiny", 4, WITH_CALLBACKS)]
