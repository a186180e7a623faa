"""Sentences about what 16 bits change in finite passes."""

from kmp.advice.sentences import Text, text_of
from kmp.advice.wording import of_a_batch, percent, repaired_layers, replayed_with_change
from kmp.diagnosis import RunMetrics, name_of, soundness, thresholds
from kmp.diagnosis.precision_causes import (
    Repaired,
    StaleState,
    StaleStateIn16Bits,
    UnscaledLoss,
    WrongGradients,
    WrongOutputs,
)
from kmp.records import Replay
from kmp.records.replay import (
    LOSS_FUNCTION,
    LayerError,
    LossyOperation,
    StateError,
    UnscaledGradients,
)
from kmp.utils.float_formats import FLOAT32, FORMATS_16_BIT


@text_of.register
def _(cause: UnscaledLoss, run: RunMetrics) -> Text:
    if cause.unscaled.change:
        return _text_of_change(cause.replay, cause.unscaled)
    title, note = _text_of_custom_step(cause, run)
    if run.settings.train_step == "keras":  # which scales its loss
        title, note = _text_of_keras_step(cause, run)
    return Text(
        title,
        f"{of_a_batch(cause.replay)}, in float32, the gradients at two loss scales differ by"
        " another factor than the scales; the optimizer divides all of them by the scale"
        f"{_operation_that_changes(run)}",
        note,
    )


def _operation_that_changes(run: RunMetrics) -> str:
    """Returns the operation of the step that is not linear in scaled gradients, if it is known."""
    facts = run.step_facts
    if facts is None or facts.scaling != "nonlinear" or facts.operation is None:
        return ""
    return f"; in the graph of the step, {facts.operation} is not linear in them"


_CLIPPED = (
    "The training step clips gradients while they are multiplied by the loss scale, and the"
    " optimizer then divides the clipped ones by it.",
    "clip what self.optimizer.unscale(gradients) returns, and pass that to self.optimizer.apply; or"
    " let the optimizer clip, with its clipnorm",
)
_DIVIDED = (
    "The training step divides the gradients by the loss scale, and `apply` divides them again.",
    "or leave out the division, or let self.optimizer.unscale(gradients) divide: after that `apply`"
    " does not",
)


def _text_of_change(replay: Replay, unscaled: UnscaledGradients) -> Text:
    title, note = _CLIPPED
    times = unscaled.times
    if unscaled.change == "divided":
        title, note = _DIVIDED
        times = replay.loss_scale  # the passes may have fewer examples, and another factor
    return Text(
        title,
        f"{of_a_batch(replay)}, in float32, the gradients that the optimizer gets do not grow with"
        f" the loss scale, and are {times:,.0f} times too small",
        note,
    )


def _text_of_keras_step(cause: UnscaledLoss, run: RunMetrics) -> tuple[str, str]:
    what = f"The gradients of {_named(cause, run)} do"
    where = "between the loss and their outputs"
    if cause.origin:
        what, where = f"The backward pass of {run.describe(cause.origin)} does", "in it"
    return (
        f"{what} not grow with the loss scale: a gradient function {where} clips, normalizes or"
        " adds.",
        "clip in the optimizer, with its clipnorm or clipvalue: it gets gradients without the loss"
        " scale",
    )


def _text_of_custom_step(cause: UnscaledLoss, run: RunMetrics) -> tuple[str, str]:
    note = "add up all losses, and pass the sum to self.optimizer.scale_loss"
    if not cause.unscaled.are_all:
        return (
            "A part of the loss is not multiplied by the loss scale: the gradients of"
            f" {_named(cause, run)} do not grow with it.",
            note,
        )
    return (  # though `scale_loss` was called
        "Hardly anything of the gradients grows with the loss scale: most of the loss is not"
        " scaled, or the training step clips or normalizes scaled gradients.",
        f"{note}; clip what self.optimizer.unscale(gradients) returns, then pass that to"
        " self.optimizer.apply",
    )


def _named(cause: UnscaledLoss, run: RunMetrics) -> str:
    return ", ".join(map(run.describe, dict.fromkeys(cause.layers[:3])))


