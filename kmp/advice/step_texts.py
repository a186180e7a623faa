"""Sentences about what a training step does with the loss scale, as its graph shows it."""

from kmp.advice.sentences import Text, text_of
from kmp.advice.wording import first_few
from kmp.diagnosis import ERROR, RunMetrics
from kmp.diagnosis.step_causes import ChangedInLayer, WronglyScaled

# Titles and notes by `StepFacts.scaling`; what its operation does.
_NOTES = {
    "nonlinear": "before that line: `apply` does not divide then; or let the optimizer clip, with"
    " its clipnorm; not tried",
    "added": "before that line: `apply` does not divide then; not tried",
    "divided": "or leave out the division, or let {optimizer}.unscale(gradients) divide: after"
    " that `apply` does not",
    "multiplied": "call {optimizer}.scale_loss once for each loss, and pass unscaled=True to"
    " `apply` only with what {optimizer}.unscale(gradients) returned",
}
_TITLES = {
    "nonlinear": "The training step clips or normalizes gradients while they are multiplied by the"
    " loss scale, and the optimizer then divides the result by it.",
    "added": "The training step adds to gradients while they are multiplied by the loss scale, and"
    " the optimizer then divides the sum by it.",
    "divided": "The training step divides the gradients by the loss scale, and `apply` divides them"
    " again.",
    "multiplied": "The gradients are multiplied by the loss scale more often than `apply` divides"
    " by it.",
}
_SHOWN = {
    "nonlinear": "{operation} gets scaled gradients, and is not linear",
    "added": "{operation} adds to scaled gradients",
    "divided": "{operation} divides",
    "multiplied": "{operation} multiplies by the loss scale",
}


@text_of.register
def _(cause: WronglyScaled, run: RunMetrics) -> Text:
    if cause.facts.scaling == "unscaled":
        return _text_of_unscaled(cause, run)
    scaling, operation = cause.facts.scaling, cause.facts.operation
    shown = "a gradient that `apply` gets shows it"
    if operation is not None:
        shown = _SHOWN[scaling].format(operation=operation)
    return Text(
        _TITLES[scaling],
        f"in the graph of the training step, {shown}{_measured(cause, run)}",
        _NOTES[scaling].format(optimizer=cause.optimizer),
    )


@text_of.register
def _(cause: ChangedInLayer, run: RunMetrics) -> Text:
    layers = first_few([run.describe(layer) for layer in cause.layers])
    return Text(
        "A gradient function clips or normalizes gradients while they are multiplied by the loss"
        f" scale, before those of {layers}.",
        f"in the graph of the training step, {cause.facts.operation} gets scaled gradients, and is"
        " not linear",
        "clip in the optimizer, with its clipnorm or clipvalue: it gets gradients without the loss"
        " scale; what this did to the training was not measured",
    )


def _text_of_unscaled(cause: WronglyScaled, run: RunMetrics) -> Text:
    operation, optimizer = cause.facts.operation, cause.optimizer
    if cause.facts.are_all and operation is not None and operation.operation == "Mul":
        return Text(
            "The gradients are not those of the loss that `scale_loss` returns: they do not grow"
            " with the loss scale, and `apply` divides them by it.",
            "in the graph of the training step, no gradient that `apply` gets depends on the loss"
            f" scale; {operation} multiplies a loss by it{_measured(cause, run)}",
            f"differentiate what {optimizer}.scale_loss(loss) returns",
        )
    layers = first_few([run.describe(layer) for layer in cause.layers])
    added = f"{operation} adds it to the scaled one" if operation else "no operation scales it"
    return Text(
        "A part of the loss is not multiplied by the loss scale: the gradients of"
        f" {layers} do not grow with it, and the optimizer divides them by it.",
        f"in the graph of the training step, {added}{_measured(cause, run)}",
        f"add up all losses, and pass the sum to {optimizer}.scale_loss",
    )


def _measured(cause: WronglyScaled, run: RunMetrics) -> str:
    """Returns how small the gradients are that the optimizer gets, if that is known."""
    if cause.severity != ERROR:
        return "; in the step that was replayed it changed nothing"
    if not cause.times or cause.times < 1.0:
        return ""
    times = f"; the gradients that the optimizer gets are {cause.times:,.0f} times too small"
    if cause.facts.scaling == "divided":
        return times
    return f"{times}, and the loss scale is {run.scale:,.0f}"
