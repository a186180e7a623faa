"""Sentences about the updates of the weights."""

from kmp.advice.sentences import Text, text_of
from kmp.advice.wording import of_steps
from kmp.diagnosis import PrepareData, RunMetrics, name_of
from kmp.diagnosis.edits import smaller_learning_rate
from kmp.diagnosis.update_causes import (
    LARGEST_LOST,
    DivisionByEpsilon,
    Exploding,
    LostSquares,
    LostUpdates,
    with_float32_weights,
)

_IN_FLOAT32 = "keeps weights and optimizer state in float32; or epsilon=1e-4"


@text_of.register
def _(cause: DivisionByEpsilon, run: RunMetrics) -> Text:
    title = "The optimizer divides by zero: its epsilon is 0."
    evidence = (
        f"{of_steps(run, run.overflows)} were skipped, and {cause.location} contains NaN or Inf"
        " since an update"
    )
    if not cause.is_float16:
        note = "where all gradients of a weight were 0, it divides 0 by epsilon"
        return Text(title, evidence, note)
    return Text(
        f"The optimizer divides by zero: its epsilon of {cause.epsilon:g} is 0 in float16, the"
        " dtype of its state.",
        f"{evidence}. float16 rounds {LARGEST_LOST:.2g} and less to zero",
        _IN_FLOAT32,
    )


@text_of.register
def _(cause: LostSquares, run: RunMetrics) -> Text:
    optimizer = run.settings.optimizer
    return Text(
        f"The steps of {optimizer} are too large: its state is float16, where the squares of small"
        f" gradients are 0, so it divides by its epsilon of {cause.epsilon:g} alone.",
        f"in step {cause.step}, {cause.path} changed by {cause.times:.3g} times the learning rate"
        f" (root mean square; 1 is usual); what a gradient below 2^{cause.highest} adds to the mean"
        " of squares is 0 in float16",
        _IN_FLOAT32,
    )


@text_of.register
def _(cause: Exploding, run: RunMetrics) -> Text:
    parts = []
    if cause.is_estimated:
        parts.append(
            f"the next update would be {cause.ratio:.2g} times as large as the weights: the"
            " learning rate times the norm of the gradients in float32 (0.001 is typical)"
        )
    elif cause.has_large_updates:
        parts.append(
            f"in step {cause.step} the update was {cause.ratio:.2g} times as large as the weights"
            " (L2 norms; 0.001 is typical)"
        )
    if cause.has_risen:
        parts.append(f"the loss rose from {cause.first_loss:.3g} to {cause.highest_loss:.3g}")
    if run.ends_nonfinite:
        parts.append(
            f"the loss was NaN or Inf in the last {run.consecutive_overflows} steps, after steps"
            " with a finite loss"
        )
    if run.overflows:
        parts.append(f"{of_steps(run, run.overflows)} were skipped")
    title = "Training diverges: the updates are too large in any number format."
    note = "or clipnorm=1.0" if run.settings.optimizer == "SGD" else ""
    if cause.large_input:
        parts.append(f"{cause.large_input} has values up to {cause.largest_input:.4g}")
        title = (
            "Training diverges: the inputs are far from unit scale, and the updates too large in"
            " any number format."
        )
        note = (
            f"for new data too, with the same mean and deviation; or {smaller_learning_rate(run)}"
        )
    return Text(title, "; ".join(parts), f"{note}; not tried" if cause.large_input else note)


@text_of.register
def _(cause: LostUpdates, run: RunMetrics) -> Text:
    number_format, where = cause.number_format, "the weights"
    if cause.layers:
        where += f" of {', '.join(repr(name_of(layer)) for layer in cause.layers[:3])}"
    most = f", most of {cause.variables[0]}" if cause.variables else ""
    smallest = f"2^-{number_format.fraction_bits + 2} of its magnitude"
    return Text(
        f"Updates are lost: {where} are in {number_format.name}, and many steps are too small to"
        " change them.",
        f"{cause.share:.0%} of the weights with a nonzero gradient stayed as they were in the"
        f" sampled updates{most}: a {number_format.name} weight does not change by less than"
        f" {smallest}",
        _note_of_updates(cause),
    )


def _note_of_updates(cause: LostUpdates) -> str:
    note = "keeps the weights in float32"
    (first, *_) = cause.edits
    if isinstance(first, PrepareData):
        return (
            f"{note}: the layers have the dtype of the file or program that created them, which"
            " `kmp.enable` does not change. What the file rounded stays rounded"
        )
    if cause.layers:
        statement = with_float32_weights(cause.number_format.name)
        return f"{note}; of a model from a file: {statement}"
    return note
