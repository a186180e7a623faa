"""Rules about a forward pass or a loss that is not finite."""

from kmp.advice.batch_rules import data, targets
from kmp.advice.edits import Edit, SetArguments
from kmp.advice.finding import ERROR, Finding
from kmp.advice.run_metrics import RunMetrics
from kmp.advice.wording import described, exploding_edits, in_float32, nonfinite_losses
from kmp.records import LOSS_FUNCTION, NonfiniteOperation, Replay
from kmp.utils import FLOAT16

_DIVISIONS = ("RealDiv", "Rsqrt", "Reciprocal", "Inv", "Div", "Xdivy", "Pow")
_LOGARITHMS = ("Log", "Log1p", "Xlogy", "Xlog1py")
_OF_POSITIVE_NUMBERS = (*_LOGARITHMS, "Sqrt", "Rsqrt", "Pow")
_BFLOAT16 = SetArguments("kmp.enable", {"policy": "'mixed_bfloat16'"})


def forward(metrics: RunMetrics) -> Finding | None:
    """Reports a forward pass or a loss that float16 makes NaN or Inf."""
    if not metrics.nonfinite_losses or data(metrics) or targets(metrics):
        return None
    replay = metrics.forward_replay
    if replay is None:
        return _not_replayed(metrics)
    if replay.is_forward_only and replay.is_finite:
        return _loss_of_finite_outputs(metrics)
    if not replay.is_finite_in_float32:
        return _nonfinite_in_float32(metrics, replay)
    first = _first_cause(replay)
    if first is None:
        return _not_replayed(metrics)
    cause, title, reason = _explained(metrics, first, replay)
    layers = replay.float32_layers
    edits: tuple[Edit, ...] = (_BFLOAT16,) if not layers else in_float32(metrics, layers)
    if replay.is_forward_only:
        in_single, proof = "all outputs are finite", "with these layers in float32 the outputs for the batch are finite"
    else:
        in_single = f"the loss is {replay.float32_loss:.4g}"
        proof = "with these layers in float32 the same batch has a finite loss and finite gradients"
    return Finding(
        cause,
        ERROR,
        title,
        f"{nonfinite_losses(metrics)}; replayed, {reason}; in float32 {in_single}",
        edits,
        proof if layers else "",
        first.layer,
    )


def _first_cause(replay: Replay) -> NonfiniteOperation | None:
    """Returns the first NaN or Inf that matters: of a layer that has to compute in float32, or in the loss."""
    forward_pass = [found for found in replay.nonfinite if not found.is_backward]
    needed = {*(replay.float32_layers or ()), LOSS_FUNCTION}
    return next((found for found in forward_pass if found.layer in needed), forward_pass[0] if forward_pass else None)


def _explained(metrics: RunMetrics, found: NonfiniteOperation, replay: Replay) -> tuple[str, str, str]:
    """Returns the cause, a title and the evidence for an operation of the forward pass."""
    where = described(metrics, found.layer)
    first = f"{found.operation} in {where} is the first to return {found.value}"
    lost = _lost_constant(found, replay, where)
    if lost:
        title, operand = lost
        return "constant", title, f"{first}, for {operand}"
    start = f"{where[0].upper()}{where[1:]}"
    is_logarithm = found.operation in _LOGARITHMS
    if found.value == "nan" and found.operation in _OF_POSITIVE_NUMBERS and found.has_negative_input:
        title = f"{start} takes the {'logarithm' if is_logarithm else 'root'} of a number that float16 makes negative."
        return "rounding", title, f"{first}, for a negative number"
    if is_logarithm:
        title = f"{start} takes the logarithm of a number that is 0 in float16."
        return "forward_underflow", title, f"{first}, for 0"
    reason = f"{first}, for numbers up to {found.largest_input:.5g}"
    if found.layer != LOSS_FUNCTION and found.layer in replay.nonfinite_outputs:
        return "forward_overflow", f"The output of {where} overflows float16's maximum of 65504.", reason
    what = "The loss" if found.layer == LOSS_FUNCTION else f"The loss that {where} adds"
    return "loss_overflow", f"{what} overflows float16's maximum of 65504.", reason


