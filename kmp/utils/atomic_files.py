"""Atomic file writes, and a check that a folder is writable."""

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from kmp.utils import file_locks


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Yields an open binary file that replaces `path` on exit; if writing fails, `path` is unchanged.

    The content is on the disk before it replaces the old one, so that it survives a power failure. The temporary file,
    `.NAME.RANDOM.partial`, is created exclusively beside `path`; those that killed processes left there are removed. A
    symbolic link is followed and its target is replaced. A replaced file keeps its permissions. A path that is not a
    regular file, such as a pipe, and a path to an open file, such as `/dev/stdout`, are written in place.
    """
    if (path.exists() and not path.is_file()) or _points_to_open_file(path):
        with path.open("wb") as in_place:
            yield in_place
        return
    path = path.resolve()
    remove_leftovers(path)
    file, partial = _create_partial(path)
    try:
        with file:
            if path.exists():
                shutil.copymode(path, partial)
            yield file
            file.flush()
            os.fsync(file.fileno())
            try:
                partial.replace(path)  # before the file is closed and its lock released
            except OSError as error:
                if error.errno not in _IN_USE:
                    raise
                file.close()  # Windows and some shared folders do not rename an open file
                partial.replace(path)
        _sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def atomic_copy(source: Path, path: Path) -> None:
    """Makes `path` a copy of a file that is only replaced as a whole, never changed. Replaces `path` atomically.

    Both are the same file on the disk where the file system supports that, so nothing is written.
    """
    partial = _partial_path(path)
    try:
        partial.hardlink_to(source)
    except OSError:
        with source.open("rb") as file, atomic_write(path) as copy:
            shutil.copyfileobj(file, copy)
        return
    try:
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)  # still there if both were the same file before
    _sync_folder(path.parent)


def remove_leftovers(path: Path) -> None:
    """Removes the temporary files of atomic writes to `path` that killed processes did not finish."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.partial")
    with contextlib.suppress(OSError):  # another user's file
        for candidate in [entry for entry in path.parent.iterdir() if pattern.fullmatch(entry.name)]:
            _remove_unlocked(candidate)


def _create_partial(path: Path) -> tuple[BinaryIO, Path]:
    """Creates a temporary file for `path`, locked so that no other process takes it for a leftover."""
    for _ in range(_MAX_ATTEMPTS):
        partial = _partial_path(path)
        file = partial.open("xb")
        if file_locks.try_lock(file.fileno()) is not False and partial.exists():
            return file, partial
        file.close()  # another process removes it, as it was not locked yet
        partial.unlink(missing_ok=True)
    raise OSError(errno.EAGAIN, "Other processes removed all temporary files of this path", str(path))


def _partial_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


def _remove_unlocked(partial: Path) -> None:
    """Removes a regular file unless a process has locked it, or files cannot be locked."""
    with contextlib.suppress(OSError):
        descriptor = os.open(partial, os.O_RDONLY | _NO_FOLLOW)
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode) and file_locks.try_lock(descriptor, shared=True):
                partial.unlink()
        finally:
            os.close(descriptor)


_MAX_ATTEMPTS = 100
_IN_USE = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.ETXTBSY)

# Neither follow a link nor wait for the writer of a pipe. Windows has neither.
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def _sync_folder(folder: Path) -> None:
    """Writes a folder's new entries to the disk, where the platform and the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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


def write_json(path: Path, content: Any) -> None:
    """Writes an indented JSON file atomically, or in place where the file cannot be replaced."""
    text = json.dumps(content, indent=1) + "\n"
    try:
        with atomic_write(path) as file:
            file.write(text.encode())
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
