from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf
from tensorflow.python.client import device_lib
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


def test_memory_limit_is_that_of_the_first_gpu(monkeypatch):
    kinds = [("CPU", 1), ("GPU", 2), ("GPU", 3)]
    devices = [SimpleNamespace(device_type=kind, memory_limit=limit) for kind, limit in kinds]
    monkeypatch.setattr(device_lib, "list_local_devices", lambda: devices)
    assert tensorflow_internals.memory_limit_of_gpu() == 2


def test_devices_have_the_attributes_that_are_read():
    assert {"device_type", "memory_limit"} <= {
        field.name for field in device_lib.list_local_devices()[0].DESCRIPTOR.fields
    }
