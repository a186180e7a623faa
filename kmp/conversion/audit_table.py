"""An audit as a table, in a terminal and in a notebook."""

import io
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kmp.conversion.audit_row import Row
from kmp.utils import FLOAT32

_WIDTH = 120  # characters, where there is no terminal


def render(model: str, rows: Sequence[Row]) -> RenderableType:
    """Returns the table of layers, what it comes to, and the dimensions to pad."""
    sources = list(dict.fromkeys(row.source for row in rows if row.reason and row.source))
    shown: list[RenderableType] = [_table(model, rows, sources), Text(_summary(rows))]
    shown += [Text(f"[{place}] {source}") for place, source in enumerate(sources, 1)]
    idle = [f"  {row.path}: {', '.join(row.tensor_cores)}" for row in rows if row.tensor_cores]
    if idle:
        shown.append(
            Text(
                "\n".join(
                    [
                        "Not a multiple of 8, which makes Tensor Cores slow or leaves them idle; pad where you can:",
                        *idle,
                    ]
                )
            )
        )
    return Group(*shown)


def as_text(model: str, rows: Sequence[Row]) -> str:
    """Returns it without colours."""
    console = Console(file=io.StringIO(), width=_WIDTH, force_terminal=False, force_jupyter=False)
    console.print(render(model, rows))
    return console.file.getvalue().rstrip()  # type: ignore[attr-defined]


def as_html(model: str, rows: Sequence[Row]) -> str:
    """Returns it as a notebook shows it."""
    console = Console(file=io.StringIO(), width=_WIDTH, record=True, force_jupyter=False)
    console.print(render(model, rows))
    return console.export_html(inline_styles=True, code_format="<pre style='line-height: 1.2'>{code}</pre>")


def _table(model: str, rows: Sequence[Row], sources: list[str]) -> Table:
    has_batch = any(row.amax is not None for row in rows)
    table = Table(title=f"{model}: now, and as kmp.convert leaves it", title_justify="left", box=None, pad_edge=False)
    table.add_column("layer", overflow="fold", min_width=12)
    table.add_column("class", overflow="fold")
    table.add_column("now", no_wrap=True)
    table.add_column("after", no_wrap=True)
    for name in ("largest", "drift") if has_batch else ():
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold", ratio=1, min_width=20)
    for row in rows:
        table.add_row(*_cells(row, has_batch, sources), style=_style(row))
    return table


def _cells(row: Row, has_batch: bool, sources: list[str]) -> list[Text]:
    dtypes = dict.fromkeys(dtype for dtype in (row.compute_dtype, row.variable_dtype, row.output_dtype) if dtype)
    why = row.reason + (f" [{sources.index(row.source) + 1}]" if row.reason and row.source else "")
    cells = [row.path, row.class_name, "/".join(dtypes), row.planned_dtype]
    if has_batch:
        cells += [_largest(row), _drift(row)]
    return [Text(cell) for cell in (*cells, why)]


def _style(row: Row) -> str:
    if row.overflows:
        return "red"
    return "yellow" if row.planned_dtype == FLOAT32.name else ""


def _largest(row: Row) -> str:
    if row.amax is None:
        return ""
    return f"{row.amax:.3g}" + (f" ({row.beyond:.2%} beyond)" if row.beyond else "")


def _drift(row: Row) -> str:
    if row.overflows:
        return "overflows"
    return "" if row.drift is None else f"{row.drift:.1e}"


def _summary(rows: Sequence[Row]) -> str:
    computing = [row for row in rows if row.class_name != "InputLayer"]
    count = sum(row.planned_dtype == FLOAT32.name for row in computing)
    told = f"{count} of {len(computing)} are float32 then"
    overflowing = [row.path for row in rows if row.overflows]
    if overflowing:
        told += (
            f"; with this batch overflow: {', '.join(overflowing)}. kmp.convert(model, batch=...) keeps them float32"
        )
    return f"{told}."
