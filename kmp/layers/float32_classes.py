"""Gives layers that need float32 this policy when they are created, while kmp is enabled."""

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from typing import Any

import keras

from kmp.backend import Replacement, defining_class
from kmp.layers.float32_rules import reason_for_float32
from kmp.layers.fused_normalization import fuse_normalization
from kmp.utils import DTYPES_16_BIT, FLOAT32

logger = logging.getLogger("kmp")
_logged: set[type] = set()
_selected: ContextVar[Collection[type] | None] = ContextVar("_selected", default=None)


# `keras.Layer.__init__` has run before these classes set what their reason depends on.
_PATCHED_CLASSES = (keras.Layer, keras.layers.Dot, keras.layers.Masking, keras.layers.UpSampling2D)


def apply_patches(is_enabled: Callable[[], bool]) -> Iterator[Replacement]:
    """Gives listed layers the policy float32 when they are created for 16 bits, and yields the patches.

    An explicit `dtype="float16"` does not change this: saved configs and layers that pass on their
    policy have one too. Setting `layer.dtype_policy` afterwards does.

    Args:
        is_enabled: Whether this applies to all listed layers; otherwise only in the context of
            `only_in_float32`.
    """

    def make(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(self: keras.Layer, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if is_enabled():
                fuse_normalization(self)
            classes = _selected.get()
            is_selected = is_enabled() if classes is None else type(self) in classes
            # Not `self.compute_dtype`: some classes override it, and need their own `__init__` to
            # have run.
            dtype = self.dtype_policy.compute_dtype if is_selected else None
            reason = reason_for_float32(self, dtype) if dtype in DTYPES_16_BIT else None
            if reason:
                self.dtype_policy = FLOAT32.name
                if type(self) not in _logged:
                    _logged.add(type(self))
                    logger.info("%s stays in float32: %s.", type(self).__name__, reason)

        vars(init)["__signature__"] = inspect.signature(
            original
        )  # Keras reads it to store the arguments of a layer
        return init

    for cls in _PATCHED_CLASSES:
        yield Replacement(defining_class(cls, "__init__"), "__init__", make)


@contextlib.contextmanager
def only_in_float32(classes: Collection[type]) -> Iterator[None]:
    """Gives layers of these classes, and no other listed layers, the policy float32 in the context."""
    token = _selected.set(classes)
    try:
        yield
    finally:
        _selected.reset(token)
