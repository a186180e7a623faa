"""Atomic file writes, and checks that files and folders are writable."""

import contextlib
import errno
import glob
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

# seconds since the last write to a temporary file, after which its process must have been killed
_ABANDONED = 3600
# A mount point, as is common in containers, or another user's file in a shared folder.
_CANNOT_REPLACE = (errno.EBUSY, errno.EACCES, errno.EPERM)


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Yields a binary file that replaces `path` on exit; if writing fails, `path` is unchanged.

    The content is on the disk before it replaces the old one, so that it survives a power failure.
    The temporary file, `.NAME.RANDOM.partial`, is created beside `path`; those that killed
    processes left there are removed after an hour. A symbolic link is followed and its target is
    replaced. A replaced file keeps its permissions. What cannot be replaced is written in place: a
    pipe, a mount point, and a file in a folder without write permission.
    """
    path = path.resolve()
    if path.exists() and (not path.is_file() or not os.access(path.parent, os.W_OK)):
        with path.open("wb") as in_place:
            yield in_place
        return
    with contextlib.suppress(OSError):  # another user's file
        for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
            if time.time() - leftover.stat().st_mtime > _ABANDONED:
                leftover.unlink()
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    file = partial.open("xb")
    try:
        with file:
            if path.exists():
                shutil.copymode(path, partial)
            yield file
            file.flush()
            os.fsync(file.fileno())
        try:
            partial.replace(path)
        except OSError as error:
            if error.errno not in _CANNOT_REPLACE or not path.exists():
                raise
            shutil.copyfile(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Writes an indented JSON file atomically, or in place where the file cannot be replaced."""
    text = json.dumps(content, indent=1) + "\n"
    with atomic_write(path) as file:
        file.write(text.encode())


def check_writable(folder: Path) -> None:
    """Creates a folder if needed; raises an `OSError` if it or a file in it cannot be created."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def check_file_writable(path: Path, content: str) -> None:
    """Creates the folder of a file if needed; raises an `OSError` if the file cannot be written.

    Args:
        path: The file.
        content: What is to be written, for the error: such as `"the report"`.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        check_writable(path.parent)
    except OSError as error:
        message = f"{content} cannot be written ({error.strerror or error})"
        raise OSError(error.errno, message, str(path)) from error
