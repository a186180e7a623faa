import keras
import tensorflow as tf
from tensorflow.python.framework import config

from kmp.backend import tensorflow_internals


def test_determinism_is_seen_only_while_it_is_enabled():
    assert not tensorflow_internals.is_deterministic()
    keras.utils.set_random_seed(0)  # or TensorFlow refuses random operations while it is on
    tf.config.experimental.enable_op_determinism()
    try:
        assert tensorflow_internals.is_deterministic()
    finally:
        config.disable_op_determinism()
