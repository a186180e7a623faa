import json

import applications
import keras
import pytest


def is_within_tolerance(result):
    """Whether the error of the logits is close to that of Keras' mixed_float16.

    Untrained networks amplify rounding.
    """
    return result["relative_error"] < 1.5 * result["relative_error_of_keras"] + 1e-3


build = applications.build


def first_blocks(name):
    """Returns the first blocks of ConvNeXt, with another output layer.

    They have each of its custom layers.
    """
    network = build(name)
    x = keras.layers.GlobalAveragePooling2D()(
        network.get_layer("convnext_tiny_stage_0_block_2_identity").output
    )
    return keras.Model(network.input, keras.layers.Dense(10)(x))


# A network with custom layers, and one with preprocessing and with operations beside its layers.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "builder"), [("ConvNeXtTiny", first_blocks), ("MobileNetV3Small", build)]
)
def test_network_of_keras_applications_converts_trains_and_reloads(name, builder, monkeypatch):
    monkeypatch.setattr(applications, "build", builder)
    result = applications.check(name)
    assert 0 < result["float32"] < result["layers_and_operations"]
    assert is_within_tolerance(result)
    assert result["skipped_steps"] < 20


def test_results_of_every_model_are_committed():
    results = json.loads(applications.RESULTS.read_text())
    assert set(results) == set(applications.model_names())
    assert all(map(is_within_tolerance, results.values()))
