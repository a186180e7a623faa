"""TensorFlow's private functions that kmp uses, each with the reason why the public API is not enough."""

from typing import Any

import tensorflow as tf


def is_deterministic() -> bool:
    """Whether `tf.config.experimental.enable_op_determinism` was called. No public function returns it."""
    from tensorflow.python.framework import config

    return config.is_op_determinism_enabled()


def memory_limit_of_gpu() -> int:
    """Returns the number of bytes that TensorFlow may use on the first GPU. No public function returns it."""
    from tensorflow.python.client import device_lib

    return next(device.memory_limit for device in device_lib.list_local_devices() if device.device_type == "GPU")


def is_onednn_enabled() -> bool:
    """Whether TensorFlow computes with oneDNN on the CPU. No public function returns it."""
    from tensorflow.python.util import _pywrap_util_port

    return bool(_pywrap_util_port.IsMklEnabled())


def shapes_held_by(tensor: Any) -> list[tf.TensorShape]:
    """Returns the shape of a float tensor, or those of the floats that a resource holds; none for other tensors.

    No public attribute of a handle has the shape of its variable.
    """
    if tensor.dtype.is_floating:
        return [tensor.shape]
    held = getattr(tensor, "_handle_data", None) if tensor.dtype == tf.resource else None
    pairs = held.shape_and_type if held else ()
    return [tf.TensorShape(pair.shape) for pair in pairs if tf.as_dtype(pair.dtype).is_floating]
