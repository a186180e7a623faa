"""Sentences about overflows of the backward pass, and the settings of the loss scale."""

import math
from operator import itemgetter

from kmp.advice.branch_wording import note_of_branch
from kmp.advice.sentences import Text, text_of
from kmp.advice.wording import (
    cast_by_hand,
    counted,
    note_of_cast,
    of_steps,
    replayed_with_change,
    skipped_with_finite_loss,
)
from kmp.diagnosis import RunMetrics
from kmp.diagnosis.edits import power
from kmp.diagnosis.scale_causes import (
    BackwardOverflow,
    FixedScaleTooLarge,
    GrowthTooFast,
    HysteresisTooLarge,
    InitialScaleTooLarge,
    MinScaleTooLarge,
    NonfiniteGradients,
)
from kmp.utils.float_formats import FLOAT32, as_power


@text_of.register
def _(cause: NonfiniteGradients, run: RunMetrics) -> Text:
    found = cause.operation
    where, operation = f"gradients near {cause.origin or 'the loss'}", ""
    if found:
        where = f"backward pass of {run.describe(found.layer)}"
        operation = f": {found.operation} is the first to return {found.value}"
    is_float32 = run.format is FLOAT32
    replayed = "replayed" if is_float32 else "replayed in float32"
    in_float32_too = "" if is_float32 else ", in float32 too"
    evidence = (
        f"{skipped_with_finite_loss(run)}; {replayed}, the gradients are not finite either"
        f"{operation}"
    )
    cast = cast_by_hand(found)
    if cast:
        return Text(
            f"NaN or Inf in the {where}, which computes in {cast} whatever the dtypes of the layers"
            " are.",
            evidence,
            note_of_cast(cast, run),
        )
    if cause.is_slope:
        return Text(
            f"The {where} divides by 0{in_float32_too}: the slope of a root or a norm is infinite"
            " at 0.",
            evidence,
            "not a matter of precision: two equal inputs have the distance 0. Keep the root away"
            " from it: ops.sqrt(ops.maximum(x, 1e-4)), for a norm with x = ops.sum(ops.square(v),"
            " axis=-1); not tried",
        )
    return Text(
        f"NaN or Inf in the {where}{in_float32_too}.",
        evidence,
        "not a matter of precision: look at that operation, and at what the batch contains",
    )


@text_of.register
def _(cause: BackwardOverflow, run: RunMetrics) -> Text:
    title, evidence = _title(cause, run), _evidence(cause, run)
    search = cause.replay.search if cause.replay else None
    if cause.replay and search and search.branch:
        return Text(title, evidence, note_of_branch(search, cause.replay, run))
    return Text(title, evidence, _note(cause, run))


def _title(cause: BackwardOverflow, run: RunMetrics) -> str:
    where = f"backward pass of {run.describe(cause.location)}"
    if cause.slope:
        reason = "in float16 the divisor is 0"
        if cause.constant is not None:
            reason = f"float16 rounds the constant {cause.constant:g} to 0"
        return f"The {where} divides by 0: {reason}."
    scales = f"loss scales above {as_power(run.scale)}"
    if cause.lowest_scale is not None:
        scales = f"loss scales down to {as_power(cause.lowest_scale)}"
    if run.is_fixed:
        scales = f"the loss scale of {as_power(run.scale)}"
    if cause.is_of_own_loss:
        return (
            f"Gradients overflow at {scales}; those of the loss of the training loop were not"
            " compared with float32."
        )
    if cause.is_in_layer:
        return f"The {where} overflows float16 at {scales}."
    return f"Gradients near {cause.origin} overflow at {scales}."


