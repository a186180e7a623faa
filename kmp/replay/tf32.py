"""TF32, a GPU's default for products of float32, for a whole measurement."""

import contextlib
from collections.abc import Iterator

import tensorflow as tf


@contextlib.contextmanager
def tensor_float_32(is_allowed: bool) -> Iterator[None]:
    """Allows or disables TF32 in the context.

    TF32 rounds the operands of a product to 11 bits, as many as float16 has. TensorFlow has one
    setting for all threads.
    """
    was_allowed = tf.config.experimental.tensor_float_32_execution_enabled()
    if was_allowed == is_allowed:
        yield
        return
    try:
        tf.config.experimental.enable_tensor_float_32_execution(is_allowed)
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(was_allowed)
