import math
from dataclasses import replace

import numpy as np
import pytest

from kmp.records import BIN_COUNT, GradientSample

NAMES = ("net/first/kernel", "net/first/bias", "net/last/kernel")


def sample(**overrides):
    counts = np.zeros((3, BIN_COUNT), np.int64)
    counts[:, 140:143] = [[1, 2, 3], [0, 4, 0], [5, 0, 6]]
    counts[:, 0] = 7, 8, 9
    columns = {
        **{"amax": [2.0, 8.0, 4.0], "norm": [3.0, 4.0, 12.0], "weight_norm": [6.0, 8.0, 0.0]},
        **{"update_norm": [0.3, 0.4, 1.0], "updates": [6, 4, 11], "lost_updates": [1, 0, 2]},
    }
    arrays = {name: np.array(column) for name, column in columns.items()}
    return GradientSample(5, 4.0, NAMES, counts, **(arrays | overrides))


def test_sample_is_a_mapping_of_variables_to_histograms_and_has_one_of_all():
    result = sample()
    assert (result["net/first/bias"].total, result["net/first/bias"].zeros) == (12, 8)
    assert (result.histogram.total, result.histogram.zeros) == (45, 24)
    assert (result.histogram.step, result.histogram.loss_scale) == (5, 4.0)
    assert (list(result), len(result)) == (list(NAMES), 3)
    assert ("net/first/bias" in result, "net/first" in result) == (True, False)
    assert repr(result) == "<GradientSample step=5 loss_scale=4: 3 variables>"
    with pytest.raises(KeyError, match="net/last/kernel"):
        _ = result["unknown"]


def test_variables_are_removed_and_update_ratios_and_the_total_norm_are_those_of_the_norms():
    assert list(sample().without(["net/first/bias", "unknown"])) == [
        "net/first/kernel",
        "net/last/kernel",
    ]
    assert sample().without(NAMES).histogram.total == 0
    # Of a weight that is zero.
    np.testing.assert_allclose(sample().update_ratio, [0.05, 0.05, math.nan])
    assert sample().total_norm == 13.0


def test_by_layer_merges_the_variables_of_a_layer_also_where_they_are_apart():
    layers = sample().by_layer()
    assert layers.names == ("net/first", "net/last")
    assert "net/first" in layers
    assert layers["net/first"].total == 18 + 7
    np.testing.assert_allclose(layers.amax, [8.0, 4.0])
    np.testing.assert_allclose(layers.norm, [5.0, 12.0])
    np.testing.assert_allclose(layers.weight_norm, [10.0, 0.0])
    np.testing.assert_array_equal(layers.lost_updates, [1, 2])
    assert layers.histogram == sample().histogram
    apart = replace(
        sample(), names=("net/first/kernel", "net/last/kernel", "net/first/bias")
    ).by_layer()
    assert apart.names == ("net/first", "net/last")
    np.testing.assert_allclose(apart.amax, [4.0, 8.0])
    np.testing.assert_allclose(apart.norm, [math.hypot(3.0, 12.0), 4.0])
    np.testing.assert_array_equal(apart.updates, [17, 4])
    assert apart["net/first"].total == 13 + 20
    empty = sample().select([])
    assert (len(empty), len(empty.by_layer()), empty.histogram.total) == (0, 0, 0)


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ("*/kernel", ("net/first/kernel", "net/last/kernel")),
        (["net/last/*", "net/first/bias"], ("net/first/bias", "net/last/kernel")),
        ("net/first/kernel", ("net/first/kernel",)),
        (iter(["net/first/*"]), NAMES[:2]),
    ],
)
def test_variables_are_selected_by_path_or_pattern(patterns, names):
    selected = sample().select(patterns)
    assert selected.names == names
    assert [selected[name] for name in names] == [sample()[name] for name in names]


def test_columns_that_were_not_measured_are_nan_or_zero():
    counts = np.zeros((3, BIN_COUNT), np.int64)
    result = GradientSample(5, 4.0, NAMES, counts, amax=np.zeros(3), norm=np.zeros(3))
    assert np.isnan([result.weight_norm, result.update_norm]).all()
    assert (result.updates.tolist(), result.lost_updates.tolist()) == ([0, 0, 0], [0, 0, 0])
    assert not result.has_update
    assert sample().has_update


@pytest.mark.parametrize(
    ("patterns", "error", "message"),
    [
        (
            ["*/kernel", "dense*"],
            ValueError,
            r"'dense\*'.*net/first/kernel, net/first/bias, net/last/kernel",
        ),
        *(
            (value, TypeError, "must be a string or a list of strings. Received: patterns=")
            for value in (3, None, [3])
        ),
    ],
)
def test_patterns_without_a_match_and_those_that_are_no_strings_are_errors(
    patterns, error, message
):
    with pytest.raises(error, match=message):
        sample().select(patterns)
