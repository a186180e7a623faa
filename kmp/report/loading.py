"""Loads the runs of a report."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from kmp.records import Run, load_run
from kmp.records.jsonl import FILE_NAME
from kmp.records.run import log_file
from kmp.utils import validation
from kmp.utils.names import unique_names


def load(paths: Sequence[str | os.PathLike[str]]) -> dict[str, Run]:
    """Reads logs and names each run after its folder, with parent folders if two runs share a name.

    Draws a progress bar on standard error, if that is a terminal.

    Args:
        paths: Each a `.jsonl` file, or a `log_dir` that contains `kmp.jsonl`.

    Returns:
        The runs by name, in the order of `paths`.

    Raises:
        FileNotFoundError: If there is no log.
        ValueError: If this version of kmp cannot read a log. The message names file, line and key.

    Example:
    >>> import kmp, pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for name in ("float16", "float32"):
    ...     (folder / name).mkdir()
    ...     _ = (folder / name / "kmp.jsonl").write_text('{"schema": 1, "kind": "header"}')
    >>> list(kmp.report.load([folder / "float16", folder / "float32"]))
    ['float16', 'float32']
    """
    is_list = isinstance(paths, Sequence) and not isinstance(paths, str)
    if not is_list or not all(isinstance(path, str | os.PathLike) for path in paths):
        raise TypeError(validation.message("paths", paths, "a list of paths"))
    console = Console(stderr=True)
    files = track(
        [log_file(path) for path in paths],
        "Loading",
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    runs = list(map(load_run, files))
    return dict(zip(_names([Path(path).resolve() for path in paths]), runs, strict=True))


def _names(paths: Sequence[Path]) -> list[str]:
    """Returns the shortest unique name of each run, and numbers duplicates."""
    runs = []
    for path in paths:
        if path.name == FILE_NAME:
            folder = path.parent
        else:  # a log of another name is taken as a folder
            folder = path.with_suffix("") if path.is_file() else path
        runs.append(folder.parts[1:] or folder.parts)
    names = {parts: parts[-1] for parts in runs}
    for length in range(2, max(map(len, runs), default=0) + 1):
        counts = Counter(names.values())
        for parts, name in list(names.items()):
            if counts[name] > 1:
                names[parts] = "/".join(parts[-length:])
    return unique_names(names[parts] for parts in runs)
