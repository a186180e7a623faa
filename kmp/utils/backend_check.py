"""The check that runs before anything imports Keras."""

import importlib.util

_BACKENDS = ("jax", "torch", "openvino")  # each is also the name of the package that Keras imports for it


def require_tensorflow() -> None:
    """Checks that Keras runs on TensorFlow.

    Raises:
        ImportError: If Keras is set to another backend, or TensorFlow is not installed; the message says what to do.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise ImportError(
            "kmp needs TensorFlow, which its extras install: pip install 'kmp[cuda]' for an NVIDIA GPU, "
            "pip install 'kmp[cpu]' for a machine without one."
        )
    backend = _configured_backend()
    if backend != "tensorflow":
        raise ImportError(
            f"kmp runs on Keras' TensorFlow backend, and the backend chosen here is {backend!r}. Set the environment "
            'variable KERAS_BACKEND=tensorflow, or "backend" in Keras\' keras.json, before Keras is imported.'
        )


def _configured_backend() -> str:
    try:
        import keras
    except ModuleNotFoundError as error:
        if error.name in _BACKENDS:  # Keras is set to it, and it is not installed
            return error.name
        raise
    return keras.config.backend()
