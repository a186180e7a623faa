"""Checks of the gradients that are passed to `apply`."""

import numpy as np
import tensorflow as tf

from kmp.gradients.tensor_groups import Gradients, Variables


def check_no_pairs(gradients: Gradients) -> None:
    """Raises an error if pairs of gradients and variables are passed."""
    for gradient in gradients:
        if isinstance(gradient, tuple) and not hasattr(gradient, "dtype"):
            raise ValueError(
                "`apply` takes gradients and variables as two lists: apply(gradients, variables)."
                " For pairs, call apply_gradients(zip(gradients, variables))."
            )


def check_any(grads: Gradients) -> None:
    """Raises Keras' error if all gradients are `None`.

    Keras would raise it inside of the branch of the update, with a message about that.
    """
    if all(gradient is None for gradient in grads):
        raise ValueError("No gradients provided for any variable.")


def check_shapes(gradients: Gradients, variables: Variables) -> None:
    """Raises an error if there is not one gradient for each variable, of its shape or `None`."""
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
