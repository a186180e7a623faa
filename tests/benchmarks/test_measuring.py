import pytest
from measuring import per_unit


@pytest.mark.parametrize(
    ("power", "ratios"), [(0, [None, 0.1, 0.01]), (1, [None, 1, 1]), (2, [None, 10, 100])]
)
def test_ratio_above_1_is_growth_faster_than_linear(power, ratios):
    counts = [5, 50, 500]
    results = per_unit("variable", "step", "graph", {n: [n**power, 2 * n**power] for n in counts})
    assert [result.ratio for result in results] == [
        ratio and pytest.approx(ratio) for ratio in ratios
    ]
    assert [result.value for result in results] == [
        pytest.approx(1.5 * n ** (power - 1)) for n in counts
    ]
    assert [result.variant for result in results] == [
        "5 variables",
        "50 variables",
        "500 variables",
    ]
