"""Numbers and tables as a report shows them.

Names are as in the log: what prints a text escapes it.
"""

import math
from dataclasses import dataclass

from kmp.utils.float_formats import as_power

TextRow = tuple[str, ...]

UNKNOWN = "unknown"
MAX_ROWS = 40


@dataclass(frozen=True)
class Table:
    """A table of text cells.

    Args:
        columns: The column headings. The first column names the rows.
        rows: The rows.
        note: How to read the table, or why it is empty.
        marked: The index of a row to emphasize, or `None`.
        intro: What the table shows, in one line above it.
    """

    columns: tuple[str, ...] = ()
    rows: tuple[TextRow, ...] = ()
    note: str = ""
    marked: int | None = None
    intro: str = ""


def with_omitted(note: str, count: int, shown: int = MAX_ROWS) -> str:
    """Returns the note of a table with the number of omitted rows."""
    return f"{note} {count - shown} more are not shown." if count > shown else note


def share(value: float | None) -> str:
    """Returns a share in percent. Small and large shares are not rounded to 0 % or 100 %."""
    if value is None or math.isnan(value):
        return UNKNOWN
    if 0 < value < 0.0005:
        return "<0.1%"
    return ">99.9%" if 0.9995 <= value < 1 else f"{value:.1%}".replace(".0%", "%")


def share_of(count: float, total: float) -> str:
    """Returns a count as a share of a total in percent; of a total of zero it is unknown."""
    return share(count / total if total else None)


def number(value: float | None) -> str:
    """Returns a number with three significant digits. A log has the same null for NaN and Inf."""
    if value is None:
        return UNKNOWN
    return f"{value:.3g}" if math.isfinite(value) else "NaN or Inf"


def scale(value: float) -> str:
    """Returns a loss scale, as a power of two if it is one."""
    return UNKNOWN if math.isnan(value) else as_power(value)