def _lost_constant(found: NonfiniteOperation, replay: Replay, where: str) -> tuple[str, str] | None:
    """Returns a title and the operand if the cause is a constant that float16 makes infinite or zero, or a divisor."""
    constants = replay.lost_constants.get(found.layer, [])
    large = [value for value in constants if abs(value) > 1.0]
    small = [value for value in constants if abs(value) < 1.0]
    is_cast = found.operation == "Cast" and found.constant is not None and abs(found.constant) > FLOAT16.max
    if is_cast or found.has_infinite_constant or (found.value == "nan" and large):
        value = found.constant if is_cast else next(iter(large), None)
        constant = "A constant" if value is None else f"The constant {value:g}"
        operand = f"{value:g}" if is_cast else "a scalar that is infinite"
        return f"{constant} in {where} is infinite in float16, whose maximum is 65504.", operand
    if found.operation in _DIVISIONS and found.smallest_input == 0.0:
        reason = f"float16 rounds the constant {small[0]:g} to 0" if small else "in float16 the divisor is 0"
        return f"{where[0].upper()}{where[1:]} divides by 0: {reason}.", "0"
    return None


def _nonfinite_in_float32(metrics: RunMetrics, replay: Replay) -> Finding:
    if replay.nonfinite_variables:
        return Finding(
            "loss",
            ERROR,
            f"{replay.nonfinite_variables[0]} contains NaN or Inf, so every loss is NaN.",
            f"{nonfinite_losses(metrics)}; {len(replay.nonfinite_variables)} variables contain NaN or Inf",
            exploding_edits(metrics, metrics.gradients.update_ratio[1]),
            "an update made them so; train again from weights that are finite",
            replay.nonfinite_variables[0],
        )
    found = next(iter(replay.nonfinite), None)
    where = (
        f": {found.operation} in {described(metrics, found.layer)} is the first to return {found.value}"
        if found
        else ""
    )
    return Finding(
        "loss",
        ERROR,
        "The loss is NaN or Inf in float32 too.",
        f"{nonfinite_losses(metrics)}; replayed in float32 it is not finite either{where}",
        (),
        "not a matter of precision: look at that operation, and at what the batch contains",
        found.layer if found else "",
    )


def _loss_of_finite_outputs(metrics: RunMetrics) -> Finding:
    return Finding(
        "loss",
        ERROR,
        "The loss function returns NaN or Inf for finite outputs.",
        f"{nonfinite_losses(metrics)}; replayed, the outputs of the model are finite",
        (),
        "compute the loss in float32, and clip the argument of a log",
        LOSS_FUNCTION,
    )


def _not_replayed(metrics: RunMetrics) -> Finding:
    """Returns what is known of non-finite losses without a replay that shows them."""
    if metrics.run.last("loss_dtype") == FLOAT16.name:
        return Finding(
            "loss_overflow",
            ERROR,
            "The loss is computed in float16, whose maximum is 65504.",
            f"{nonfinite_losses(metrics)}, and it is a float16 tensor",
            in_float32(metrics, metrics.setting("output_layers", [])),
            "or cast the outputs to float32 before the loss is computed",
            LOSS_FUNCTION,
        )
    if metrics.ends_nonfinite:
        pattern = f"among them the last {metrics.consecutive_overflows}"
    elif metrics.nonfinite_losses < metrics.steps / 2:
        pattern = "most losses are finite, which suggests corrupt examples"
    else:
        pattern = "that is most steps, which suggests a layer that fails in float16"
    return Finding(
        "loss",
        ERROR,
        "The loss is NaN or Inf before scaling, so no loss scale helps.",
        f"{nonfinite_losses(metrics)}; {pattern}",
        (),
        "kmp.callbacks.defaults() replays such a batch, and names the first layer that is not finite",
    )
