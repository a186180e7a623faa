"""The check of Keras' backend, which runs before anything imports Keras."""

import importlib.util
import re

_BACKENDS = ("jax", "torch", "openvino")  # Keras imports a package of the same name


def has_tensorflow() -> bool:
    """Whether TensorFlow is installed."""
    return importlib.util.find_spec("tensorflow") is not None


def require_tensorflow() -> None:
    """Raises an `ImportError` without TensorFlow, or if Keras is configured for another backend."""
    if not has_tensorflow():
        raise ImportError(
            "Without TensorFlow, kmp only reads logs: `kmp report`, `kmp.load_run`, `kmp.advise`."
            " Install it with kmp: pip install 'kmp[cuda]' for an NVIDIA GPU, "
            "pip install 'kmp[cpu]' for a machine without one."
        )
    try:
        import keras

        backend = keras.config.backend()
    except ModuleNotFoundError as error:
        if error.name not in _BACKENDS:
            raise
        backend = error.name  # it is configured, and not installed
    except ValueError as error:
        unknown = re.match("Unable to import backend : (.*)", str(error))
        if not unknown:
            raise
        backend = unknown[1]
    if backend != "tensorflow":
        raise ImportError(
            f"kmp runs on Keras' TensorFlow backend, and the backend chosen here is {backend!r}."
            ' Set the environment variable KERAS_BACKEND=tensorflow, or "backend" in Keras\''
            " keras.json, and start Python again."
        )
