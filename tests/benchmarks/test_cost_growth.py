import pytest

from kmp.advice import advise
from kmp.bench import growth, runner
from kmp.bench.sampling_cost import SampledTraining, start_training
from kmp.bench.timing import comparison
from kmp.records import load_run


@pytest.mark.parametrize(("power", "ratios"), [(0, [None, 0.1, 0.01]), (1, [None, 1, 1]), (2, [None, 10, 100])])
def test_ratio_above_1_is_growth_faster_than_linear(power, ratios):
    counts = [5, 50, 500]
    results = growth._per_variable("step", "graph", {n: [n**power, 2 * n**power] for n in counts})
    assert [result.ratio for result in results] == [ratio and pytest.approx(ratio) for ratio in ratios]
    assert [result.ratio_range for result in results] == [
        ratio and (pytest.approx(ratio), pytest.approx(ratio)) for ratio in ratios
    ]
    assert [result.value for result in results] == [1.5 * n**power for n in counts]
    assert [result.variant for result in results] == ["5 variables", "50 variables", "500 variables"]


@pytest.mark.slow
def test_costs_are_measured_for_each_number_of_variables(monkeypatch):
    monkeypatch.setattr(growth, "MOST_UNDER_XLA", 2)
    comparisons = {(results[0].case, results[0].mode): results for results in growth.measure_variables([2, 6], 1, 1)}
    steps = ("first call, bare", "Adam step, bare", "first call, kmp", "Adam step, kmp", "sample")
    logs = ("sample in the log", "load_run, 20 samples", "advise, 20 samples")
    assert list(comparisons) == [
        *((case, "graph") for case in steps),
        *((case, "") for case in logs),
        *((case, "XLA") for case in steps),
    ]
    for (case, mode), results in comparisons.items():
        assert [result.variant for result in results] == ["2 variables", "6 variables"][: 1 if mode == "XLA" else 2]
        assert case == "sample" or all(result.value > 0 for result in results)
    assert comparisons["sample in the log", ""][1].ratio < 1  # names and columns have a constant part


def test_log_has_samples_and_updates_that_advice_uses(tmp_path):
    training = SampledTraining(start_training([(4, 3), (3,)], "graph", True))
    size = growth._write_log(tmp_path / "log", training)
    run = load_run(tmp_path / "log")
    assert [sample.step for sample in run.samples] == list(range(250, 5001, 250))
    assert [number for number, sample in enumerate(run.samples) if sample.weight_norm[0] > 0] == [0, 10]
    assert run.samples[0].names == ("dense_0/kernel", "dense_0/bias")
    assert run.samples[0].histogram.total == 15
    lines = (tmp_path / "log" / "kmp.jsonl").read_text().splitlines(keepends=True)
    assert size == sum(len(line) for line in lines if '"sample"' in line) / 20
    assert "dense_0/bias in 20 of 20 samples" in advise(run)[0].evidence


def test_replicas_run_each_in_a_new_process():
    calls = []

    def run_in_subprocess(call):
        calls.append(call)
        return {"bare": [1.0 * len(calls)], "kmp": [3.0 * len(calls) ** 2]}

    bare, kmp = growth.measure_replicas([1, 2], 7, run_in_subprocess)
    assert calls == ["growth.replica_seconds(1, 7)", "growth.replica_seconds(2, 7)"]
    assert [(result.variant, result.value, result.ratio) for result in bare] == [
        ("1 replica", 1.0, None),
        ("2 replicas", 2.0, 1.0),
    ]
    assert kmp == growth._per_unit(
        comparison(growth.PER_REPLICA, kmp[0].case, "graph", {"1 replica": [3.0], "2 replicas": [12.0]}), [1, 2]
    )


@pytest.mark.slow
def test_step_of_two_replicas_is_measured():
    seconds = runner._run_in_subprocess("growth.replica_seconds(2, 3)")
    assert {name: len(rounds) for name, rounds in seconds.items()} == {"bare": 3, "kmp": 3}
    assert all(time > 0 for rounds in seconds.values() for time in rounds)
