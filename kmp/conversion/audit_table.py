"""The result of an audit, displayed as a table in terminals and notebooks."""

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kmp.conversion.plan import Plan
from kmp.conversion.precision import NEEDS_FLOAT32
from kmp.conversion.step_traffic import StepTraffic
from kmp.diagnosis.format_errors import FormatErrors, formats_compared
from kmp.utils.displayed import Displayed
from kmp.utils.float_formats import DTYPES_16_BIT, FLOAT32
from kmp.utils.names import printable

_MOST_IN_SUMMARY = 6
_PAD = "Not divisible by 8, so Tensor Cores are slow or not used. Pad these dimensions if possible:"


@dataclass(frozen=True)
class AuditRow:
    """The audit result for one layer, or for one operation of a functional graph.

    Args:
        path: Its name, prefixed with the names of its parents, joined by `/`.
        class_name: The name of its class.
        compute_dtype: Its current compute dtype; the output dtype of an operation.
        variable_dtype: The current dtype of its weights; `None` for an operation.
        output_dtype: Its current output dtype; `None` if Keras does not know it.
        category: `"float32"`, `"follows its inputs"`, or the 16-bit dtype of the policy.
        reason: Why it is in this category, or why it would stay float32.
        source: The source of the rule.
        planned_dtype: Its compute dtype after `kmp.convert`; the current one if the model already
            computes in 16 bits or is quantized, or if `kmp.convert` raises an error for it.
        tensor_cores: Dimensions not divisible by 8, each with the padded size; empty if it stays
            float32.
        amax: With a batch: the largest magnitude of its finite outputs in float32.
        overflow_share: With a batch: the share of its float32 outputs that exceed the range of the
            16-bit dtype, or are NaN or Inf.
        underflow_share: With a batch: the share of its nonzero float32 outputs that the 16-bit
            dtype flushes to zero.
        relative_error: With a batch: the L2 norm of the difference between its outputs in the
            candidate and in float32, divided by the norm of the float32 outputs; `None` if either
            has NaN or Inf.
        overflows: With a batch: whether the candidate's outputs have NaN or Inf while the float32
            outputs are finite.
        other_relative_error: With a batch: the same error in the other 16-bit format.
        overflows_in_other: With a batch: whether its outputs have NaN or Inf in that format only.

    Example:
    >>> import keras, kmp
    >>> hidden, last = keras.layers.Dense(12, name="hidden"), keras.layers.Dense(2)
    >>> audit = kmp.audit(keras.Sequential([keras.Input((8,)), hidden, last]))
    >>> row = audit.rows[1]
    >>> row.path, row.compute_dtype, row.planned_dtype, row.tensor_cores
    ('hidden', 'float32', 'float16', ('units 12 -> 16',))
    """

    path: str
    class_name: str
    compute_dtype: str
    variable_dtype: str | None
    output_dtype: str | None
    category: str
    reason: str
    source: str
    planned_dtype: str
    tensor_cores: tuple[str, ...] = ()
    amax: float | None = None
    overflow_share: float | None = None
    underflow_share: float | None = None
    relative_error: float | None = None
    overflows: bool = False
    other_relative_error: float | None = None
    overflows_in_other: bool = False


