"""Checks of what `apply` gets: one gradient for each variable, of its shape."""

from typing import Any

import numpy as np
import tensorflow as tf

from kmp.gradients.tensor_groups import Gradients, Variables


def checked_variables(
    gradients: Gradients, given: Variables | None, built_on: Variables | None
) -> list[Any]:
    """Returns the variables of gradients.

    Args:
        gradients: The gradients that `apply` got.
        given: The variables that it got; `None` for those that the optimizer was built on.
        built_on: The variables that the optimizer was built on; `None` if it is not built.

    Raises:
        ValueError: If there is not one for each gradient, of its shape or `None`.
    """
    for gradient in gradients:
        if isinstance(gradient, tuple) and not hasattr(gradient, "dtype"):
            raise ValueError(
                "`apply` takes gradients and variables as two lists: apply(gradients, variables)."
                " For pairs, call apply_gradients(zip(gradients, variables))."
            )
    given = built_on if given is None else given
    if given is None:
        raise ValueError(
            "The optimizer is not built. Pass `trainable_variables`, or call `build` first."
        )
    variables = list(given)
    if len(gradients) != len(variables):
        raise ValueError(
            "`grads` must have one gradient for each variable. "
            f"Received: {len(gradients)} gradients, {len(variables)} variables"
        )
    for gradient, variable in zip(gradients, variables, strict=True):
        if gradient is None:
            continue
        of_rows = ""
        if isinstance(gradient, tf.IndexedSlices):
            of_rows = "rows of "
            received = tf.TensorShape([None, *gradient.values.shape[1:]])
        else:
            received = tf.TensorShape(np.shape(gradient))
        expected = tf.TensorShape(variable.shape)
        if not expected.is_compatible_with(received):
            raise ValueError(
                f"The gradient of {getattr(variable, 'path', variable.name)!r} must have the"
                f" variable's shape {tuple(expected)}. Received: {of_rows}shape {received}"
            )
    return variables
