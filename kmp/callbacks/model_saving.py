"""Saves a model atomically: a kill or a failed write leaves the previous file unchanged."""

from pathlib import Path

import keras

from kmp.backend import model_files
from kmp.utils import atomic_files


def save_atomically(model: keras.Model, path: Path) -> None:
    """Saves a model, or only its weights if `path` ends in `.weights.h5`. Replaces an existing file atomically.

    The weights are held in host memory first, where their size is that of the file.

    Raises:
        OSError: If it cannot be written, as on a full disk or at a quota. An existing file is unchanged then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write = model_files.write_weights if path.name.endswith(".weights.h5") else model_files.write_model
    with atomic_files.atomic_write(path) as file:
        write(model, file)
