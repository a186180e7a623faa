"""The layers of Keras and of other packages that need float32, and what goes wrong in 16 bits.

`docs/hub.md` has the models that use those of keras-hub. `tests/layers/test_every_keras_layer.py`
tries all of Keras'.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from kmp.backend import Reason, Undos, patches
from kmp.utils import DTYPES_16_BIT, FLOAT16, FLOAT32

logger = logging.getLogger("kmp")
_logged: set[type] = set()
_selected: ContextVar[Collection[type] | None] = ContextVar("_selected", default=None)


@dataclass(frozen=True)
class _Reason:
    """Why a class needs float32, and whether a layer of it does in a 16-bit dtype."""

    text: str
    applies: Callable[[keras.Layer, str], bool] = lambda layer, dtype: True


def _in_float16(layer: keras.Layer, dtype: str) -> bool:
    return dtype == FLOAT16.name


def _is_rounded(value: Any, dtype: str) -> bool:
    exact = np.asarray(value, "float64")
    with np.errstate(over="ignore"):
        return not np.array_equal(exact.astype(np.dtype(dtype)).astype("float64"), exact)


_MASK = _Reason(
    "its mask is multiplied by -1e9, which is -Inf in float16, and 0 * -Inf is NaN", _in_float16
)
_ARANGE = _Reason(
    "it computes positions in the dtype of its input: TensorFlow has no `arange` in float16 in a"
    " graph, and bfloat16 rounds integers above 256"
)
_SQUARES = _Reason("its sum of squares is Inf or 0 in float16", _in_float16)
_TWO_DTYPES = _Reason("it combines float32 and 16-bit tensors, which TensorFlow refuses")

# By the first name of the module that defines the class; subclasses match too. Where a package has
# several classes of a name, the name of the module's folder stands before it.
_REASONS = {
    "keras": {  # 3.15
        # The base class of preprocessing and image augmentation. Some, such as MixUp, also combine
        # two dtypes and fail.
        "DataLayer": _Reason(
            "raw data: 16 bits round ids in masks and labels, and overflow on large values",
            lambda layer, dtype: keras.backend.is_float_dtype(layer.compute_dtype),
        ),
        "Dot": _Reason(
            _SQUARES.text,
            lambda layer, dtype: _in_float16(layer, dtype) and getattr(layer, "normalize", False),
        ),
        "GlobalAveragePooling1D": _Reason(
            "with a mask, its sum over all steps overflows float16", _in_float16
        ),
        "Layer": _Reason(
            "its activity regularizer's sum over all outputs overflows float16",
            lambda layer, dtype: (
                _in_float16(layer, dtype) and layer.activity_regularizer is not None
            ),
        ),
        "Masking": _Reason(
            "16 bits round its mask_value, which then equals none of the inputs",
            lambda layer, dtype: _is_rounded(getattr(layer, "mask_value", 0.0), dtype),
        ),
        "STFTSpectrogram": _Reason(
            "the squares of its amplitudes exceed 65504, and it refuses bfloat16"
        ),
        "SpectralNormalization": _Reason(
            "it writes a kernel that it computes, and 16 bits would round the weights"
        ),
        "TFSMLayer": _Reason("an exported model takes only the dtypes with which it was exported"),
        "UnitNormalization": _SQUARES,
        # Of 16-bit images, the gradient fails under XLA (bilinear) or in a graph (lanczos), or
        # there is none (bicubic).
        "UpSampling2D": _Reason(
            "TensorFlow has the gradient of an interpolation in float32 only",
            lambda layer, dtype: getattr(layer, "interpolation", "nearest") != "nearest",
        ),
    },
    "keras_hub": {  # 0.32
        **dict.fromkeys(
            ("DFineAnchorGenerator", "DFineHybridEncoder", "ESMRotaryEmbedding"), _ARANGE
        ),
        **dict.fromkeys(
            ("RoformrPositionalEmbedding", "SAM3DetrDecoder", "flux.TimestepEmbedding"), _ARANGE
        ),
        **dict.fromkeys(
            ("MaskedLMHead", "MixtralTransformerDecoder", "SAMPromptEncoder"), _TWO_DTYPES
        ),
        **dict.fromkeys(
            ("MoonshineDecoderBlock", "MoonshineEncoderBlock", "Qwen3SparseMoeBlock"), _TWO_DTYPES
        ),
        **dict.fromkeys(("Qwen3_5MoeSparseMoeBlock", "QwenSparseMoeBlock"), _TWO_DTYPES),
        **dict.fromkeys(
            ("T5Gemma2DecoderLayer", "T5Gemma2EncoderLayer", "T5GemmaDecoderLayer"), _MASK
        ),
        **dict.fromkeys(("T5GemmaEncoderLayer", "T5MultiHeadAttention"), _MASK),
        "RWKV7_Block": _Reason(
            "its epsilon of 1e-12 is 0 in float16, and it divides by zero", _in_float16
        ),
    },
}


def reason_for_float32(layer: keras.Layer, dtype: str = FLOAT16.name) -> str | None:
    """Returns why a layer needs float32 in place of a 16-bit dtype; `None` if not."""
    for base in type(layer).__mro__:
        package, *folders = str(getattr(base, "__module__", "")).split(".")
        for name in (base.__name__, ".".join([*folders[-2:-1], base.__name__])):
            reason = _REASONS.get(package, {}).get(name)
            if reason and reason.applies(layer, dtype):
                return reason.text
    return None


def selected_classes() -> Collection[type] | None:
    """Returns the classes of `only_in_float32`, or `None` outside of such a context."""
    return _selected.get()


def keep_in_float32(layer: keras.Layer) -> None:
    """Gives a layer that was created for 16 bits the policy float32, if its class needs it.

    An explicit `dtype="float16"` does not change this: saved configs and layers that pass on their
    policy have one too. Setting `layer.dtype_policy` afterwards does.
    """
    classes = selected_classes()
    if classes is not None and type(layer) not in classes:
        return
    # Not `layer.compute_dtype`: some classes override it, and need their own `__init__` to have
    # run.
    dtype = layer.dtype_policy.compute_dtype
    reason = reason_for_float32(layer, dtype) if dtype in DTYPES_16_BIT else None
    if reason is None:
        return
    layer.dtype_policy = FLOAT32.name
    if type(layer) not in _logged:
        _logged.add(type(layer))
        logger.info("%s stays in float32: %s.", type(layer).__name__, reason)


@contextlib.contextmanager
def only_in_float32(classes: Collection[type]) -> Iterator[None]:
    """Gives layers of these classes, and no other listed layers, the policy float32.

    This holds for the layers that this thread creates in the context.
    """
    with Undos() as undos, undos:
        undos.enter(patches.holding(Reason.CONVERSION))
        undos.add(functools.partial(_selected.set, _selected.get()))
        _selected.set(classes)
        yield
