"""Writes runs as an HTML report."""

import os
from collections.abc import Mapping
from pathlib import Path

import jinja2

from kmp.records import Run
from kmp.report import run_tables
from kmp.report.format_table import both_formats
from kmp.report.run_comparison import comparison, difference
from kmp.report.run_summary import summaries
from kmp.utils import atomic_files, validation
from kmp.utils.names import printable


def html(runs: Mapping[str, Run]) -> str:
    """Returns a self-contained HTML page: verdict, findings, figures, tables and settings.

    Args:
        runs: Runs by name, at least one.

    Raises:
        ValueError: If `runs` is empty.

    Example:
    >>> "0 of 9 steps were skipped." in html({"first": Run([{"step": 9, "overflow_count": 0}])})
    True
    """
    # Imports matplotlib, here because a training that writes its report goes on if that fails.
    from kmp.report.figures import COMPARED, figures, metric_figures

    first, *others = found = summaries(runs)
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


def write(runs: Mapping[str, Run], path: str | os.PathLike[str]) -> Path:
    """Writes the page atomically, and creates its folder if needed.

    Args:
        runs: Runs by name, at least one.
        path: The file.

    Returns:
        `path`, as a `Path`.

    Raises:
        OSError: If the file cannot be written.
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
        raise OSError(
            error.errno, f"the report cannot be written ({error.strerror or error})", str(file)
        ) from error
    return file
