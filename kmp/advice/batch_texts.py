"""Sentences about the data."""

from kmp.advice.sentences import Text, text_of
from kmp.advice.wording import capitalized, failed_steps, largest_value
from kmp.diagnosis import RunMetrics, name_of
from kmp.diagnosis.batch_causes import (
    NonfiniteData,
    TargetsNotClasses,
    TargetsOutOfRange,
    loss_that_ignores,
)
from kmp.utils.float_formats import FLOAT16


@text_of.register
def _(cause: NonfiniteData, run: RunMetrics) -> Text:
    values, note = "NaN or Inf", ""
    if cause.largest:
        values = f"values beyond {largest_value(run)}"
        if run.format is not FLOAT16:
            values = f"values beyond {cause.largest:g}, whose products overflow float32"
        how = "with its mean and standard deviation, in training and later"
        note = f"or normalize {cause.array}, {how}"
    return Text(
        f"{capitalized(cause.location)} contains {values}.",
        f"{failed_steps(run)}; in the last such step {cause.location} had {values}",
        note,
    )


@text_of.register
def _(cause: TargetsOutOfRange, run: RunMetrics) -> Text:
    low, high = f"{cause.targets.smallest:g}", f"{cause.targets.largest:g}"
    return Text(
        f"The targets {cause.array} are from {low} to {high}, but binary cross-entropy takes"
        " numbers from 0 to 1.",
        f"in a batch of the training {cause.array} was from {low} to {high}",
        "in training, in validation and later",
    )


@text_of.register
def _(cause: TargetsNotClasses, run: RunMetrics) -> Text:
    targets, layer = cause.targets, name_of(cause.layer)
    low, high = f"{targets.smallest:g}", f"{targets.largest:g}"
    output = f"the output {layer}" if layer else "the output"
    return Text(
        f"The targets {cause.array} have classes from {low} to {high}, but the model has the"
        f" classes 0 to {targets.classes - 1}.",
        f"{failed_steps(run)}; in the last such step the targets were from {low} to {high} and"
        f" {output} had {targets.classes} classes",
        _note(cause),
    )


def _note(cause: TargetsNotClasses) -> str:
    means = f"if {cause.marker} means that a target is missing"
    if cause.has_ignoring_loss:
        return means
    if cause.marker is not None:
        return f"or loss={loss_that_ignores(cause.targets)}), {means}"
    if int(cause.targets.smallest) == 1:
        array = cause.array
        return f"or {array} = {array} - 1, also in validation, because Keras counts classes from 0"
    return ""
