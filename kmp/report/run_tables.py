"""The tables of a run: errors and gradients by layer, overflow by variable, other loss scales."""

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence

from kmp.advice import WhatIf
from kmp.diagnosis.soundness import error_origin, output_limit
from kmp.diagnosis.thresholds import NEGLIGIBLE
from kmp.diagnosis.wording import skipped
from kmp.records import ExponentHistogram, GradientSample
from kmp.records.gradient_sample import layer_of
from kmp.report.run_summary import RunSummary
from kmp.report.texts import (
    MAX_ROWS,
    UNKNOWN,
    Table,
    TextRow,
    number,
    scale,
    share,
    share_of,
    with_omitted,
)
from kmp.utils.float_formats import FLOAT16

ALL_FINITE = "No gradient was NaN or Inf."
NOT_SAMPLED = "No gradients were sampled. Attach kmp.callbacks.defaults() to sample them."

_MOST_ERRORS = 12

# Of the table by layer: the headings, and the zones of float16's range (`ExponentHistogram.zones`)
# that they add up.
_ZONES_OF_FLOAT16 = {
    "zero": ("zero",),
    "subnormal": ("subnormal", "below_subnormal"),
    "near overflow": ("near_overflow", "beyond"),
    "NaN, Inf": ("inf", "nan"),
}
_ZONES = {name: _ZONES_OF_FLOAT16[name] for name in ("zero", "NaN, Inf")}  # of other formats


def layer_errors(run: RunSummary) -> Table:
    """Returns the layers that add most to the error of the outputs.

    The run has a comparison with float32. The layer where a harmful error begins is marked.
    """
    step, replay = run.observed.passes.comparisons[-1]
    worst = heapq.nlargest(
        _MOST_ERRORS, replay.layer_errors, key=lambda each: (each.new_error or 0.0, each.error)
    )
    of_gradients: dict[str, TextRow] = {}  # by layer: of an RNN, the largest of its cells
    for gradient in sorted(replay.gradient_errors, key=lambda each: each.error):
        layer = run.observed.model.created_layer(gradient.layer)
        of_gradients[layer] = number(gradient.error), number(gradient.noise)
    settings = run.run.settings
    classes = {settings.model: "the model", **settings.layers}
    rows = []
    for each in worst:
        names = each.layer, classes.get(each.layer, UNKNOWN)
        errors = number(each.error), number(each.new_error)
        rows.append((*names, *errors, *of_gradients.get(each.layer, ("-", "-"))))
    intro = (
        f"In step {step}, the difference between the model's precision and float32 in the outputs"
        f" of each layer, for {replay.examples} example{'s' * (replay.examples != 1)} of a batch,"
        " in units of how outputs vary between examples."
    )
    limit = output_limit(run.observed.format)
    note = (
        "The layers with the largest new error: that of the outputs if the inputs are those of"
        f" float32. Above {limit:g} in the outputs of the model it is harmful."
        " Gradients: the difference from float32, and how much they would differ for another batch"
        " of the same size, both relative to their norm."
    )
    columns = ("layer", "class", "outputs", "new error", "gradients", "sampling noise")
    origin = error_origin(replay, run.observed.format)
    marked = worst.index(origin) if origin in worst else None
    note = with_omitted(note, len(replay.layer_errors), _MOST_ERRORS)
    return Table(columns, tuple(rows), note, marked, intro)


def gradients(run: RunSummary) -> Table:
    """Returns the newest sample by layer, with the updates of the newest one that measured them."""
    sample = run.run.last("sample")
    if sample is None or not len(sample):
        return Table(note=NOT_SAMPLED)
    names = list(dict.fromkeys(map(layer_of, sample.names)))
    shown = names[:MAX_ROWS]
    measured = next((each for each in reversed(run.run.samples) if each.has_update), None)
    updates = {} if measured is None else _updates_by_layer(measured, shown)
    is_float16 = run.observed.format is FLOAT16
    of_updates = ("update / weight", "updates lost") if is_float16 else ("update / weight",)
    nothing = ("",) * len(of_updates)
    zones = _ZONES_OF_FLOAT16 if is_float16 else _ZONES
    layers, rows = _by_layer(sample, shown), []
    for name, amax, norm in zip(layers.names, layers.amax, layers.norm, strict=True):
        sizes = number(amax), number(norm)
        shares = _shares(layers[name], zones)
        rows.append((name, *shares, *sizes, *updates.get(name, nothing)[: len(of_updates)]))
    measured_in = f"in step {measured.step}" if measured else "not measured"
    note = (
        f"Step {sample.step}. Amax is the largest magnitude of a gradient. Updates ({measured_in}):"
        " their norm over that of the weights."
    )
    if is_float16:
        note = (
            f"Step {sample.step}, loss scale {scale(sample.loss_scale)}. Of the loss-scaled"
            " gradient: subnormal is below 2^-14, near overflow is 2^13 and above, and amax is the"
            f" largest magnitude. The norm is of the unscaled gradient. Updates ({measured_in}):"
            " their norm over that of the weights, and the share of updates below 2^-11 of their"
            " weight, most of which a float16 weight would lose."
        )
    columns = ("layer", "elements", *zones, "amax", "norm", *of_updates)
    return Table(columns, tuple(rows), with_omitted(note, len(names)))


