"""Functions of TensorFlow that run eagerly in a pass."""

import contextlib
from collections.abc import Iterator

import tensorflow as tf


@contextlib.contextmanager
def functions_run_eagerly() -> Iterator[None]:
    """Runs each `tf.function` eagerly in the context.

    A function that is traced in a replay would be used in the training, without its updates.
    """
    before = tf.config.functions_run_eagerly()
    try:
        tf.config.run_functions_eagerly(True)
        yield
    finally:
        tf.config.run_functions_eagerly(before)
