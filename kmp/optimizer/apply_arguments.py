"""Checks the arguments of `apply` before anything changes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf


def check_gradients(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Checks that there is one gradient for each variable, of its shape.

    Args:
        gradients: Tensors, `tf.IndexedSlices` or `None`.
        variables: The variables.

    Raises:
        ValueError: If not.
    """
    if len(gradients) != len(variables):
        raise ValueError(
            "`grads` must have one gradient for each variable. "
            f"Received: {len(gradients)} gradients, {len(variables)} variables"
        )
    for gradient, variable in zip(gradients, variables, strict=True):
        if gradient is not None and not _fits(gradient, tf.TensorShape(variable.shape)):
            path, has_rows = getattr(variable, "path", variable.name), isinstance(gradient, tf.IndexedSlices)
            raise ValueError(
                f"The gradient of {path!r} must have the variable's shape {tuple(variable.shape)}. Received: "
                + (f"rows of shape {gradient.values.shape[1:]}" if has_rows else f"shape {_shape_of(gradient)}")
            )


def check_no_pairs(gradients: Sequence[Any]) -> None:
    """Checks that gradients are not pairs of gradient and variable.

    Raises:
        ValueError: If they are.
    """
    if any(isinstance(gradient, tuple) and not hasattr(gradient, "dtype") for gradient in gradients):
        raise ValueError(
            "`apply` takes gradients and variables as two lists: apply(gradients, variables). For pairs, call "
            "apply_gradients(zip(gradients, variables))."
        )


def _fits(gradient: Any, shape: tf.TensorShape) -> bool:
    if isinstance(gradient, tf.IndexedSlices):
        return shape[1:].is_compatible_with(gradient.values.shape[1:])
    return shape.is_compatible_with(_shape_of(gradient))


def _shape_of(gradient: Any) -> tf.TensorShape:
    return tf.TensorShape(gradient.shape if hasattr(gradient, "shape") else np.shape(gradient))
