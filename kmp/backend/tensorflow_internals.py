"""TensorFlow's private functions that kmp uses. TensorFlow 2.21 has no public name for what they return."""


def is_deterministic() -> bool:
    """Whether `tf.config.experimental.enable_op_determinism` was called."""
    from tensorflow.python.framework import config

    return config.is_op_determinism_enabled()


def is_onednn_enabled() -> bool:
    """Whether TensorFlow computes with oneDNN on the CPU."""
    from tensorflow.python.util import _pywrap_util_port

    return bool(_pywrap_util_port.IsMklEnabled())
