"""Resuming a killed run, on one worker or on several; and saving a model so that no kill and no full disk spoils it."""

import errno
import os
import shutil
from pathlib import Path

import keras
import numpy as np

from kmp.utils import atomic_files

_HDF5_OVERHEAD = 2**14  # bytes for each variable: generous


def save_atomically(model: keras.Model, path: Path) -> None:
    """Saves a model, or its weights where `path` ends in `.weights.h5`; what is there already stays until it is done.

    Raises:
        OSError: If it cannot be written. Nothing has changed then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _refuse_full_disk(model, path.parent)
    try:
        with atomic_files.whole(path) as partial:
            (model.save_weights if path.name.endswith(".weights.h5") else model.save)(partial)
    except NotImplementedError:  # Keras cannot serialize the model; by its class a RuntimeError too, and not the disk's
        raise
    except RuntimeError as error:  # what HDF5 makes of errors of the disk
        raise OSError(errno.EIO, str(error), str(path)) from error


def _refuse_full_disk(model: keras.Model, folder: Path) -> None:
    """Raises an error where HDF5 would run into the end of the disk, on which it can crash the process."""
    variables = [*model.variables, *(getattr(model.optimizer, "variables", None) or ())]
    sizes = [np.prod(v.shape) * np.dtype(keras.backend.standardize_dtype(v.dtype)).itemsize for v in variables]
    needed, free = int(sum(sizes)) + _HDF5_OVERHEAD * (len(sizes) + 4), shutil.disk_usage(folder).free
    if free < needed:
        message = f"{os.strerror(errno.ENOSPC)}: {free} bytes are free, up to {needed} are needed"
        raise OSError(errno.ENOSPC, message, str(folder))
