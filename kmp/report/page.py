"""Loads runs and writes them as an HTML report."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
from rich.console import RenderableType

from kmp.records import FILE_NAME, Run, load_run
from kmp.report import figures, terminal
from kmp.report.run_summary import RunSummary, code_lines, comparison
from kmp.utils import atomic_files, unique_names

PathLike = str | os.PathLike[str]


def load(paths: Sequence[PathLike]) -> dict[str, Run]:
    """Reads logs and names each run after its folder, with parent folders if two runs share a name.

    Args:
        paths: Each a `.jsonl` file, or a `log_dir` that contains `kmp.jsonl`.

    Returns:
        The runs by name, in the order of `paths`.

    Raises:
        FileNotFoundError: If there is no log.
        ValueError: If this version of kmp cannot read a log.

    Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("float16", "float32"):
    ...     (folder / name).mkdir()
    ...     _ = (folder / name / "kmp.jsonl").write_text('{"schema": 3, "kind": "header"}')
    >>> list(load([folder / "float16", folder / "float32"]))
    ['float16', 'float32']
    """
    runs = [load_run(path) for path in paths]
    return dict(zip(_names([Path(path).resolve() for path in paths]), runs, strict=True))


def summary(runs: Mapping[str, Run]) -> RenderableType:
    """Returns a summary to print with `rich`: verdict, findings and counts, or a comparison of several runs.

    Args:
        runs: Runs by name, at least one.

    Returns:
        A renderable for `rich.print`.

    Example:
    >>> import rich
    >>> rich.print(summary({"first": Run([{"step": 9}])}))  # doctest: +ELLIPSIS
    first: 9 steps
    0 of 9 steps were skipped. No gradients were sampled, so underflow is unknown.
    ...
    """
    return terminal.render(_summaries(runs))


def html(runs: Mapping[str, Run]) -> str:
    """Returns a self-contained HTML page: verdict, findings, figures, tables and settings.

    Args:
        runs: Runs by name, at least one.

    Example:
    >>> "0 of 9 steps were skipped." in html({"first": Run([{"step": 9}])})
    True
    """
    summaries = _summaries(runs)
    figures_by_run = {run.name: figures.figures(run) for run in summaries}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    compared = figures.COMPARED if len(summaries) > 1 else ()
    page = environment.get_template("report.html.jinja").render(
        runs=summaries,
        figures=figures_by_run,
        compared=compared,
        comparison=comparison(summaries),
        code_lines=code_lines,
    )
    return page.strip() + "\n"


def write(runs: Mapping[str, Run], path: PathLike) -> Path:
    """Writes the page atomically, and creates its folder if needed.

    Args:
        runs: Runs by name, at least one.
        path: The file.

    Returns:
        `path`, as a `Path`.

    Raises:
        OSError: If the file cannot be written.

    Example:
    >>> import tempfile
    >>> write({"first": Run([{"step": 9}])}, Path(tempfile.mkdtemp()) / "report.html").name
    'report.html'
    """
    file = Path(path)
    page = html(runs)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_files.atomic_write(file) as temporary:
            temporary.write(page.encode())
    except OSError as error:
        raise OSError(error.errno, f"the report cannot be written ({error.strerror or error})", str(file)) from error
    return file


def _summaries(runs: Mapping[str, Run]) -> list[RunSummary]:
    if not runs:
        raise ValueError("`runs` must hold at least one run.")
    return [RunSummary(name, run) for name, run in runs.items()]


def _names(paths: Sequence[Path]) -> list[str]:
    """Returns the shortest unique name of each run, and numbers duplicates."""
    parts = [_parts(path) for path in paths]
    names = [part[-1] for part in parts]
    for length in range(2, max(map(len, parts), default=0) + 1):
        counts = Counter(name for name, _ in set(zip(names, parts, strict=True)))
        names = [
            "/".join(part[-length:]) if counts[name] > 1 else name for name, part in zip(names, parts, strict=True)
        ]
    return unique_names(names)


def _parts(path: Path) -> tuple[str, ...]:
    """Returns the path's parts without the default file name, or without the file's suffix."""
    if path.name == FILE_NAME:
        path = path.parent
    elif path.is_file():
        path = path.with_suffix("")
    return path.parts[1:] or path.parts
