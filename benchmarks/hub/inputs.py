"""Random inputs for the models of keras-hub."""

import keras
import numpy as np

BATCH = 2
LENGTH = 8  # of sequences, where a model accepts any
SIDE = 32  # of images, where a model accepts any size
TOKENS = 20  # every vocabulary is at least this large


def inputs_of(name, model, seed=0):
    """Returns a batch of random inputs in the structure of `model.input`."""
    random = np.random.default_rng(seed)
    overrides = _OVERRIDES[name]() if name in _OVERRIDES else {}
    return keras.tree.map_structure(
        lambda tensor: (
            overrides[tensor.name] if tensor.name in overrides else _array(tensor, random)
        ),
        model.input,
    )


def _array(tensor, random):
    is_image = len(tensor.shape) >= 4
    shape = (
        BATCH,
        *((SIDE if is_image else LENGTH) if size is None else size for size in tensor.shape[1:]),
    )
    if tensor.name.endswith("mask"):  # all but the last position are valid
        mask = np.ones(shape, tensor.dtype)
        mask[..., -1] = 0
        return mask
    if "int" in tensor.dtype:
        return random.integers(1, min(TOKENS, LENGTH), shape).astype(tensor.dtype)
    return random.normal(size=shape).astype("float32")


def _normal(*shape):
    return np.random.default_rng(0).normal(size=(BATCH, *shape)).astype("float32")


def _prompts():
    random = np.random.default_rng(0)
    return {
        "points": random.uniform(0, 32, (2, 3, 2)).astype("float32"),
        "labels": np.float32([[1, 0, -1]] * 2),  # foreground, background, padding
        "boxes": np.sort(random.uniform(0, 32, (2, 1, 2, 2)), axis=2).astype("float32"),
        "masks": random.normal(size=(2, 1, 32, 32, 1)).astype("float32"),
    }


def _boxes():
    # Index, center, size.
    boxes = np.array([[[0, 0.5, 0.5, 0.6, 0.4]], [[1, 0.4, 0.6, 0.5, 0.5]]], "float32")
    return {"boxes": boxes, "box_labels": np.array([[1], [0]], "int32")}


def _waveform():
    return {
        "encoder_input_values": _normal(3000, 1),
        "encoder_padding_mask": np.ones((BATCH, 3000), bool),
    }


def _positions():
    return {"position_ids": np.tile(np.arange(LENGTH, dtype="int32"), (BATCH, 1))}


def _tokens_of(modality):
    """Returns which tokens stand for an image or a sound."""
    mask = np.zeros((BATCH, LENGTH), "int32")
    mask[:, 2:6] = 1
    indices = np.tile(np.arange(2, 6, dtype="int32"), (BATCH, 1))
    return {f"{modality}_indices": indices, f"{modality}_mask": mask}


def _image():
    return _tokens_of("vision") | {"images": _normal(1, 16, 16, 3)}


def _patches():
    grid = (
        np.stack(np.meshgrid(np.arange(4), np.arange(4)), axis=-1)
        .reshape(1, 1, 16, 2)
        .astype("int32")
    )
    pixels = np.random.default_rng(0).uniform(size=(BATCH, 1, 16, 48)).astype("float32")
    positions = np.tile(grid, (BATCH, 1, 1, 1))
    return (
        _positions()
        | _tokens_of("vision")
        | {
            "pixel_values": pixels,
            "pixel_position_ids": positions,
        }
    )


def _sound():
    mel = {"audio_mel": _normal(1, 16, 8), "audio_mel_mask": np.ones((BATCH, 1, 16), "int32")}
    return _positions() | _tokens_of("audio") | mel


def _image_and_sound():
    return {
        "token_ids": np.array(
            [[1, 2, 20, 20, 21, 21, 3, 0], [4, 20, 20, 25, 29, 21, 21, 5]], "int32"
        ),
        "images": _normal(1, 32, 32, 3),
        "input_features": _normal(1, 16, 16),
        "input_features_mask": np.zeros((BATCH, 1, 16), bool),  # true where a frame is padding
    }


# By model: inputs that need other values than those that their names suggest.
_OVERRIDES = {
    "Gemma3Backbone vision": _image,
    "Gemma3nBackbone multimodal": _image_and_sound,
    "Gemma4Backbone": _positions,
    "Gemma4Backbone vision": _patches,
    "Gemma4Backbone audio": _sound,
    "Gemma4Backbone experts": _positions,
    "Gemma4Backbone per-layer inputs": _positions,
    "Gemma4CausalLM": _positions,
    "MoonshineBackbone": _waveform,
    "MoonshineAudioToText": _waveform,
    "SAMBackbone": _prompts,
    "SAMImageSegmenter": _prompts,
    "SAM3PromptableConceptBackbone": _boxes,
    "SAM3PromptableConceptImageSegmenter": _boxes,
    "T5Gemma2Backbone vision": _image,
}
