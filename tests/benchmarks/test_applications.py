import json

import applications
import pytest


def is_within_tolerance(result):
    """Whether the error of the logits is close to that of Keras' mixed_float16; untrained networks amplify rounding."""
    return result["relative_error"] < 1.5 * result["relative_error_of_keras"] + 1e-3


# A network with custom layers, one with preprocessing, and one with operations beside its layers.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["ConvNeXtTiny", "EfficientNetB0", "MobileNetV3Small"])
def test_network_of_keras_applications_converts_trains_and_reloads(name):
    result = applications.check(name)
    assert 0 < result["float32"] < result["layers_and_operations"]
    assert is_within_tolerance(result)
    assert result["skipped_steps"] < 20


def test_results_of_every_model_are_committed():
    results = json.loads(applications.RESULTS.read_text())
    assert set(results) == set(applications.model_names())
    assert all(map(is_within_tolerance, results.values()))
