"""The check that runs before anything imports TensorFlow."""

import importlib.util
import json
import os
from pathlib import Path


def require_tensorflow() -> None:
    """Makes sure that Keras will run on TensorFlow.

    Raises:
        ImportError: If Keras is set to another backend, or TensorFlow is not installed; the message says what to do.
    """
    backend = _chosen_backend()
    if backend != "tensorflow":
        raise ImportError(
            f"kmp runs on Keras' TensorFlow backend, and the backend chosen here is {backend!r}. Set the environment "
            'variable KERAS_BACKEND=tensorflow, or "backend" in Keras\' keras.json, before Keras is imported.'
        )
    if importlib.util.find_spec("tensorflow") is None:
        raise ImportError(
            "kmp needs TensorFlow, which comes with one of its extras: pip install 'kmp[cuda]' for an NVIDIA GPU, "
            "pip install 'kmp[cpu]' for a machine without one."
        )


def _chosen_backend() -> str:
    """Reads the choice as Keras does: the environment variable, else the configuration file, else TensorFlow."""
    from_environment = os.environ.get("KERAS_BACKEND")
    if from_environment:
        return from_environment
    home = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras")
    try:
        return json.loads((home / "keras.json").read_text(encoding="utf-8")).get("backend", "tensorflow")
    except (OSError, ValueError, AttributeError):
        return "tensorflow"
