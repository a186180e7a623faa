"""Files that are written whole or not at all, and folders that can be written to."""

import contextlib
import errno
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yields the path to write to, which takes the place of `path` in the end; if writing fails, `path` is as before.

    Of a link, the file that it leads to. A file that takes another's place has its permissions. Written to in place are
    what is no regular file, and an open one that is named as `/dev/stdout` names it.
    """
    if (path.exists() and not path.is_file()) or _leads_to_an_open_file(path):
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


def _leads_to_an_open_file(path: Path) -> bool:
    """Whether a path goes by a process' open files, where to replace the file is to leave the open one behind."""
    for _ in range(_MOST_LINKS):
        path = path.parent.resolve() / path.name
        if path.is_relative_to("/proc"):
            return True
        if not path.is_symlink():
            return False
        path = path.parent / path.readlink()
    return False


_MOST_LINKS = 40  # as Linux follows


def partial_path(path: Path) -> Path:
    """Where a file is written until it is whole; one that a kill left there is written over."""
    return path.with_name(f"partial-{path.name}")


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file whole, for people to read too; in place where its folder allows no other way."""
    text = json.dumps(content, indent=1) + "\n"
    try:
        with whole(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        if error.errno not in _NOT_TO_BE_REPLACED or not path.exists():
            raise
        path.write_text(text, encoding="utf-8")


# A folder that is not writable, or a file that is mounted by itself, as containers have them.
_NOT_TO_BE_REPLACED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)


def check_writable(folder: Path) -> None:
    """Makes a folder, and makes sure that files can be made in it.

    Raises:
        OSError: If it cannot.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
