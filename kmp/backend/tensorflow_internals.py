"""What kmp reads of TensorFlow's private modules; each with what the public names lack."""


def is_deterministic() -> bool:
    """Returns whether `tf.config.experimental.enable_op_determinism` was called. No public function tells."""
    from tensorflow.python.framework import config

    return config.is_op_determinism_enabled()


def memory_limit_of_gpu() -> int:
    """Returns how many bytes TensorFlow may use of the first GPU. No public function tells."""
    from tensorflow.python.client import device_lib

    return next(device.memory_limit for device in device_lib.list_local_devices() if device.device_type == "GPU")