@text_of.register
def _(cause: WrongOutputs, run: RunMetrics) -> Text:
    replay, origin, name = cause.replay, cause.origin, run.format.name
    where = run.describe(cause.location)
    if origin is None:
        reason = f"{name} has too few bits for an operation outside of its layers, after {where}"
        index = _rounded_index(replay)
        if index:  # by the layer that computes or passes on the number
            reason = f"{run.describe(index.layer)} {_lossy(index)}, after {where}"
        title = f"The outputs of the model are not those of float32: {reason}."
        detail = "; no layer adds to this"
    else:
        reason, seen = _reason(replay, origin, name)
        title = f"The outputs of {where} are not those of float32: {reason}."
        share = percent(origin.new_error or 0.0)
        detail = f"; in {where} alone, given float32 inputs, by {share}{seen}"
    if soundness.has_other_loss(replay):
        detail += f"; the loss is {replay.loss:.4g}, in float32 {replay.float32_loss:.4g}"
    agree = "the outputs and gradients for the batch agree"
    if replay.is_forward_only:
        agree = "the outputs for the batch agree"
    return Text(
        title,
        f"{of_a_batch(replay)} the outputs of the model differ from float32 by"
        f" {percent(replay.output_error or 0.0)} of how they vary{detail}",
        replayed_with_change(run, replay, agree),
    )


def _too_few_bits(name: str) -> str:
    return f"{name} has too few bits for what it computes"


# Why the outputs of a layer differ, and what of the measurement shows it.
_Reason = tuple[str, str]


def _reason(replay: Replay, origin: LayerError, name: str) -> _Reason:
    return (
        _lossy_weight(replay, origin, name)
        or _overflow_inside(replay, origin)
        or _rounded_inputs(origin, name)
        or _lossy_operation(replay, origin)
        or _underflow_inside(replay, origin, name)
        or (_too_few_bits(name), "; nothing in it is NaN or Inf")
    )


def _lossy_weight(replay: Replay, origin: LayerError, name: str) -> _Reason | None:
    weights = soundness.lost_weights_of(replay, origin.layer)
    if not weights:
        return None
    worst = max(weights, key=lambda each: max(each.zero, each.infinite))
    share, value = max((worst.zero, "0"), (worst.infinite, "infinite"))
    if share <= thresholds.MANY_LOST_VALUES:
        return None
    reason = f"its weight {name_of(worst.path)!r} is {value} in {name}"
    return reason, f"; that is {share:.0%} of {worst.path}"


def _overflow_inside(replay: Replay, origin: LayerError) -> _Reason | None:
    for found in soundness.forward_operations(replay):
        if _is_inside(found.layer, origin):
            operands = f"numbers up to {found.largest_input:.5g}"
            shown = f"; {found.operation} in it returns {found.value} for {operands}"
            return "it overflows inside", shown
    return None


def _rounded_inputs(origin: LayerError, name: str) -> _Reason | None:
    of_inputs = origin.input_error or 0.0
    if of_inputs <= thresholds.MAIN_PART * (origin.new_error or 0.0):
        return None
    shown = f"; in float32 on rounded inputs by {percent(of_inputs)}"
    return f"{name} rounds its inputs too much", shown


def _lossy_operation(replay: Replay, origin: LayerError) -> _Reason | None:
    found = soundness.lossy_operation(replay, lambda layer: _is_inside(layer, origin))
    return (f"it {_lossy(found)}", "; nothing in it is NaN or Inf") if found else None


def _rounded_index(replay: Replay) -> LossyOperation | None:
    lossy = soundness.lossy_operations(replay)
    return next((found for found in lossy if found.kind == "index"), None)


# What an operation that loses its result is in words.
_FUNCTIONS = {
    "Cos": "cosine",
    "Sigmoid": "sigmoid",
    "Sin": "sine",
    "Tan": "tangent",
    "Tanh": "hyperbolic tangent",
}


def _lossy(found: LossyOperation) -> str:
    """Returns what an operation does with numbers for which 16 bits are too few."""
    dtype, largest = found.dtype, f"numbers up to {found.largest_input:.5g}"
    bits = FORMATS_16_BIT[dtype].fraction_bits + 1 if dtype in FORMATS_16_BIT else 0
    kept = f"of which {dtype} keeps {bits} bits"
    function = _FUNCTIONS.get(found.operation, found.operation)
    if found.kind == "cancellation" and not found.typical:
        return f"subtracts {largest} that are equal in {dtype}"
    if found.kind == "cancellation":
        return f"subtracts {largest} that differ by about {found.typical:.2g}, {kept}"
    if found.kind == "phase":
        return f"takes the {function} of {largest}, {kept}"
    if found.kind == "index":
        return f"casts {largest} to integers, {kept}"
    if found.kind == "saturation":
        return (
            f"takes a {function} that is exactly 1 in {dtype}, for {found.share:.0%} of its values"
        )
    return f"adds terms of about {found.typical:.2g} to {largest}, {kept}"


def _underflow_inside(replay: Replay, origin: LayerError, name: str) -> _Reason | None:
    underflows = replay.overflow.underflows if replay.overflow else {}
    inside = [share for layer, share in underflows.items() if _is_inside(layer, origin)]
    underflow = max(inside, default=0.0)
    if underflow <= thresholds.MAIN_PART:
        return None
    results = "what an operation in it, or a cast, returns"
    return "it underflows", f"; {name} rounds {underflow:.0%} of {results} to 0"


