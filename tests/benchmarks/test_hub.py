"""Models of keras-hub in float16.

Needs the extra `hub`; the committed results are tested without it.
"""

import json

import hub_table
import keras
import pytest

import kmp

RESULTS = json.loads(hub_table.RESULTS.read_text(encoding="utf-8"))
# docs/hub.md has the reasons.
_D_FINE = ("DFineBackbone", "DFineBackbone denoising", "DFineObjectDetector")
NOT_WORKING = {
    "enable": {*_D_FINE, "Gemma3nBackbone multimodal", "SAMBackbone", "SAMImageSegmenter"},
    "convert": {
        *_D_FINE,
        *(
            "EfficientNetBackbone",
            "EfficientNetImageClassifier",
            "MoonshineAudioToText",
            "MoonshineBackbone",
        ),
        *("SAMBackbone", "SAMImageSegmenter"),
    },
}


@pytest.fixture(scope="module")
def check():
    pytest.importorskip("keras_hub", reason="needs the extra `hub`")
    import check

    return check


@pytest.mark.parametrize("mode", ["enable", "convert"])
def test_results_name_every_model_that_does_not_work(mode):
    wrong = {name for name, result in RESULTS.items() if not hub_table.works(result, mode)}
    assert wrong == NOT_WORKING[mode]


def test_models_that_fail_with_keras_work_with_kmp():
    fixed = {
        name for name, result in RESULTS.items() if not hub_table.works(result, "keras")
    } - NOT_WORKING["enable"]
    assert {
        "BertMaskedLM",
        "FluxBackbone",
        "RWKV7Backbone",
        "T5Backbone",
        "T5GemmaBackbone",
    } <= fixed


def test_error_of_the_outputs_is_about_that_of_keras_where_keras_works():
    pairs = {
        name: (result[mode]["error"], result["keras"]["error"])
        for name, result in RESULTS.items()
        for mode in ("enable", "convert")
        if hub_table.works(result, "keras") and hub_table.works(result, mode)
    }
    assert {name: pair for name, pair in pairs.items() if pair[0] > 1.5 * pair[1] + 1e-3} == {}


@pytest.mark.slow
def test_results_have_every_model(check):
    assert set(RESULTS) == set(check.hub_models.MODELS)


# One model of each architecture, and of each cause for which Keras' policy breaks one.
FAMILIES = (
    *(
        "BertMaskedLM",
        "ESMBackbone",
        "GemmaBackbone soft caps",
        "MixtralBackbone",
        "RWKV7Backbone",
        "T5Seq2SeqLM",
    ),
    *(
        "ResNetBackbone pre-activation",
        "SAMBackbone",
        "ViTBackbone",
        "PaliGemmaBackbone",
        "WhisperBackbone",
    ),
    "FluxBackbone",
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of keras-hub's layers; the results have the messages
@pytest.mark.parametrize("name", FAMILIES)
def test_one_model_of_each_family(check, name):
    result = check.check(name)
    for mode in ("enable", "convert"):
        assert hub_table.works(result, mode) == (name not in NOT_WORKING[mode]), result[mode]


def error_of(check, model, expected, inputs):
    return check.relative_error(check.outputs_of(model, inputs), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_residuals_beyond_65504_that_keras_hub_clips(check):
    model = check.built("Gemma3Backbone")
    for variable in model.trainable_variables:
        if "post_attention_norm" in variable.path or "post_ffw_norm" in variable.path:
            variable.assign(keras.ops.full_like(variable, 3e4))  # as large as in trained models
    inputs = check.inputs_of("Gemma3Backbone", model)
    expected = check.outputs_of(model, inputs)
    assert error_of(check, kmp.convert(model), expected, inputs) > 0.1  # finite, but clipped
    converted = kmp.convert(model, keep_float32="decoder_block_*")
    assert error_of(check, converted, expected, inputs) < 0.01


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_feed_forward_beyond_65504_as_in_trained_t5_is_found_with_a_batch(check):
    model = check.built("T5Backbone")
    for variable in model.trainable_variables:
        if variable.path.endswith("output_projector/kernel") and "attention" not in variable.path:
            variable.assign(3e5 * keras.ops.sign(variable))
    inputs = check.inputs_of("T5Backbone", model)
    expected = check.outputs_of(model, inputs)
    assert error_of(check, kmp.convert(model), expected, inputs) is None
    assert error_of(check, kmp.convert(model, batch=inputs), expected, inputs) < 0.01
