"""A table of texts, for the terminal and for the page."""

from dataclasses import dataclass

MAX_ROWS = 40


@dataclass(frozen=True)
class Table:
    """A table of text cells.

    Args:
        columns: The column headings. The first column names the rows.
        rows: The rows.
        note: How to read the table, or why it is empty.
        marked: The index of a row to emphasize, or `None`.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str
    marked: int | None = None


def with_omitted(note: str, count: int) -> str:
    """Returns the note of a table with the number of omitted rows."""
    return f"{note} {count - MAX_ROWS} more are not shown." if count > MAX_ROWS else note
