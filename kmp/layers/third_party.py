"""Layers of other packages that fail in 16 bits and need float32, and why.

`docs/hub.md` has the models that they are part of. The entries of a package were checked with the version named here.
"""

import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from typing import Any

import keras

from kmp.backend import Replacement, defining_class
from kmp.utils import DTYPES_16_BIT, FLOAT16, FLOAT32

logger = logging.getLogger("kmp")
_logged: set[type] = set()
_lock = threading.Lock()
_active: list["ThirdPartyPatch"] = []
_replacements: list[Replacement] = []  # one while any is active
_selected: ContextVar[Collection[type] | None] = ContextVar("_selected", default=None)

_MASK = "its mask is multiplied by -1e9, which is -Inf in float16, and 0 * -Inf is NaN"
_ARANGE = (
    "it computes positions in the dtype of its input: TensorFlow has no `arange` in float16 in a graph, and bfloat16 "
    "rounds integers above 256"
)
_TWO_DTYPES = "it combines float32 and 16-bit tensors, which TensorFlow refuses"
_ALSO_IN_BFLOAT16 = (_ARANGE, _TWO_DTYPES)

# By the first name of the module that defines the class. Where a package has several classes of a name, the name of the
# module's folder stands before it.
_REASONS = {
    "keras_hub": {  # 0.32
        "DFineAnchorGenerator": _ARANGE,
        "DFineHybridEncoder": _ARANGE,
        "ESMRotaryEmbedding": _ARANGE,
        "flux.TimestepEmbedding": _ARANGE,
        "MaskedLMHead": _TWO_DTYPES,
        "MixtralTransformerDecoder": _TWO_DTYPES,
        "MoonshineDecoderBlock": _TWO_DTYPES,
        "MoonshineEncoderBlock": _TWO_DTYPES,
        "Qwen3SparseMoeBlock": _TWO_DTYPES,
        "Qwen3_5MoeSparseMoeBlock": _TWO_DTYPES,
        "QwenSparseMoeBlock": _TWO_DTYPES,
        "RWKV7_Block": "it normalizes with an epsilon of 1e-12, which is 0 in float16, and divides by zero",
        "RoformrPositionalEmbedding": _ARANGE,
        "SAM3DetrDecoder": _ARANGE,
        "SAMPromptEncoder": _TWO_DTYPES,
        "T5Gemma2DecoderLayer": _MASK,
        "T5Gemma2EncoderLayer": _MASK,
        "T5GemmaDecoderLayer": _MASK,
        "T5GemmaEncoderLayer": _MASK,
        "T5MultiHeadAttention": _MASK,
    }
}


def reason_for_float32(layer_class: type, dtype: str = FLOAT16.name) -> str | None:
    """Returns why a layer of another package needs float32; `None` if it does not.

    Args:
        layer_class: The class of the layer. A subclass needs float32 too.
        dtype: The compute dtype that the layer would have, `"float16"` or `"bfloat16"`.
    """
    for base in layer_class.__mro__:
        package, *folders = str(getattr(base, "__module__", "")).split(".")
        reasons = _REASONS.get(package, {})
        reason = reasons.get(base.__name__) or reasons.get(".".join([*folders[-2:-1], base.__name__]))
        if reason and (dtype == FLOAT16.name or reason in _ALSO_IN_BFLOAT16):
            return reason
    return None


class ThirdPartyPatch:
    """Gives listed layers the policy float32 when they are created for 16 bits, until `remove` is called.

    `enable` and conversions, in several threads, share one patch of `keras.Layer.__init__`.

    Args:
        is_global: Whether it applies to all listed layers; otherwise only in the context of `only_in_float32`.
    """

    def __init__(self, is_global: bool) -> None:
        self.is_global = is_global
        with _lock:
            if not _active:
                _replacements.append(Replacement(defining_class(keras.Layer, "__init__"), "__init__", _patched_init))
            _active.append(self)

    def remove(self) -> None:
        """Ends the effect, and with the last one the patch."""
        with _lock:
            _active.remove(self)
            if not _active:
                _replacements.pop().remove()


@contextlib.contextmanager
def only_in_float32(classes: Collection[type]) -> Iterator[None]:
    """Gives layers of these classes, and no other listed layers, the policy float32 in the context."""
    token, patch = _selected.set(classes), ThirdPartyPatch(is_global=False)
    try:
        yield
    finally:
        patch.remove()
        _selected.reset(token)


def _applies_to(layer_class: type) -> bool:
    selected = _selected.get()
    return any(patch.is_global for patch in _active) if selected is None else layer_class in selected


def _patched_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: keras.Layer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # The class is checked first: others may override `compute_dtype`, and need their own `__init__` to have run.
        if reason_for_float32(type(self)) is None or not _applies_to(type(self)):
            return
        reason = reason_for_float32(type(self), self.compute_dtype) if self.compute_dtype in DTYPES_16_BIT else None
        if reason:
            self.dtype_policy = FLOAT32.name
            if type(self) not in _logged:
                _logged.add(type(self))
                logger.info("%s stays in float32: %s.", type(self).__name__, reason)

    vars(init)["__signature__"] = inspect.signature(original)  # Keras reads it to store the arguments of a layer
    return init
