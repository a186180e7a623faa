import keras
import pytest
import tensorflow as tf
from tensorflow.python.framework import config

from kmp.backend import tensorflow_internals


@pytest.fixture
def deterministic():
    keras.utils.set_random_seed(0)  # or TensorFlow refuses random operations while it is on
    tf.config.experimental.enable_op_determinism()
    yield
    config.disable_op_determinism()


def test_determinism_is_off_by_default():
    assert not tensorflow_internals.is_deterministic()


def test_determinism_is_seen_once_it_is_enabled(deterministic):
    assert tensorflow_internals.is_deterministic()
