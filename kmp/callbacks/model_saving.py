"""Which process writes files, and a model's file as an atomic write: if it fails, the previous file is unchanged."""

from pathlib import Path

import keras
import tensorflow as tf

from kmp.backend import model_files
from kmp.utils import atomic_files


def save_atomically(model: keras.Model, path: Path) -> None:
    """Saves a model, or only its weights if `path` ends in `.weights.h5`. Replaces an existing file atomically.

    The weights are held in host memory first, where their size is that of the file.

    Raises:
        OSError: If it cannot be written, as on a full disk or at a quota. An existing file is unchanged then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_files.atomic_write(path) as file:
        model_files.write_model(model, file, weights_only=path.name.endswith(".weights.h5"))


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process is the chief worker, which writes the files."""
    resolver = strategy.cluster_resolver
    if resolver is None or not resolver.task_type:
        return True
    has_chief = "chief" in resolver.cluster_spec().as_dict()
    return resolver.task_type == "chief" or (not has_chief and (resolver.task_type, resolver.task_id) == ("worker", 0))
