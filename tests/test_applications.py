import json

import applications
import pytest


def is_within_tolerance(result):
    """Whether logits drift no more than in Keras' own mixed_float16: untrained networks magnify what is rounded off."""
    return result["drift"] < 1.5 * result["drift_of_stock"] + 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", applications.FAMILIES)
def test_one_of_each_family_converts_trains_and_comes_back(name):
    result = applications.check(name)
    assert 0 < result["float32"] < result["layers_and_operations"]
    assert is_within_tolerance(result)
    assert result["skipped_steps"] < 20


def test_results_of_every_model_are_committed():
    results = json.loads(applications.RESULTS.read_text())
    assert set(results) == set(applications.names())
    assert all(map(is_within_tolerance, results.values()))
