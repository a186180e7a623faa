"""The table of a run that compares float16 with bfloat16, layer by layer."""

import heapq
import math
from collections.abc import Sequence

from kmp.diagnosis.format_errors import FormatErrors, formats_compared
from kmp.diagnosis.wording import percent
from kmp.records import Replay, Run
from kmp.records.replay import LOSS_FUNCTION, Comparison, NonfiniteOperation, Overflow
from kmp.report.run_summary import RunSummary
from kmp.report.texts import Table, TextRow, scale, with_omitted
from kmp.utils.float_formats import FLOAT16

_MOST_ROWS = 12

_Replays = Sequence[tuple[int, Replay]]  # with their steps
# A format, the loss scale of its pass, and what this showed.
_Pass = tuple[str, float, Comparison | None, Overflow | None]


def both_formats(run: RunSummary) -> Table:
    """Returns the errors of each layer in both formats, and what follows from them.

    The errors are those of the newest batch that was passed in both formats, the conclusion is
    about all such batches since the last repair. The table is empty if there is none.
    """
    since_repair = _measured(run.observed.records)
    measured = since_repair or _measured(run.run)
    if not measured:
        return Table()
    step, newest = measured[-1]
    passes = _passes(newest)
    outputs = [_errors_of_outputs(each) for each in passes]
    gradients = [_errors_of_gradients(run, each) for each in passes]
    layers = list(dict.fromkeys(layer for errors in outputs for layer in errors))

    def largest(layer: str) -> float:
        return max(errors.get(layer, 0.0) for errors in outputs)

    rows = []
    for layer in heapq.nlargest(_MOST_ROWS, layers, key=largest):
        cells = [layer]
        for errors in (*outputs, *gradients):
            error = errors.get(layer)
            if error is None:
                cells.append("-")
            else:
                cells.append(percent(error) if math.isfinite(error) else "NaN or Inf")
        rows.append(tuple(cells))
    names = [name for name, *_ in passes]
    scales = [f"{name} with the loss scale {scale(loss_scale)}" for name, loss_scale, *_ in passes]
    note = (
        f"Step {step}, {newest.examples} example{'s' * (newest.examples != 1)} of a batch,"
        f" {' and '.join(scales)}: the difference from float32 in the outputs of each layer, in"
        " units of how outputs vary between examples, and in its gradients, relative to their norm."
    )
    return Table(
        ("layer", *_headings("outputs", names), *_headings("gradients", names)),
        tuple(rows),
        with_omitted(note, len(layers), _MOST_ROWS),
        intro=_conclusion(run, measured, is_before_repair=not since_repair),
    )


def _measured(run: Run) -> _Replays:
    """Returns the replays of a run that compare both formats."""
    return [(step, replay) for step, replay in run.replays if replay.other_format is not None]


def _headings(values: str, names: Sequence[str]) -> TextRow:
    return tuple(f"{values}, {name}" for name in names)


def _passes(replay: Replay) -> list[_Pass]:
    """Returns the passes of a replay in both formats, first that in float16."""
    other = replay.other_format
    assert other is not None
    comparison = replay.comparison if replay.is_finite else None
    passes: list[_Pass] = [
        (other.own_format, replay.loss_scale, comparison, replay.overflow),
        (other.format, other.loss_scale, other.comparison, other.overflow),
    ]
    return sorted(passes, key=lambda each: each[0] != FLOAT16.name)


def _errors_of_outputs(each: _Pass) -> dict[str, float]:
    """Returns the error of each layer's outputs; infinite where they are NaN or Inf."""
    _, _, comparison, overflow = each
    if comparison is not None:
        return {error.layer: error.error for error in comparison.layers}
    return dict.fromkeys(overflow.outputs, float("inf")) if overflow else {}


def _errors_of_gradients(run: RunSummary, each: _Pass) -> dict[str, float]:
    """Returns the error of each layer's gradients: of an RNN, the largest of its cells."""
    comparison, errors = each[2], dict[str, float]()
    for error in comparison.gradients if comparison else ():
        layer = run.observed.model.created_layer(error.layer)
        errors[layer] = max(error.error, errors.get(layer, 0.0))
    return errors


def _conclusion(run: RunSummary, measured: _Replays, *, is_before_repair: bool) -> str:
    """Returns one line on all batches that were passed in both formats."""
    steps = [str(step) for step, _ in measured]
    plural = "es" if len(steps) > 1 else ""
    before = " before the repair" if is_before_repair else ""
    batches = f"In the batch{plural} of {_steps(steps)}{before}, replayed in both formats"
    pairs = [_passes(replay) for _, replay in measured]
    formats = [_errors_of_format(run, steps, passes) for passes in zip(*pairs, strict=True)]
    return formats_compared(batches, formats)


def _errors_of_format(
    run: RunSummary, steps: Sequence[str], passes: Sequence[_Pass]
) -> FormatErrors:
    """Returns what the passes over several batches in one format showed."""
    outputs, gradients = list[float](), list[float]()
    failures: dict[str, list[str]] = {}  # the steps with each
    for step, (name, loss_scale, comparison, overflow) in zip(steps, passes, strict=True):
        if comparison is None:
            failure = _failure(run, name, loss_scale, overflow or Overflow())
            failures.setdefault(failure, []).append(step)
            continue
        outputs.append(comparison.output_error)
        gradients += [error.error for error in comparison.gradients]
    scales = [loss_scale for _, loss_scale, *_ in passes]
    return FormatErrors(
        passes[0][0],
        outputs=max(outputs, default=None),
        gradients=max(gradients, default=None),
        failures=tuple(f"in {_steps(of)}, {failure}" for failure, of in failures.items()),
        loss_scales=tuple(dict.fromkeys(scales)) if gradients else (),
    )


def _steps(steps: Sequence[str]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {' and '.join(steps)}"


def _failure(run: RunSummary, name: str, loss_scale: float, overflow: Overflow) -> str:
    """Returns where NaN or Inf begins."""
    first = _first(overflow)
    if first is None:
        if not overflow.outputs:
            return "the loss or a gradient is NaN or Inf"
        return f"{run.observed.model.describe(overflow.outputs[0])} returns NaN or Inf"
    place = run.observed.model.describe(first.layer)
    if first.is_backward:
        place = f"the backward pass of {place}, at the loss scale {scale(loss_scale)},"
    value = "NaN" if first.value == "nan" else "Inf"
    limit = f", beyond {name}'s maximum" if value == "Inf" else ""
    return f"{first.operation} in {place} returns {value}{limit}"


def _first(overflow: Overflow) -> NonfiniteOperation | None:
    """Returns the operation where NaN or Inf begins, without an Inf that a layer itself removes."""
    operations, outputs = overflow.operations, overflow.outputs
    for each in operations:
        if each.is_backward or each.layer == LOSS_FUNCTION or each.layer in outputs:
            return each
    return operations[0] if operations else None