@dataclass(frozen=True, repr=False)
class Audit(Displayed):
    """The result of `kmp.audit`, which displays as a table in terminals and notebooks.

    Args:
        model: The model's name.
        rows: One row for each layer and operation, in graph order, parents before children.
        plan: The plan that `kmp.convert` would use for the float32 model. It can be edited, saved,
            and passed to `kmp.convert`.
        conversion_error: The message of the `ValueError` that `kmp.convert` raises for this model;
            empty if it does not.
        notes: One sentence for each output of the model that is in 16 bits.
        traffic: The float32 part of the bytes of a training step. `None` for a model that does not
            compute in 16 bits, is no graph of layers with known shapes, or cannot be traced.
        jit_compile: A sentence: whether Keras compiles the model with XLA, and why not if not.
        formats: With a batch: the relative error of the model's outputs in the 16-bit format of the
            candidate, and then in the other one, without loss scales and gradients. Empty if the
            outputs have NaN or Inf in float32.

    Example:
    >>> import keras, kmp
    >>> hidden, last = keras.layers.Dense(8), keras.layers.Dense(2, "softmax", name="last")
    >>> audit = kmp.audit(keras.Sequential([keras.Input((8,)), hidden, last]))
    >>> [row.path for row in audit.needs_float32]
    ['last']
    """

    model: str
    rows: tuple[AuditRow, ...]
    plan: Plan
    conversion_error: str = ""
    notes: tuple[str, ...] = ()
    traffic: StepTraffic | None = None
    jit_compile: str = ""
    formats: tuple[FormatErrors, ...] = ()

    @property
    def needs_float32(self) -> tuple[AuditRow, ...]:
        """The rows of layers and operations that 16 bits make inaccurate or let overflow."""
        return tuple(row for row in self.rows if row.category == NEEDS_FLOAT32)

    def to_dict(self) -> dict[str, Any]:
        """Returns the audit as a dict for JSON, without the fields of rows that are `None`."""
        return asdict(
            self,
            dict_factory=lambda items: {key: value for key, value in items if value is not None},
        )

    @property
    def summary(self) -> str:
        """How many layers and operations need float32, and the first of them with the reasons."""
        kept = [row for row in self._computing if row.planned_dtype == FLOAT32.name]
        kept.sort(key=lambda row: not (row.overflows or row.reason))
        lines = [self.model, self._count_or_error]
        for row in kept[:_MOST_IN_SUMMARY]:
            reason = f": {row.reason}" if row.reason else ""
            lines.append(f"  {row.path} ({row.class_name}){reason}")
        if len(kept) > _MOST_IN_SUMMARY:
            lines.append(f"  and {len(kept) - _MOST_IN_SUMMARY} more")
        lines += [*self._format_lines, *self._step_lines, *self.notes[:1]]
        return "\n".join(map(printable, lines))

    @property
    def _computing(self) -> list[AuditRow]:
        return [row for row in self.rows if row.class_name != "InputLayer"]

    @property
    def _format_lines(self) -> list[str]:
        """The comparison of both formats, as text."""
        return [formats_compared("With this batch", self.formats)] if self.formats else []

    @property
    def _step_lines(self) -> list[str]:
        """What the audit says about a training step."""
        traffic = [] if self.traffic is None else [str(self.traffic), *self.traffic.largest_causes]
        return [*traffic, *filter(None, [self.jit_compile])]

    @property
    def _count_or_error(self) -> str:
        if self.conversion_error:
            return f"kmp.convert cannot convert this model. {self.conversion_error}"
        computing = self._computing
        count = sum(row.planned_dtype == FLOAT32.name for row in computing)
        # `kmp.convert` returns a model that computes in 16 bits as it is.
        is_converted = any(row.compute_dtype in DTYPES_16_BIT for row in computing)
        when = "" if is_converted else " after kmp.convert"
        text = f"{count} of {len(computing)} layers and operations are float32{when}."
        nonfinite = ", ".join(row.path for row in self.rows if row.overflows)
        if nonfinite:
            source = "kmp.to_float32(model)" if is_converted else "model"
            text += (
                f" NaN or Inf with this batch: {nonfinite}. kmp.convert({source}, batch=...) avoids"
                " this by more float32."
            )
        return text

    def __rich__(self) -> RenderableType:
        sources = list(dict.fromkeys(row.source for row in self.rows if row.reason and row.source))
        lines = [*self._format_lines, *self._step_lines, *self.notes]
        lines += [f"[{number}] {source}" for number, source in enumerate(sources, 1)]
        unaligned = [row for row in self.rows if row.tensor_cores]
        if unaligned:
            lines.append(_PAD)
            lines += [f"  {row.path}: {', '.join(row.tensor_cores)}" for row in unaligned]
        first = _text(self._count_or_error, "red" if self.conversion_error else "")
        return Group(self._table(sources), first, *map(_text, lines))

    def _table(self, sources: list[str]) -> Table:
        """Returns the rows as a table; a reason has the number of its source."""
        has_batch = any(row.amax is not None for row in self.rows)
        formats = [each.format for each in self.formats] or [self.plan.compute_dtype]
        title = _text(f"{self.model}: now and after kmp.convert")
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        table.add_column("layer", overflow="fold", min_width=12)
        table.add_column("class", overflow="fold")
        table.add_column("now", no_wrap=True)
        table.add_column("after", no_wrap=True)
        if has_batch:
            table.add_column("amax", justify="right", no_wrap=True)
            for name in formats:
                table.add_column(f"{name}\nerror", justify="right", no_wrap=True)
        table.add_column("reason", overflow="fold", ratio=1, min_width=20)
        for row in self.rows:
            dtypes = filter(None, (row.compute_dtype, row.variable_dtype, row.output_dtype))
            cells = [row.path, row.class_name, "/".join(dict.fromkeys(dtypes)), row.planned_dtype]
            if has_batch:
                cells += _measured_cells(row, len(formats))
            number = ""
            if row.reason and row.source:
                number = f" [{sources.index(row.source) + 1}]"
            cells.append(row.reason + number)
            style = "yellow" if row.planned_dtype == FLOAT32.name else ""
            table.add_row(*map(_text, cells), style="red" if row.overflows else style)
        return table


def _measured_cells(row: AuditRow, formats: int) -> list[str]:
    """Returns the largest magnitude of a row and its relative error in each format, as text."""
    if row.amax is None:
        return [""] * (1 + formats)
    amax = f"{row.amax:.3g}"
    if row.overflow_share:
        amax += f" ({row.overflow_share:.2%} overflow)"
    cells = [
        _error_cell(row.relative_error, row.overflows),
        _error_cell(row.other_relative_error, row.overflows_in_other),
    ]
    return [amax, *cells[:formats]]


def _error_cell(error: float | None, overflows: bool) -> str:
    if overflows:
        return "NaN or Inf"
    return "" if error is None else f"{error:.1e}"


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style)  # a model from a file may have any names