def _shares(histogram: ExponentHistogram, zones: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yields the number of elements, and the share of each zone."""
    yield f"{histogram.total:,}"
    for parts in zones.values():
        yield share_of(sum(histogram.zones[part] for part in parts), histogram.total)


def _by_layer(sample: GradientSample, layers: Collection[str]) -> GradientSample:
    """Returns a sample by layer, of some layers."""
    return sample.without(name for name in sample if layer_of(name) not in layers).by_layer()


def _updates_by_layer(sample: GradientSample, layers: Collection[str]) -> dict[str, TextRow]:
    """Returns the norm of the updates relative to the weights, and the share that is lost."""
    of_layers = _by_layer(sample, layers)
    rows = zip(
        of_layers.names,
        of_layers.update_ratio,
        of_layers.lost_updates,
        of_layers.updates,
        strict=True,
    )
    return {name: (number(ratio), share_of(lost, count)) for name, ratio, lost, count in rows}


def nonfinite_variables(run: RunSummary) -> Table:
    """Returns how often the gradient of each variable was NaN or Inf, and the origin of it."""
    columns = {
        "origin": run.run.last("overflow_origins_by_variable", {}),
        "not finite": run.run.last("overflows_by_variable", {}),
    }
    if not any(columns.values()):
        is_counted = run.observed.skipped_steps is not None
        return Table(note=ALL_FINITE if is_counted else "NaN and Inf were not counted.")
    note = (
        "Not finite: steps in which the variable's gradient was NaN or Inf. Origin: of these, those"
        " in which it was the variable nearest the loss. A step with a non-finite loss has no"
        " origin."
    )
    return _by_variable(columns, note)


def overflow_and_underflow(run: RunSummary) -> Table:
    """Returns how often each variable overflowed and underflowed, and was the origin of it."""
    observed = run.observed
    columns = {
        "overflow origin": run.run.last("overflow_origins_by_variable", {}),
        "overflowed": run.run.last("overflows_by_variable", {}),
        "underflow origin": observed.gradients.underflow_origins,
        "underflowed": observed.gradients.underflows,
    }
    if not any(columns.values()):
        is_counted = observed.skipped_steps is not None
        overflow = "No variable overflowed" if is_counted else "Overflows were not counted"
        return Table(note=f"{overflow}, and no underflow was detected.")
    note = (
        "Overflowed: steps in which the variable's gradient was not finite. Underflowed: of"
        f" {len(observed.gradients.finite)} samples, those in which more than 5 % of its nonzero"
        " gradient elements were subnormal in float16 or smaller, or all were zero. Origin: of"
        " these, those in which it was the variable nearest the loss. A step with a non-finite"
        " loss has no overflow origin."
    )
    return _by_variable(columns, note)


def _by_variable(columns: Mapping[str, Mapping[str, int]], note: str) -> Table:
    """Returns counts by variable, those with the highest first."""
    counted: dict[str, list[int]] = {}
    for index, counts in enumerate(columns.values()):
        for name, count in counts.items():
            counted.setdefault(name, [0] * len(columns))[index] = count
    worst = heapq.nlargest(MAX_ROWS, counted, key=counted.__getitem__)
    rows = [(name, *map(str, counted[name])) for name in worst]
    return Table(("variable", *columns), tuple(rows), with_omitted(note, len(counted)))


def other_scales(run: RunSummary) -> Table:
    """Returns what float16 would lose of the sampled gradients at constant loss scales.

    The table is empty for a run in another format.
    """
    if run.observed.format is not FLOAT16:
        return Table()
    curve = run.observed.gradients.curve
    if curve is None:
        is_sampled = bool(run.observed.gradients.samples)
        return Table(note="No sampled gradient was finite." if is_sampled else NOT_SAMPLED)
    rows = []
    for name, exponent in _scales_to_show(curve).items():
        if not curve.log2_scales[0] <= exponent <= curve.log2_scales[-1]:
            continue
        shares = {key: share(value) for key, value in curve.at(exponent).items()}
        underflow = " to ".join(dict.fromkeys([shares["underflow"], shares["underflow_bound"]]))
        label = f"{name}: {scale(2.0**exponent)}"
        rows.append((label, underflow, shares["overflow"], shares["skipped"]))

    # Without samples, the curve is that of float32 references.
    count = len(run.observed.gradients.samples)
    steps = f", and of {count} sampled step{'s' * (count > 1)}" if count else ""
    sentences = [_recommendation(curve), f"Shares of gradient elements{steps}."]
    if run.observed.skipped_steps is not None:
        sentences.append(f"In the run itself, {skipped(run.observed)}.")
    if curve.is_measured:
        sentences.append("Measured with a float32 reference pass.")
    else:
        sentences.append(
            "Computed from the sampled gradients: values above the scale in use are extrapolated,"
            " and the upper bound of a range counts all zeros as flushed by float16."
        )
    columns = ("loss scale", "underflow", "overflow", "would be skipped")
    intro = "What float16 would lose of the sampled gradients at a constant loss scale:"
    return Table(columns, tuple(rows), " ".join(sentences), intro=intro)


def _scales_to_show(curve: WhatIf) -> dict[str, float]:
    """Returns log2 of the scale in use, of those that are recommended, and of none."""
    scales = {"in use": curve.in_use}
    if curve.recommended:
        low, high = curve.recommended
        if curve.is_lowest_known:
            scales["lowest recommended"] = low
        scales["highest recommended"] = high
    if curve.in_use:
        scales["none"] = 0.0
    return scales


def _recommendation(curve: WhatIf) -> str:
    if not curve.recommended:
        return (
            "No constant scale is recommended: none has at most"
            f" {NEGLIGIBLE:.1%} underflow, one bit of headroom above the largest"
            " gradient, and no overflow in a replay."
        )
    low, high = curve.recommended
    begin = f"{scale(2.0**low)} to" if curve.is_lowest_known else "at most"
    text = f"Recommended: {begin} {scale(2.0**high)}"
    if curve.is_lowest_known and low <= curve.in_use <= high:
        return f"{text}, which includes the scale in use."
    return f"{text}."
