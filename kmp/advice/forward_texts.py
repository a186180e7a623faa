"""Sentences about a forward pass or a loss that is not finite."""

from kmp.advice.missing_replays import how_to_find_layer
from kmp.advice.sentences import Text, text_of
from kmp.advice.wording import (
    capitalized,
    cast_by_hand,
    counted,
    failed_steps,
    first_few,
    largest_value,
    note_of_cast,
    replayed_with_change,
)
from kmp.diagnosis import RunMetrics
from kmp.diagnosis.forward_causes import (
    DIVISIONS,
    LOGARITHMS,
    OF_POSITIVE_NUMBERS,
    GrowingActivations,
    LossInFloat16,
    NonfiniteCompiled,
    NonfiniteForward,
    NonfiniteInFloat32,
    NonfiniteLossFunction,
    RoundedBefore,
    UnexplainedLoss,
    is_cast_of_constant,
)
from kmp.records import Replay
from kmp.records.replay import LOSS_FUNCTION, NonfiniteOperation, RoundedConstant
from kmp.records.step_facts import CodeLine
from kmp.utils.float_formats import FLOAT32


@text_of.register
def _(cause: NonfiniteForward, run: RunMetrics) -> Text:
    found, replay = cause.operation, cause.replay
    return Text(
        _title(cause, run),
        f"{failed_steps(run)}; replayed, {found.operation} in {run.describe(found.layer)}"
        f"{_line(found)} is the first to return {found.value}, for"
        f" {_operand(cause)}; in float32 {_in_float32(replay)}",
        replayed_with_change(run, replay, _proof(replay)),
    )


def _line(found: NonfiniteOperation) -> str:
    """Returns the line of an operation, if it is known, after the layer."""
    return f" ({found.code.file}, line {found.code.line})" if found.code and found.code.file else ""


def _in_float32(replay: Replay) -> str:
    if replay.float32_loss is None:  # not known, where a step scales none
        return "all outputs are finite"
    return f"the loss is {replay.float32_loss:.4g}"


def _proof(replay: Replay) -> str:
    if replay.is_forward_only:
        return "the outputs for the batch are finite"
    if replay.float32_loss is None:
        return "the outputs and gradients for the batch are finite"
    return "the same batch has a finite loss and gradients"


def _title(cause: NonfiniteForward, run: RunMetrics) -> str:
    found, name, largest = cause.operation, run.format.name, largest_value(run)
    where = run.describe(found.layer)
    if cause.is_division:
        reason = f"in {name} the divisor is 0"
        if cause.constant is not None:
            reason = f"{name} rounds the constant {cause.constant:g} to 0"
        return f"{capitalized(where)} divides by 0: {reason}."
    if cause.name == "constant":
        constant = "A constant" if cause.constant is None else f"The constant {cause.constant:g}"
        return (
            f"{constant} in {where} is infinite in {name}, whose maximum is {run.format.max:.5g}."
        )
    if cause.name == "rounding":
        function = "logarithm" if found.operation in LOGARITHMS else "root"
        return f"{capitalized(where)} takes the {function} of a number that {name} makes negative."
    if cause.name == "forward_underflow":
        return f"{capitalized(where)} takes the logarithm of a number that is 0 in {name}."
    if cause.name == "forward_overflow":
        return f"The output of {where} overflows {largest}."
    loss = "The loss" if found.layer == LOSS_FUNCTION else f"The loss that {where} adds"
    return f"{loss} overflows {largest}{_line(found)}."


def _operand(cause: NonfiniteForward) -> str:
    if cause.is_division or cause.name == "forward_underflow":
        return "0"
    if cause.name == "constant":
        is_cast = is_cast_of_constant(cause.operation)
        return f"{cause.constant:g}" if is_cast else "a scalar that is infinite"
    if cause.name == "rounding":
        return "a negative number"
    return f"numbers up to {cause.operation.largest_input:.5g}"


@text_of.register
def _(cause: NonfiniteCompiled, run: RunMetrics) -> Text:
    where = capitalized(run.describe(cause.location))
    return Text(
        f"{where} returns NaN or Inf in {run.format.name} as XLA compiles the training step.",
        f"{failed_steps(run)}; replayed by the compiled step it does so too, and without the"
        f" optimizations of TensorFlow and XLA it does not; in float32 {_in_float32(cause.replay)}",
        replayed_with_change(run, cause.replay, _proof(cause.replay)),
    )


@text_of.register
def _(cause: GrowingActivations, run: RunMetrics) -> Text:
    found, first, loss = next(iter(cause.replay.operations), None), "", ""
    if found:
        first = f"; {found.operation} in {run.describe(found.layer)} is the first to return"
        first += f" {found.value}"
    if cause.replay.float32_loss is not None:
        loss = f", and the loss is {cause.replay.float32_loss:.4g}"
    note = "a smaller scale of the initializers, or a normalization in each block"
    if not cause.is_from_start:
        note += ", or a smaller learning rate, if updates have made the weights so large"
    return Text(
        f"The activations grow from layer to layer, and reach {cause.largest:.2g} in float32 too.",
        f"{failed_steps(run)}{first}; replayed in float32, {cause.layers} layers enlarge inputs up"
        f" to {cause.largest_input:.3g}, by {cause.factor:.2g} times on average{loss}",
        f"{note}: another number format does not cure it; not tried",
    )


