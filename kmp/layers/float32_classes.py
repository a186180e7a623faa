"""Gives layers that need float32 this policy when they are created, while kmp is enabled."""

import contextlib
import functools
import logging
from collections.abc import Collection, Iterator
from contextvars import ContextVar

import keras

from kmp.backend.inventory import Reason
from kmp.backend.keras_internals import float32_policy
from kmp.backend.patching import patches
from kmp.backend.undo import Undos
from kmp.layers.float32_rules import reason_for_float32
from kmp.utils.float_formats import DTYPES_16_BIT

logger = logging.getLogger("kmp")
_logged: set[type] = set()
_selected: ContextVar[Collection[type] | None] = ContextVar("_selected", default=None)


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
    # Some classes override `layer.compute_dtype`, and need their own `__init__` to have run for it.
    dtype = layer.dtype_policy.compute_dtype
    reason = reason_for_float32(layer, dtype) if dtype in DTYPES_16_BIT else None
    if reason is None:
        return
    layer.dtype_policy = float32_policy(layer)
    if type(layer) not in _logged:
        _logged.add(type(layer))
        logger.info("%s stays in float32: %s.", type(layer).__name__, reason)


@contextlib.contextmanager
def only_in_float32(classes: Collection[type]) -> Iterator[None]:
    """Gives layers of these classes, and no other listed layers, the policy float32.

    This holds for the layers that this thread creates in the context.
    """
    with Undos() as undos, undos.first_attempt():
        undos.enter(patches.holding(Reason.CONVERSION))
        undos.add(functools.partial(_selected.set, _selected.get()))
        _selected.set(classes)
        yield
