"""Layers of other packages that fail in float16 and need float32, and why.

`docs/hub.md` has the models that they are part of. The entries of a package were checked with the version named here.
"""

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import keras

from kmp.backend import Replacement, defining_class
from kmp.utils import FLOAT16, FLOAT32

logger = logging.getLogger("kmp")
_logged: set[type] = set()

_MASK = "its mask is multiplied by -1e9, which is -Inf in float16, and 0 * -Inf is NaN"
_ARANGE = "it calls `arange` in the dtype of its input, which TensorFlow has no float16 kernel for in a graph"
_SAME_DTYPE = "it uses a float32 weight without a cast, and TensorFlow does not add or multiply float32 and float16"

# By the first name of the module that defines the class.
_REASONS = {
    "keras_hub": {  # 0.32
        "ESMRotaryEmbedding": _ARANGE,
        "MaskedLMHead": _SAME_DTYPE,
        "MoonshineDecoderBlock": _SAME_DTYPE,
        "MoonshineEncoderBlock": _SAME_DTYPE,
        "RWKV7_Block": "it normalizes with an epsilon of 1e-12, which is 0 in float16, and divides by zero",
        "RoformrPositionalEmbedding": _ARANGE,
        "SAMPromptEncoder": _SAME_DTYPE,
        "T5Gemma2DecoderLayer": _MASK,
        "T5Gemma2EncoderLayer": _MASK,
        "T5GemmaDecoderLayer": _MASK,
        "T5GemmaEncoderLayer": _MASK,
        "T5MultiHeadAttention": _MASK,
        "TimestepEmbedding": _ARANGE,
    }
}


def reason_for_float32(layer_class: type) -> str | None:
    """Returns why a layer of another package needs float32 where the policy is float16; `None` if it does not.

    Args:
        layer_class: The class of the layer. A subclass needs float32 too.
    """
    for base in layer_class.__mro__:
        reason = _REASONS.get(base.__module__.partition(".")[0], {}).get(base.__name__)
        if reason:
            return reason
    return None


def keep_third_party_in_float32() -> Replacement:
    """Gives these layers the policy float32 when they are created for float16, until the replacement is removed."""
    return Replacement(defining_class(keras.Layer, "__init__"), "__init__", _patched_init)


def _patched_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: keras.Layer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        reason = reason_for_float32(type(self))
        if reason and self.compute_dtype == FLOAT16.name:
            self.dtype_policy = FLOAT32.name
            if type(self) not in _logged:
                _logged.add(type(self))
                logger.info("%s stays in float32: %s.", type(self).__name__, reason)

    vars(init)["__signature__"] = inspect.signature(original)  # Keras reads it to store the arguments of a layer
    return init