def _is_inside(layer: str, origin: LayerError) -> bool:
    return f"{layer}/".startswith(f"{origin.layer}/")


@text_of.register
def _(cause: StaleState, run: RunMetrics) -> Text:
    error = cause.error
    note = replayed_with_change(run, cause.replay, "the updates for the batch agree")
    evidence = (
        f"{of_a_batch(cause.replay)} what a step adds to {error.path} differs from float32 by"
        f" {percent(error.error)}; {_noise_of_state(error)}"
    )
    return Text(
        f"The state {name_of(error.path)!r} of {run.describe(cause.location)} stays behind:"
        f" {run.format.name} has too few bits for its updates.",
        evidence,
        f"{note}; or create the weight in float32, with autocast=False",
    )


@text_of.register
def _(cause: StaleStateIn16Bits, run: RunMetrics) -> Text:
    error = cause.error
    where = run.describe(cause.location)
    return Text(
        f"The state {name_of(error.path)!r} of {where} stays behind: it is a {error.dtype}"
        " variable, which has too few bits for its updates.",
        f"{of_a_batch(cause.replay)} what a step adds to {error.path} differs from that to a"
        f" float32 variable by {percent(error.error)}; {_noise_of_state(error)}",
        "the variable has to be float32, and it is not enough that its layer computes in float32;"
        " if the layer creates it with a dtype of its own: self.add_weight(dtype='float32',"
        " autocast=False)",
    )


def _noise_of_state(error: StateError) -> str:
    if error.noise:
        return f"for another batch it would differ by {percent(error.noise)}"
    share = percent(error.next_update)
    return f"it does not depend on the batch, and the next step adds {share} of it again"


@text_of.register
def _(cause: WrongGradients, run: RunMetrics) -> Text:
    replay, error = cause.replay, cause.error
    where = run.describe(cause.layer)
    title = f"The gradients of {where} are not those of float32."
    evidence = f"{of_a_batch(replay)} they differ"
    if cause.is_of_loss:
        title = _title_of_loss(cause, run)
        evidence = (
            f"{of_a_batch(replay)} the loss is {replay.loss:.4g}, in float32"
            f" {replay.float32_loss:.4g}, and the outputs differ by"
            f" {percent(replay.output_error or 0.0)}; the gradients of {where} differ"
        )
    kept = percent(max(0.0, error.kept))
    noise = ""
    if error.noise is not None:
        noise = f"; another batch of this size changes them by {percent(error.noise)}"
    return Text(
        title,
        f"{evidence} by {percent(error.error)} of their norm, and keep {kept} of it{noise}",
        replayed_with_change(run, replay, "the gradients for the batch agree"),
    )


def _title_of_loss(cause: WrongGradients, run: RunMetrics) -> str:
    found = soundness.overflow_inside(cause.replay)
    if found is None:
        lossy = soundness.lossy_operation(cause.replay, LOSS_FUNCTION.__eq__)
        if lossy is None and run.run.last("loss_dtype") == FLOAT32.name:
            return (
                "The loss is not that of float32: it magnifies the rounding of the outputs in"
                f" {run.format.name}."
            )
        reason = f"it {_lossy(lossy)}" if lossy else _too_few_bits(run.format.name)
        return f"The loss is not that of float32, though the outputs are: {reason}."
    added = "" if found.layer == LOSS_FUNCTION else f" that {run.describe(found.layer)} adds"
    returned = f"{found.operation} in it returns {found.value} in {run.format.name}"
    return f"The loss{added} is not that of float32: {returned}."


@text_of.register
def _(cause: Repaired, run: RunMetrics) -> Text:
    computes = "computes" if len(cause.layers) == 1 else "compute"
    layers = repaired_layers(cause.layers, run)
    return Text(
        f"Since step {cause.record.step}, {layers} {computes} in float32, and the training"
        " continued.",
        _proof(cause, run),
    )


def _proof(cause: Repaired, run: RunMetrics) -> str:
    """Returns the reason of a repair, and what the replay with its layers in float32 showed."""
    reason, step = cause.record.fallback_reason or "", cause.record.step
    replays = [replay for at, replay in run.run.replays if at == step]
    proof = next((replay for replay in reversed(replays) if replay.is_finite), None)
    if proof is None:
        return reason
    repaired = repaired_layers(cause.record.fallback or [], run)
    were_finite = all(replay.is_finite for replay in replays)
    results = "agree with those in float32" if were_finite else "are finite"
    shown = f"with {repaired} in float32 the results {of_a_batch(proof)} {results}"
    return "; ".join(filter(None, [reason.rstrip("."), shown]))
