"""Weights that the user's code assigns past what kmp replaces."""

import contextlib
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf


@contextlib.contextmanager
def weights_unchanged(model: keras.Model) -> Iterator[None]:
    """Restores the weights that the step changes in the context.

    Raises:
        RuntimeError: At the end, if the step changed weights.
    """
    before = [(variable, tf.identity(variable.value)) for variable in model.variables]
    has_changed = False
    try:
        yield
    finally:
        for variable, value in before:
            if not np.array_equal(variable.value, value, equal_nan=True):
                has_changed = True
                variable.assign(value)
    if has_changed:
        raise RuntimeError("the training step changes weights in a way that kmp does not know")