@text_of.register
def _(cause: NonfiniteInFloat32, run: RunMetrics) -> Text:
    if cause.variables:
        count = counted(len(cause.variables), "variable")
        contain = "contains" if len(cause.variables) == 1 else "contain"
        evidence = f"{failed_steps(run)}; {count} {contain} NaN or Inf"
        note = "an update made them so; train again from weights that are finite"
        before = ""
        if cause.is_from_start:
            before = " before training begins"
            evidence += ", and no step has changed the weights"
            note = (
                "whatever initialized or loaded the weights made them so. A file in float16 has Inf"
                " for all beyond 65504: save the weights in float32, and check them with"
                " np.isfinite after loading"
            )
        return Text(
            f"{cause.variables[0]} contains NaN or Inf{before}, so every loss is NaN.",
            evidence,
            note,
        )
    found, first = cause.operation, ""
    if found:
        first = f": {found.operation} in {run.describe(found.layer)}{_line(found)}"
        first += f" is the first to return {found.value}"
    if run.format is FLOAT32:
        return Text(
            f"The loss is NaN or Inf{first}.",
            f"{failed_steps(run)}; replayed, it is not finite either",
            "look at that operation, and at what the batch contains",
        )
    cast = cast_by_hand(found)
    if cast:
        return Text(
            f"The loss is NaN or Inf, computed in {cast} whatever the dtypes of the layers are.",
            f"{failed_steps(run)}; replayed with layers in float32 it is not finite either{first}",
            note_of_cast(cast, run),
        )
    return Text(
        "The loss is NaN or Inf in float32 too.",
        f"{failed_steps(run)}; replayed in float32 it is not finite either{first}",
        "not a matter of precision: look at that operation, and at what the batch contains",
    )


@text_of.register
def _(cause: RoundedBefore, run: RunMetrics) -> Text:
    found, (first, *others) = cause.rounded.operation, cause.rounded.constants
    its, it = ("their", "them") if others else ("its", "it")
    constant = f"the constant {first.name!r}" if first.name else "a constant"
    if others:
        constant += f" and {counted(len(others), 'other')}"
    made = f"the program makes {constant} in {first.dtype}, before the training step gets {it}"
    shown, title = "", f"The training step returns NaN or Inf: {made}."
    if found:
        place = f"{found.operation} in {run.describe(found.layer)}"
        shown = f": {place}{_line(found)} is the first to return {found.value}"
        title = f"{_subject(found.code) or place} {_harm(found)}: {made}."
    use = _subject(first.use) or first.use
    tried = f"other numbers that {first.dtype} rounds to the same ones"
    if first.nonfinite:
        title = f"{use} gets {first.nonfinite}: {made}."
        tried = "finite numbers"
    return Text(
        title,
        f"{failed_steps(run)}; replayed in float32 it is not finite either{shown};"
        f" {use} gets {constant} ({_values_of(first)}), and with {tried} in {its} place the batch"
        " is finite",
        f"compute {it} with dtype='float32' from the beginning, in place of the compute dtype:"
        f" float32 does not bring back what {first.dtype} has lost. kmp promotes operations"
        " of float32 and 16-bit operands; not tried, as the exact numbers are not known",
    )


def _subject(code: CodeLine | None) -> str:
    """Returns an operation with its line, as the subject of a sentence; empty without a line."""
    return f"{code}," if code and code.file else ""


def _harm(found: NonfiniteOperation) -> str:
    """Returns what an operation does that returns NaN or Inf for its operands."""
    if found.operation in DIVISIONS and found.smallest_input == 0.0:
        return "divides by 0"
    function = "logarithm" if found.operation in LOGARITHMS else "root"
    if found.operation in OF_POSITIVE_NUMBERS and found.has_negative_input:
        return f"takes the {function} of a negative number"
    if found.operation in LOGARITHMS and found.smallest_input == 0.0:
        return "takes the logarithm of 0"
    return "returns NaN" if found.value == "nan" else "returns Inf"


def _values_of(constant: RoundedConstant) -> str:
    low, high = constant.smallest, constant.largest
    parts = [f"shape {tuple(constant.shape)}" if constant.shape else "a scalar"]
    if low is not None and high is not None:
        parts.append(f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}")
    if constant.nonfinite:
        parts.append(constant.nonfinite)
    return ", ".join(parts)


@text_of.register
def _(cause: LossInFloat16, run: RunMetrics) -> Text:
    evidence = f"{failed_steps(run)}, and it is a float16 tensor"
    if cause.operations:
        first, *others = cause.operations
        names = list(dict.fromkeys(each.operation for each in others))
        also = f"; so do {first_few(names, most=5)}" if names else ""
        evidence = (
            f"{failed_steps(run)}; between the outputs of layers and the loss, {first} computes in"
            f" float16{also}"
        )
    return Text(
        "The loss is computed in float16, whose maximum is 65504.",
        evidence,
        "or cast the outputs to float32 before the loss is computed; not tried, because no replay"
        " has this loss",
    )


@text_of.register
def _(cause: NonfiniteLossFunction, run: RunMetrics) -> Text:
    return Text(
        "The loss function returns NaN or Inf for finite outputs.",
        f"{failed_steps(run)}; replayed, the outputs of the model are finite",
        "compute the loss in float32, and clip the argument of a log",
    )


@text_of.register
def _(cause: UnexplainedLoss, run: RunMetrics) -> Text:
    pattern = "that is most steps"
    if run.ends_nonfinite:
        pattern = f"among them the last {run.consecutive_overflows}"
    elif run.nonfinite_losses < run.steps / 2:
        pattern = "most losses are finite"
    title = "The loss is NaN or Inf."
    if run.has_loss_scale:
        title = "The loss is NaN or Inf before scaling, so no loss scale helps."
    return Text(
        title,
        f"{failed_steps(run)}; {pattern}",
        how_to_find_layer(run),
    )
