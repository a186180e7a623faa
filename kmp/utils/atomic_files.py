"""Atomic file writes, and a check that a folder is writable."""

import contextlib
import errno
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a temporary path that replaces `path` on exit; if writing fails, `path` is unchanged.

    A symbolic link is followed and its target is replaced. A replaced file keeps its permissions. A path that is not a
    regular file, such as a pipe, and a path to an open file, such as `/dev/stdout`, are yielded themselves and written
    in place.
    """
    if (path.exists() and not path.is_file()) or _points_to_open_file(path):
        yield path
        return
    path = path.resolve()
    partial = partial_path(path)
    try:
        yield partial
        if path.exists():
            shutil.copymode(path, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _points_to_open_file(path: Path) -> bool:
    """Whether a path leads through a process' open files in `/proc`: replacing it would detach the open file."""
    for _ in range(_MAX_SYMLINKS):
        path = path.parent.resolve() / path.name
        if path.is_relative_to("/proc"):
            return True
        if not path.is_symlink():
            return False
        path = path.parent / path.readlink()
    return False


_MAX_SYMLINKS = 40  # Linux' limit


def partial_path(path: Path) -> Path:
    """Returns the temporary path of an atomic write. A file that a killed process left there is overwritten."""
    return path.with_name(f"partial-{path.name}")


def write_json(path: Path, content: Any) -> None:
    """Writes an indented JSON file atomically, or in place where the file cannot be replaced."""
    text = json.dumps(content, indent=1) + "\n"
    try:
        with atomic_write(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        if error.errno not in _CANNOT_REPLACE or not path.exists():
            raise
        path.write_text(text, encoding="utf-8")


# The folder is read-only, or the file is a mount point, as is common in containers.
_CANNOT_REPLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)


def check_writable(folder: Path) -> None:
    """Creates a folder if needed, and checks that files can be created in it.

    Raises:
        OSError: If the folder or a file in it cannot be created.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