def _evidence(cause: BackwardOverflow, run: RunMetrics) -> str:
    parts = [
        f"{skipped_with_finite_loss(run)}, down to a loss scale of {as_power(run.scale)}",
        f"{cause.origin} was the overflow origin in {cause.origin_share:.0%} of them",
    ]
    if cause.slope:
        found = cause.slope
        parts.append(
            f"replayed, {found.operation} in the backward pass of {run.describe(found.layer)} is"
            f" the first to return {found.value}"
        )
    gradients = cause.replay.gradients.of_activations if cause.replay else {}
    if gradients and not cause.slope:
        layer, magnitude = max(gradients.items(), key=itemgetter(1))
        parts.append(
            f"replayed in float32, the gradient of the output of {layer} reaches {magnitude:.3g}"
            " without scaling"
        )
    zero = run.all_zero_variables
    if zero:
        parts.append(
            f"at this scale the gradients of {len(zero)} variables are zero, such as {zero[-1]}"
        )
    return "; ".join(parts)


def _note(cause: BackwardOverflow, run: RunMetrics) -> str:
    if cause.is_of_own_loss:
        return (
            "no replay has this loss: cast the outputs of the model to float32 before the loss is"
            " computed from them; a division by a small number, as in a finite difference, makes"
            " large gradients in every precision. A training in float32 shows whether float16 is"
            " the cause"
        )
    if cause.replay is None:
        return (
            f"no batch was replayed: layers between {cause.origin} and the loss, or the loss, may"
            " need float32"
        )
    if (cause.replay.gradients.usable_scale or 1.0) < 1.0:
        return (
            "or a smaller loss: a mean in place of a sum, a smaller loss weight, or targets in"
            " other units"
        )
    return replayed_with_change(run, cause.replay, "the gradients for the batch are finite")


@text_of.register
def _(cause: FixedScaleTooLarge, run: RunMetrics) -> Text:
    origin = ""
    if cause.origin:
        share = f"{cause.origin_share:.0%}"
        origin = f"; {cause.origin} was the overflow origin in {share} of them"
    return Text(
        f"The fixed loss scale of {as_power(run.scale)} is too large.",
        f"{of_steps(run, run.gradient_overflows)} overflowed in the backward pass with a finite"
        f" loss{origin}",
        "" if cause.highest is None else f"or loss_scale={power(cause.highest)}",
    )


@text_of.register
def _(cause: MinScaleTooLarge, run: RunMetrics) -> Text:
    return Text(
        f"The minimum loss scale of {as_power(run.min_scale)} is too large.",
        f"{of_steps(run, run.gradient_overflows)} overflowed in the backward pass with a finite"
        f" loss; replayed, the gradients are finite at a loss scale of {as_power(cause.suitable)}",
    )


@text_of.register
def _(cause: HysteresisTooLarge, run: RunMetrics) -> Text:
    return Text(
        "`hysteresis` is too large: the loss scale overflows, and does not back off.",
        f"the last {run.consecutive_overflows} steps were skipped with a finite loss; the scale"
        f" backs off after {cause.hysteresis} in a row",
    )


@text_of.register
def _(cause: InitialScaleTooLarge, run: RunMetrics) -> Text:
    skipped = f"{cause.skipped} of the first {cause.first_steps} steps were skipped"
    stable = as_power(cause.stable)
    evidence = f"{skipped} before the scale had dropped to {stable}"
    if cause.is_replayed:
        evidence = (
            f"{skipped} with a finite loss, and none trained; replayed, the gradients are finite at"
            f" a loss scale of {stable}"
        )
    return Text(f"The initial loss scale of {as_power(cause.initial)} is too large.", evidence)


@text_of.register
def _(cause: GrowthTooFast, run: RunMetrics) -> Text:
    what = "The loss scale grows too fast, or backs off too slowly"
    if cause.arguments == ["growth_interval"]:
        what = "`growth_interval` is too small"
    skipped = counted(math.ceil(cause.steps_to_undo), "skipped step")
    return Text(
        f"{what}: the scale overflows again and again.",
        f"{of_steps(run, cause.overflows)} overflowed after the scale had stabilized, with growth"
        f" by {cause.growth_factor:g} every {cause.growth_interval} steps; it takes {skipped} to"
        " undo one",
    )
