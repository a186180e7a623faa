"""The check of Keras' backend, which runs before anything imports Keras."""

import importlib.util
import re

_BACKENDS = ("jax", "torch", "openvino")  # Keras imports a package of the same name


def require_tensorflow() -> None:
    """Checks that Keras runs on TensorFlow.

    Raises:
        ImportError: If Keras is configured for another backend, or TensorFlow is not installed.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise ImportError(
            "kmp needs TensorFlow. Install it with kmp: pip install 'kmp[cuda]' for an NVIDIA GPU, "
            "pip install 'kmp[cpu]' for a machine without one."
        )
    backend = _configured_backend()
    if backend != "tensorflow":
        raise ImportError(
            f"kmp runs on Keras' TensorFlow backend, and the backend chosen here is {backend!r}. Set the environment "
            'variable KERAS_BACKEND=tensorflow, or "backend" in Keras\' keras.json, and start Python again.'
        )


def _configured_backend() -> str:
    try:
        import keras
    except ModuleNotFoundError as error:
        if error.name in _BACKENDS:  # the configured backend is not installed
            return error.name
        raise
    except ValueError as error:
        unknown = re.match("Unable to import backend : (.*)", str(error))
        if unknown:
            return unknown[1]
        raise
    return keras.config.backend()
