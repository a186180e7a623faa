"""The tables of a run: errors by layer, its newest sample by layer, overflow and underflow, and other loss scales."""

import heapq

from kmp.advice.wording import skipped
from kmp.diagnosis.soundness import error_origin
from kmp.diagnosis.thresholds import HARMFUL_OUTPUT_ERROR
from kmp.records import GradientSample, layer_of
from kmp.report.run_summary import RunSummary
from kmp.report.texts import MAX_ROWS, UNKNOWN, Table, number, scale, share, share_of, with_omitted

NOT_SAMPLED = "No gradients were sampled. Attach kmp.callbacks.GradientHistogram to sample them."

_MOST_ERRORS = 12

# Of the table by layer: the headings, and the zones of float16's range (`ExponentHistogram.zones`)
# that they add up.
_ZONES = {
    "zero": ("zero",),
    "subnormal": ("subnormal", "below_subnormal"),
    "near overflow": ("near_overflow", "beyond"),
    "NaN, Inf": ("inf", "nan"),
}


def layer_errors(run: RunSummary) -> Table:
    """Returns the layers that add most to the error of the outputs, of a run with a comparison with float32.

    The layer where a harmful error begins is marked.
    """
    step, replay = run.run.comparisons[-1]
    worst = heapq.nlargest(
        _MOST_ERRORS, replay.layer_errors, key=lambda each: (each.new_error or 0.0, each.error)
    )
    of_gradients: dict[str, tuple[str, str]] = {}  # by layer: of an RNN, the largest of its cells
    for gradient in sorted(replay.gradient_errors, key=lambda each: each.error):
        of_gradients[run.metrics.created_layer(gradient.layer)] = (
            number(gradient.error),
            number(gradient.noise),
        )
    classes = {run.run.settings.get("model"): "the model"} | run.run.settings.get("layers", {})
    rows = []
    for each in worst:
        errors = (
            number(each.error),
            number(each.new_error),
            *of_gradients.get(each.layer, ("-", "-")),
        )
        rows.append((each.layer, classes.get(each.layer, UNKNOWN), *errors))
    intro = (
        f"In step {step}, the difference between the model's precision and float32 in the outputs"
        f" of each layer, for {replay.examples} example{'s' * (replay.examples != 1)} of a batch,"
        " in units of how outputs vary between examples."
    )
    note = (
        "The layers with the largest new error: that of the outputs if the inputs are those of"
        f" float32. Above {HARMFUL_OUTPUT_ERROR:g} in the outputs of the model it is harmful."
        " Gradients: the difference from float32, and how much they would differ for another batch"
        " of the same size, both relative to their norm."
    )
    columns = ("layer", "class", "outputs", "new error", "gradients", "sampling noise")
    origin = error_origin(replay)
    marked = worst.index(origin) if origin in worst else None
    return Table(
        columns,
        tuple(rows),
        with_omitted(note, len(replay.layer_errors), _MOST_ERRORS),
        marked,
        intro,
    )


def gradients(run: RunSummary) -> Table:
    """Returns the newest sample by layer. The updates are those of the newest sample that measured them."""
    sample = run.run.last("sample")
    if sample is None or not len(sample):
        return Table(note=NOT_SAMPLED)
    names = list(dict.fromkeys(map(layer_of, sample.names)))
    shown = set(names[:MAX_ROWS])

    def by_layer(sample: GradientSample) -> GradientSample:
        return sample.without(name for name in sample if layer_of(name) not in shown).by_layer()

    updates: dict[str, tuple[str, str]] = {}
    measured = next((sample for sample in reversed(run.run.samples) if sample.has_update), None)
    if measured is not None:
        layers = by_layer(measured)
        of_layers = zip(
            layers.names, layers.update_ratio, layers.lost_updates, layers.updates, strict=True
        )
        updates = {
            name: (number(ratio), share_of(lost, count)) for name, ratio, lost, count in of_layers
        }
    layers, rows = by_layer(sample), []
    for name, amax, norm in zip(layers.names, layers.amax, layers.norm, strict=True):
        total, counts = layers[name].total, layers[name].zones
        shares = [share_of(sum(counts[zone] for zone in zones), total) for zones in _ZONES.values()]
        rows.append(
            (name, f"{total:,}", *shares, number(amax), number(norm), *updates.get(name, ("", "")))
        )
    note = (
        f"Step {sample.step}, loss scale {scale(sample.loss_scale)}. Of the loss-scaled gradient:"
        " subnormal is below 2^-14, near overflow is 2^13 and above, and amax is the largest"
        " magnitude. The norm is of the unscaled gradient. Updates"
        f" ({f'in step {measured.step}' if measured else 'not measured'}): their norm over that of"
        " the weights, and the share of updates below 2^-11 of their weight, most of which a"
        " float16 weight would lose."
    )
    columns = ("layer", "elements", *_ZONES, "amax", "norm", "update / weight", "updates lost")
    return Table(columns, tuple(rows), with_omitted(note, len(names)))


