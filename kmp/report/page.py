"""Loads runs and writes them as an HTML report."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
from rich.console import Console, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from kmp.records import FILE_NAME, RUN_EXPECTED, Run, log_file
from kmp.report import figures, terminal
from kmp.report.run_comparison import comparison, difference
from kmp.report.run_summary import RunSummary
from kmp.report.text_formats import code_lines
from kmp.utils import atomic_files, printable, unique_names, validation

PathLike = str | os.PathLike[str]


def load(paths: Sequence[PathLike]) -> dict[str, Run]:
    """Reads logs and names each run after its folder, with parent folders if two runs share a name.

    Draws a progress bar on standard error, if that is a terminal.

    Args:
        paths: Each a `.jsonl` file, or a `log_dir` that contains `kmp.jsonl`.

    Returns:
        The runs by name, in the order of `paths`.

    Raises:
        FileNotFoundError: If there is no log.
        TypeError: If `paths` is not a list of paths.
        ValueError: If this version of kmp cannot read a log. The message names file, line and key.

    Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("float16", "float32"):
    ...     (folder / name).mkdir()
    ...     _ = (folder / name / "kmp.jsonl").write_text('{"schema": 1, "kind": "header"}')
    >>> list(load([folder / "float16", folder / "float32"]))
    ['float16', 'float32']
    """
    is_list = isinstance(paths, Sequence) and not isinstance(paths, str)
    if not is_list or not all(isinstance(path, str | os.PathLike) for path in paths):
        raise TypeError(validation.message("paths", paths, "a list of paths"))
    runs = _load_with_progress(paths)
    return dict(zip(_names([Path(path).resolve() for path in paths]), runs, strict=True))


def summary(runs: Mapping[str, Run]) -> RenderableType:
    """Returns a summary to print with `rich`: verdict, findings and counts, or a comparison of several runs.

    Args:
        runs: Runs by name, at least one.

    Returns:
        A renderable for `rich.print`.

    Raises:
        TypeError: If `runs` is not a dictionary of runs.
        ValueError: If `runs` is empty.

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

    Raises:
        TypeError: If `runs` is not a dictionary of runs.
        ValueError: If `runs` is empty.

    Example:
    >>> "0 of 9 steps were skipped." in html({"first": Run([{"step": 9}])})
    True
    """
    summaries = _summaries(runs)
    figures_by_run = {run.name: figures.figures(run) for run in summaries}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_shown,
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
        differences=[difference(summaries[0], other) for other in summaries[1:]],
        metric_figures=figures.metric_figures(summaries),
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
        TypeError: If an argument has the wrong type.
        ValueError: If `runs` is empty.

    Example:
    >>> import tempfile
    >>> write({"first": Run([{"step": 9}])}, Path(tempfile.mkdtemp()) / "report.html").name
    'report.html'
    """
    validation.instance("path", path, (str, os.PathLike), "the path of the HTML file")
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
    expected = "a dictionary of runs by name, at least one"
    validation.instance("runs", runs, Mapping, expected)
    if not runs:
        raise ValueError(validation.message("runs", runs, expected))
    for name, run in runs.items():
        validation.instance("runs", name, str, "a dictionary with strings as keys")
        validation.instance(f"runs[{name!r}]", run, Run, RUN_EXPECTED)
    return [RunSummary(name, run) for name, run in runs.items()]


def _load_with_progress(paths: Sequence[PathLike]) -> list[Run]:
    console = Console(stderr=True)
    columns = (TextColumn("Loading"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        files = [log_file(path) for path in paths]
        progress.add_task("", total=sum(file.stat().st_size for file in files if file.is_file()))
        task = progress.tasks[0]

        def advance(size: int) -> None:
            task.completed += size  # the bar is drawn by a timer: `progress.advance` would take longer than the loading

        return [Run.load(file, allow_truncated=True, on_read=advance) for file in files]


def _shown(value: object) -> object:
    return printable(value) if type(value) is str else value  # Markup, a subclass, is the page itself


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
