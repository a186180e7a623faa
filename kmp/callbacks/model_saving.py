"""Saves a model atomically: a kill or a full disk leaves the previous file unchanged."""

import errno
import os
import shutil
from pathlib import Path

import keras
import numpy as np

from kmp.utils import atomic_files

_HDF5_OVERHEAD = 2**14  # bytes per variable, an upper bound


def save_atomically(model: keras.Model, path: Path) -> None:
    """Saves a model, or only its weights if `path` ends in `.weights.h5`. Replaces an existing file atomically.

    Raises:
        OSError: If it cannot be written. An existing file is unchanged then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _check_disk_space(model, path.parent)
    try:
        with atomic_files.atomic_write(path) as partial:
            (model.save_weights if path.name.endswith(".weights.h5") else model.save)(partial)
    except NotImplementedError:  # Keras cannot serialize the model; this class is a RuntimeError, but no disk error
        raise
    except RuntimeError as error:  # h5py raises disk errors as this class
        raise OSError(errno.EIO, str(error), str(path)) from error


def _check_disk_space(model: keras.Model, folder: Path) -> None:
    """Raises an `OSError` if the model may not fit on the disk: HDF5 can crash the process when the disk is full."""
    variables = [*model.variables, *(getattr(model.optimizer, "variables", None) or ())]
    sizes = [np.prod(v.shape) * np.dtype(keras.backend.standardize_dtype(v.dtype)).itemsize for v in variables]
    needed, free = int(sum(sizes)) + _HDF5_OVERHEAD * (len(sizes) + 4), shutil.disk_usage(folder).free
    if free < needed:
        message = f"{os.strerror(errno.ENOSPC)}: {free} bytes are free, up to {needed} are needed"
        raise OSError(errno.ENOSPC, message, str(folder))