def overflow_and_underflow(run: RunSummary) -> Table:
    """Returns how often each variable was the origin of an overflow or underflow, and how often it had one at all."""
    metrics = run.metrics
    columns = {
        "overflow origin": run.run.last("overflow_origins_by_variable", {}),
        "overflowed": run.run.last("overflows_by_variable", {}),
        "underflow origin": metrics.underflow_origins,
        "underflowed": metrics.underflows,
    }
    names = dict.fromkeys(name for counts in columns.values() for name in counts)
    if not names:
        overflow = (
            "No variable overflowed"
            if metrics.skipped_steps is not None
            else "Overflows were not counted"
        )
        return Table(note=f"{overflow}, and no underflow was detected.")
    counted = {name: [counts.get(name, 0) for counts in columns.values()] for name in names}
    rows = [
        (name, *map(str, counted[name]))
        for name in heapq.nlargest(MAX_ROWS, counted, key=counted.__getitem__)
    ]
    note = (
        "Overflowed: steps in which the variable's gradient was not finite. Underflowed: of"
        f" {len(metrics.finite_samples)} samples, those in which more than 5 % of its nonzero"
        " gradient elements were subnormal in float16 or smaller, or all were zero. Origin: of"
        " these, those in which it was the variable nearest the loss. A step with a non-finite"
        " loss has no overflow origin."
    )
    return Table(("variable", *columns), tuple(rows), with_omitted(note, len(names)))


def other_scales(run: RunSummary) -> Table:
    """Returns what float16 would lose of the sampled gradients at a constant loss scale: that in use, and others."""
    curve = run.metrics.curve
    if curve is None:
        return Table(note="No sampled gradient was finite." if run.metrics.samples else NOT_SAMPLED)
    scales, advice = {"in use": curve.in_use}, "No scale is recommended."
    if curve.recommended:
        low, high = curve.recommended
        scales |= {"lowest recommended": low} if curve.is_lowest_known else {}
        scales |= {"highest recommended": high}
        advice = (
            f"Recommended: {f'{scale(2.0**low)} to' if curve.is_lowest_known else 'at most'}"
            f" {scale(2.0**high)}."
        )
    rows = []
    for name, exponent in (scales | ({"none": 0.0} if curve.in_use else {})).items():
        if curve.log2_scales[0] <= exponent <= curve.log2_scales[-1]:
            shares = {key: share(value) for key, value in curve.at(exponent).items()}
            underflow = " to ".join(dict.fromkeys([shares["underflow"], shares["underflow_bound"]]))
            rows.append(
                (
                    f"{name}: {scale(2.0**exponent)}",
                    underflow,
                    shares["overflow"],
                    shares["skipped"],
                )
            )
    itself = (
        "" if run.metrics.skipped_steps is None else f" In the run itself, {skipped(run.metrics)}."
    )
    source = (
        "Measured with a float32 reference pass."
        if curve.is_measured
        else (
            "Computed from the sampled gradients: values above the scale in use are extrapolated,"
            " and the upper bound of a range counts all zeros as flushed by float16."
        )
    )
    note = f"{advice} Shares of gradient elements and of sampled steps.{itself} {source}"
    intro = "What float16 would lose of the sampled gradients at a constant loss scale:"
    return Table(
        ("loss scale", "underflow", "overflow", "would be skipped"), tuple(rows), note, intro=intro
    )
