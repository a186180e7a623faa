"""Sentences about NaN and Inf in gradients of formats that need no loss scale."""

from kmp.advice.missing_replays import how_to_find_layer
from kmp.advice.sentences import Text, text_of
from kmp.advice.wording import replayed_with_change, skipped_with_finite_loss
from kmp.diagnosis import RunMetrics
from kmp.diagnosis.range_causes import NeedlessScale, NonfiniteBackward, UnexplainedGradients
from kmp.utils.float_formats import as_power


@text_of.register
def _(cause: NeedlessScale, run: RunMetrics) -> Text:
    name = run.format.name
    return Text(
        f"The loss scale of {as_power(run.scale)} makes gradients overflow, and {name} needs none.",
        f"{skipped_with_finite_loss(run)}; the model computes in {run.dtypes}, and {_range(name)}",
    )


def _range(name: str) -> str:
    return "float32 has a wide range" if name == "float32" else f"{name} has float32's range"


@text_of.register
def _(cause: NonfiniteBackward, run: RunMetrics) -> Text:
    title, found = _title(cause, run), cause.operation
    evidence = skipped_with_finite_loss(run)
    if found:
        layer = run.describe(found.layer)
        evidence += (
            f"; replayed, {found.operation} in the backward pass of {layer} is the first to return"
            f" {found.value}"
        )
    proof = "the gradients for the batch are finite"
    return Text(title, evidence, replayed_with_change(run, cause.replay, proof))


def _title(cause: NonfiniteBackward, run: RunMetrics) -> str:
    name = run.format.name
    if cause.operation is None:
        return f"Gradients near {cause.location} are NaN or Inf in {name}, but not in float32."
    where = f"backward pass of {run.describe(cause.location)}"
    if not cause.is_division:
        return f"The {where} returns NaN or Inf in {name}, but not in float32."
    reason = f"in {name} the divisor is 0"
    if cause.constant is not None:
        reason = f"{name} rounds the constant {cause.constant:g} to 0"
    return f"The {where} divides by 0: {reason}."


@text_of.register
def _(cause: UnexplainedGradients, run: RunMetrics) -> Text:
    near, evidence = "", skipped_with_finite_loss(run)
    if cause.origin:
        near = f" near {cause.origin}"
        evidence += f"; {cause.origin} was the origin in {cause.origin_share:.0%} of them"
    return Text(
        f"Gradients{near} are NaN or Inf, although the loss is finite.",
        evidence,
        how_to_find_layer(run),
    )
