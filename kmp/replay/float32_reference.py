"""A float32 pass over one batch, to distinguish values that float16 flushed to zero from values that are truly zero."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from kmp.backend import state_restored
from kmp.records import GradientSample
from kmp.replay.eager_pass import forward_pass, run_pass
from kmp.utils import user_messages


def float32_sample(model: keras.Model, batch: Sequence[Any], variables: Mapping[str, Any], step: int) -> GradientSample:
    """Returns the gradients of a compiled model in float32, without a loss scale. Restores the model.

    Args:
        model: A compiled and built model with float32 variables.
        batch: `(x, y)` or `(x, y, sample_weight)`.
        variables: The variables to measure, by path, ordered from the input to the loss.
        step: The training step to record in the sample.

    Raises:
        ValueError: If the batch does not fit the model and its loss.
    """
    with _batch_errors_named(model):
        return run_pass(model, batch, variables.values(), float32_layers=[model]).sample(variables, step)


def check_batch(model: keras.Model, batch: Sequence[Any]) -> None:
    """Runs the forward pass of `float32_sample` on a batch and restores the model.

    Raises:
        ValueError: If the batch does not fit the model and its loss.
    """
    with _batch_errors_named(model), state_restored(model):
        forward_pass(model, batch)


def _batch_errors_named(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    return user_messages.naming_argument("reference", f"{type(model).__name__} {model.name!r} and its loss")
