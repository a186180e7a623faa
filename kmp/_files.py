"""Files that are written whole or not at all, and folders that can be written to."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yields the path to write to, which takes the place of `path` in the end; if writing fails, `path` is as before.

    What is no regular file, such as `/dev/stdout`, is written to as it is; of a link, the file that it leads to.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    path = path.resolve()
    partial = partial_of(path)
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def partial_of(path: Path) -> Path:
    """Where a file is written until it is whole; one that a kill left there is written over."""
    return path.with_name(f"partial-{path.name}")


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file whole, for people to read too."""
    with whole(path) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def check_writable(folder: Path) -> None:
    """Makes a folder, and makes sure that files can be made in it.

    Raises:
        OSError: If it cannot.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
