"""Finds the optimizer that a callback reads."""

import logging
from typing import Any
from weakref import WeakSet

import keras

from kmp.backend import compute_dtypes
from kmp.optimizer import LossScaleOptimizer
from kmp.utils import FLOAT16

logger = logging.getLogger("kmp")

_logged_models: WeakSet[keras.Model] = WeakSet()


def optimizer_argument(optimizer: Any) -> LossScaleOptimizer | None:
    """Returns the argument `optimizer` of a callback.

    Raises:
        TypeError: If it is not a `kmp.LossScaleOptimizer` or `None`.
    """
    if optimizer is not None and not isinstance(optimizer, LossScaleOptimizer):
        raise TypeError(f"`optimizer` must be a kmp.LossScaleOptimizer or None. Received: optimizer={optimizer!r}")
    return optimizer


def has_optimizer(model: keras.Model, optimizer: Any, callback: str) -> bool:
    """Returns whether a callback has an optimizer to read. If not, logs once per model what gives records.

    Args:
        model: The model in training.
        optimizer: The optimizer to read.
        callback: The name of the callback that reads it, for the error message.

    Raises:
        ValueError: If the model computes in float16 and the optimizer is not a `kmp.LossScaleOptimizer`.
    """
    if isinstance(optimizer, LossScaleOptimizer):
        return True
    dtypes = compute_dtypes(model)
    name = "None" if optimizer is None else f"{type(optimizer).__module__.split('.')[0]}'s {type(optimizer).__name__}"
    facts = f"the model's optimizer is {name}. The model computes in {' and '.join(sorted(dtypes))}"
    if FLOAT16.name in dtypes:
        raise ValueError(
            f"{callback} needs a kmp.LossScaleOptimizer, but {facts}. Compile the model after kmp.enable() and without "
            "auto_scale_loss=False, or with kmp.LossScaleOptimizer(opt)."
        )
    if model not in _logged_models:
        _logged_models.add(model)
        logger.warning(
            "kmp's callbacks have nothing to read: %s, which needs no loss scale. To record its gradients, compile it "
            "with kmp.wrap(optimizer, loss_scale=1.0).",
            facts,
        )
    return False
