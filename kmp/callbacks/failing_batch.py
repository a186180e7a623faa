"""Saves the batch of the first step that no loss scale prevents from being skipped."""

import errno
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kmp.utils import atomic_files, user_messages
from kmp.utils.float_formats import BFLOAT16

_PARTS = ("x", "y", "sample_weight")
_STEP = "kmp_step"  # what tells a file of kmp from another one


class FailingBatch:
    """The file of a failing batch.

    The arrays are `x`, `y` and `sample_weight`; of several tensors in one, `x/KEY` or `x/INDEX`.
    bfloat16 is saved as float32, which NumPy can read without another package.

    Args:
        path: The file.

    Raises:
        OSError: If `path` cannot be written, or has a file that is not one of these.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_saved = False
        atomic_files.check_file_writable(path, "the failing batch")
        if not _can_be_replaced(path):
            message = "the file exists, and is not a batch of kmp. Delete it, or name another one:"
            raise FileExistsError(errno.EEXIST, f"{message} `failing_batch`", str(path))

    def save(self, step: int, batch: Sequence[Any] | None) -> str:
        """Saves the batch of a step, the first time. Returns a sentence for the warning of it.

        Args:
            step: The number of the step.
            batch: What `train_step` got, as far as it is known; `None` if it was not kept.
        """
        if self._is_saved:
            return ""
        if batch is None:
            return " The batch was not saved: it was not kept."
        try:
            arrays: dict[str, Any] = {_STEP: step}
            for name, part in zip(_PARTS, batch, strict=False):
                arrays |= _arrays(name, part)
            with atomic_files.atomic_write(self._path) as file:
                np.savez(file, **arrays)
        except Exception as error:  # of the disk, or too little memory
            return f" The batch was not saved: {user_messages.one_line(error)}."
        self._is_saved = True
        return f" The batch is saved in {str(self._path)!r}."


def _arrays(name: str, part: Any) -> dict[str, np.ndarray]:
    """Returns the arrays in a part of a batch, by their names in the file."""
    if part is None:
        return {}
    if isinstance(part, Mapping):
        items: Any = part.items()
    elif isinstance(part, list | tuple):
        items = enumerate(part)
    else:
        values = np.asarray(part)
        is_readable = values.dtype.name != BFLOAT16.name
        return {name: values if is_readable else values.astype("float32")}
    arrays: dict[str, np.ndarray] = {}
    for key, each in items:
        arrays |= _arrays(f"{name}/{key}", each)
    return arrays


def _can_be_replaced(path: Path) -> bool:
    """Whether there is no file, an empty one, no regular one, or a batch that kmp saved."""
    if not path.is_file() or not path.stat().st_size:
        return True
    try:
        with zipfile.ZipFile(path) as file:
            return f"{_STEP}.npy" in file.namelist()
    except zipfile.BadZipFile:
        return False
