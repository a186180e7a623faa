"""Writes runs as an HTML report."""

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2

from kmp.records import Run
from kmp.report import run_tables
from kmp.report.format_table import both_formats
from kmp.report.run_comparison import comparison, difference
from kmp.report.run_summary import RunSummary, summaries
from kmp.utils import atomic_files, validation
from kmp.utils.names import printable

# The title of each report, in the template, within its first bytes.
_TITLE = b"<title>kmp report: "
_HEAD_SIZE = 1000


def html(runs: Mapping[str, Run]) -> str:
    """Returns a self-contained HTML page: verdict, findings, figures, tables and settings.

    Args:
        runs: Runs by name, at least one.

    Raises:
        ValueError: If `runs` is empty.

    Example:
    >>> import kmp
    >>> from kmp.records import Record, Run
    >>> run = Run([Record(step=9, overflow_count=0)])
    >>> "0 of 9 steps were skipped." in kmp.report.html({"first": run})
    True
    """
    return _html_of(summaries(runs))


def _html_of(found: Sequence[RunSummary]) -> str:
    # Imports matplotlib, here because a training that writes its report goes on if that fails.
    from kmp.report.figures import COMPARED, figures, metric_figures

    first, *others = found
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        # Markup, a subclass of str, is the page itself.
        finalize=lambda value: printable(value) if type(value) is str else value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.jinja").render(
        runs=found,
        figures={run.name: figures(run) for run in found},
        compared=COMPARED if others else (),
        comparison=comparison(found),
        differences=[difference(first, other) for other in others],
        metric_figures=metric_figures(found),
        run_tables=run_tables,
        both_formats=both_formats,
    )
    return page.strip() + "\n"


def check_target(path: Path, argument: str) -> None:
    """Raises an error if a file exists that is not a report of kmp, which stays as it is.

    An empty file, and what is no regular file, such as a pipe, can be written.

    Args:
        path: The file that a report is to be written to.
        argument: How the caller names another one, for the message.

    Raises:
        FileExistsError: If kmp did not write the file.
        OSError: If it cannot be read.
    """
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open("rb") as file:
        if _TITLE in file.read(_HEAD_SIZE):
            return
    raise FileExistsError(
        errno.EEXIST,
        f"the file exists, and is not a report of kmp. Delete it, or name another one: {argument}",
        str(path),
    )


def write(runs: Mapping[str, Run], path: str | os.PathLike[str]) -> Path:
    """Writes the HTML page to a file, atomically, and creates its folder if needed.

    Args:
        runs: Runs by name, at least one.
        path: The file. If it exists, it has to be empty or a report of kmp, which is replaced.

    Returns:
        `path`, as a `Path`.

    Raises:
        FileExistsError: If the file exists, and kmp did not write it.
        OSError: If the file cannot be written.
        ValueError: If `runs` is empty.

    Example:
    >>> import kmp, pathlib, tempfile
    >>> from kmp.records import Record, Run
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "report.html"
    >>> kmp.report.write({"first": Run([Record(step=9)])}, file).name
    'report.html'
    """
    validation.instance("path", path, (str, os.PathLike), "the path of the HTML file")
    check_target(Path(path), "`path`")
    return write_summaries(summaries(runs), Path(path))


def write_summaries(found: Sequence[RunSummary], file: Path) -> Path:
    """Does the same as `write`, of runs that are summarized already, to a file that was checked."""
    page = _html_of(found)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_files.atomic_write(file) as temporary:
            temporary.write(page.encode())
    except OSError as error:
        raise OSError(
            error.errno, f"the report cannot be written ({error.strerror or error})", str(file)
        ) from error
    return file
