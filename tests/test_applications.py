import json

import applications
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("name", applications.FAMILIES)
def test_one_of_each_family_converts_trains_and_comes_back(name):
    result = applications.check(name)
    assert 0 < result["float32"] < result["layers_and_operations"]
    assert result["largest_difference"] < 1e-2


def test_results_of_all_are_committed():
    results = json.loads(applications.RESULTS.read_text())
    assert sorted(results) == applications.names()
    assert max(result["largest_difference"] for result in results.values()) < 1e-2
