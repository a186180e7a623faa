import cost_growth
import pytest
from measuring import SampledStep

from kmp import advise, load_run


@pytest.mark.parametrize(("power", "ratios"), [(0, [None, 0.1, 0.01]), (1, [None, 1, 1]), (2, [None, 10, 100])])
def test_ratio_above_1_is_growth_faster_than_linear(power, ratios):
    counts = [5, 50, 500]
    results = cost_growth.per_unit("variable", "step", "graph", {n: [n**power, 2 * n**power] for n in counts})
    assert [result.ratio for result in results] == [ratio and pytest.approx(ratio) for ratio in ratios]
    assert [result.ratio_range for result in results] == [
        ratio and (pytest.approx(ratio), pytest.approx(ratio)) for ratio in ratios
    ]
    assert [result.value for result in results] == [1.5 * n**power for n in counts]
    assert [result.variant for result in results] == ["5 variables", "50 variables", "500 variables"]


def test_log_has_samples_and_updates_that_advice_uses(tmp_path):
    step = SampledStep([(4, 3), (3,)], "graph")
    assert [int(step()) for _ in range(2)] == [1, 2]
    size = cost_growth.write_log(tmp_path / "log", step)
    run = load_run(tmp_path / "log")
    assert [sample.step for sample in run.samples] == list(range(250, 5001, 250))
    assert [number for number, sample in enumerate(run.samples) if sample.weight_norm[0] > 0] == [0, 10]
    assert run.samples[0].names == ("dense_0/kernel", "dense_0/bias")
    assert run.samples[0].histogram.total == 15
    lines = (tmp_path / "log" / "kmp.jsonl").read_text().splitlines(keepends=True)
    assert size == sum(len(line) for line in lines if '"sample"' in line) / 20
    assert "of 20 samples" in advise(run)[0].evidence
