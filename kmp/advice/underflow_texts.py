"""Sentences about what float16 flushes to zero."""

import math

from kmp.advice.branch_wording import CLOSER_TERMS, distance, names_of
from kmp.advice.sentences import Text, text_of
from kmp.advice.wording import counted, first_few
from kmp.diagnosis import INFO, RunMetrics
from kmp.diagnosis.underflow_causes import (
    DeadVariables,
    FlushedBranch,
    ScaleTooSmall,
    UntrainedVariables,
    UnusedVariables,
    WideRange,
)
from kmp.utils.float_formats import FLOAT16, FLOAT32, as_power

_NEVER_ACTIVE = "units that are never active, or weights whose effect on the loss cancels out"
_NO_HEADROOM = "a larger loss scale would overflow, and no change was replayed: try"


@text_of.register
def _(cause: FlushedBranch, run: RunMetrics) -> Text:
    note = "or a larger loss weight, if these layers belong to one of several outputs"
    if not cause.has_headroom:
        note = f"{_NO_HEADROOM} {CLOSER_TERMS}"
    numbers = distance(cause.gap)
    return Text(
        f"The gradients of {names_of(cause.layers)} are mostly zero in float16, while those of"
        " other layers are not.",
        f"replayed at the loss scale {as_power(cause.loss_scale)}, {cause.flushed} variables have"
        " gradients of which float16 flushes more than half to zero and float32 none;"
        f" {cause.alive} variables lose less than 5 %{numbers and f'; {numbers}'}",
        note,
    )


@text_of.register
def _(cause: ScaleTooSmall, run: RunMetrics) -> Text:
    effect = "is too small: gradients are lost to underflow"
    if cause.severity == INFO:
        effect = "is low: a larger one would keep more bits of small gradients"
    return Text(f"The loss scale of {as_power(run.scale)} {effect}.", _evidence(cause, run))


def _evidence(cause: ScaleTooSmall, run: RunMetrics) -> str:
    parts = []
    if cause.are_many_subnormal:
        headroom = ""
        if math.isfinite(run.headroom):
            headroom = f", with {run.headroom:.0f} bits of headroom before overflow"
        parts.append(f"{_subnormal(run)}{headroom}")
    if cause.are_many_flushed:
        parts.append(
            f"replayed, {cause.flushed_share:.1%} of the elements of a gradient are zero in float16"
            " but not in float32"
        )
    if run.underflow_origins:
        path, count = max(run.underflow_origins.items(), key=lambda item: item[1])
        samples = len(run.finite_samples)
        parts.append(f"the underflow origin is {path} in {count} of {samples} samples")
    if cause.severity == INFO:
        largest = run.largest_gradient_error
        assert largest is not None  # only gradients that agree make it an info
        parts.append(
            f"compared with float32, the gradients of a layer differ by at most {largest.error:.1%}"
        )
    return "; ".join(parts)


@text_of.register
def _(cause: WideRange, run: RunMetrics) -> Text:
    return Text(
        f"The gradients of {cause.largest} keep the loss scale too low for the others.",
        f"{_subnormal(run)}, {as_power(run.scale)}, with {max(run.headroom, 0.0):.0f} bits of"
        f" headroom before overflow; {cause.largest} has the largest gradients, and"
        f" {cause.smallest} underflows most",
        f"{_NO_HEADROOM} a smaller loss weight for that part, or float32 for"
        f" {run.layer_of(cause.largest)}",
    )


def _subnormal(run: RunMetrics) -> str:
    share = f"{run.subnormal_share:.1%} of the nonzero sampled gradient elements"
    return f"{share} are subnormal in float16 at the loss scale in use"


def _no_underflow(run: RunMetrics) -> str:
    """Returns the beginning of a note about zeros that float16 has not made."""
    return "not underflow: " if run.format is FLOAT16 else ""


@text_of.register
def _(cause: DeadVariables, run: RunMetrics) -> Text:
    count = len(cause.variables)
    variables = f"{count} variables have gradients that are"
    if count == 1:
        variables = "1 variable has a gradient that is"
    if run.format is FLOAT32:
        return Text(
            f"The gradient of {first_few(cause.variables)} is zero.",
            f"{variables} all zero in {counted(cause.samples, 'sample')}",
            _NEVER_ACTIVE,
        )
    return Text(
        f"The gradient of {first_few(cause.variables)} is zero, in float32 too.",
        f"{variables} all zero in {cause.samples} samples, and for {cause.examples} examples in"
        " float32",
        f"{_no_underflow(run)}{_NEVER_ACTIVE}",
    )


@text_of.register
def _(cause: UnusedVariables, run: RunMetrics) -> Text:
    variables = "this variable" if len(cause.variables) == 1 else "these variables"
    title = f"The loss does not depend on {first_few(cause.variables)}."
    note = f"{_no_underflow(run)}layers that are not used, or an output without a loss"
    if run.settings.train_step == "custom":  # which chooses what it passes on
        title = f"The optimizer gets no gradient of {first_few(cause.variables)}."
        note += ", or variables that the training step does not pass to `apply`"
    return Text(title, f"no sample has a gradient of {variables}", note)


@text_of.register
def _(cause: UntrainedVariables, run: RunMetrics) -> Text:
    optimizers = f"{run.settings.optimizer} is built on other variables"
    return Text(
        f"The training does not pass {first_few(cause.variables)} to the optimizer.",
        f"{len(cause.variables)} of the model's trainable variables; {optimizers}",
        "not a matter of precision: pass their gradients to `apply` too, or set `trainable=False`,"
        " unless another optimizer trains them",
    )
