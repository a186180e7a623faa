"""Random inputs for the models of keras-hub."""

import keras
import numpy as np

BATCH = 2
LENGTH = 8  # of sequences, where a model accepts any
SIDE = 32  # of images, where a model accepts any size
TOKENS = 20  # every vocabulary is at least this large


def inputs_of(model, overrides=None, seed=0):
    """Returns a batch of random inputs in the structure of `model.input`.

    Args:
        model: A functional model.
        overrides: Arrays by the name of the input that needs other values than those its name suggests.
        seed: The seed of the random values.
    """
    random = np.random.default_rng(seed)
    overrides = overrides or {}
    return keras.tree.map_structure(
        lambda tensor: overrides[tensor.name] if tensor.name in overrides else _array(tensor, random), model.input
    )


def _array(tensor, random):
    is_image = len(tensor.shape) >= 4
    shape = (BATCH, *((SIDE if is_image else LENGTH) if size is None else size for size in tensor.shape[1:]))
    if tensor.name.endswith("mask"):  # all but the last position are valid
        mask = np.ones(shape, tensor.dtype)
        mask[..., -1] = 0
        return mask
    if "int" in tensor.dtype:
        return random.integers(1, min(TOKENS, LENGTH), shape).astype(tensor.dtype)
    return random.normal(size=shape).astype("float32")
