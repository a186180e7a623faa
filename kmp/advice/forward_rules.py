"""Rules about a forward pass or a loss that is not finite."""

import dataclasses
from collections.abc import Sequence

from kmp.advice import precision_rules
from kmp.advice.batch_rules import data, targets
from kmp.advice.finding import ERROR, WARNING, Edit, Finding
from kmp.advice.run_metrics import RunMetrics
from kmp.advice.wording import failed_steps, in_float32, replayed_change, smaller_learning_rate
from kmp.records import LOSS_FUNCTION, NonfiniteOperation, Replay
from kmp.utils import FLOAT16

DIVISIONS = ("RealDiv", "Rsqrt", "Reciprocal", "Inv", "Div", "Xdivy", "Pow")
LOGARITHMS = ("Log", "Log1p", "Xlogy", "Xlog1py")
_OF_POSITIVE_NUMBERS = (*LOGARITHMS, "Sqrt", "Rsqrt", "Pow")


def forward(metrics: RunMetrics) -> Finding | None:
    """Reports a forward pass or a loss that float16 makes NaN or Inf."""
    replay = metrics.forward_replay
    # If all losses were finite, the skipped steps at the start are those of a loss scale that
    # falls.
    has_failed = metrics.nonfinite_losses or (
        replay and metrics.gradient_overflows > metrics.startup_overflows[0]
    )
    if not has_failed or data(metrics) or targets(metrics):
        return None
    if replay is None:
        # The compiled step may fold constants that are finite one by one. What the eager one showed
        # is the next rule's.
        return None if precision_rules.outputs(metrics) else _not_replayed(metrics)
    if replay.is_forward_only and replay.is_finite:
        return _not_replayed(metrics)
    if not replay.is_finite_in_float32:
        return _nonfinite_in_float32(metrics, replay)

    if found := _first_nonfinite(replay):
        return forward_finding(metrics, found, replay)
    return _not_replayed(metrics) if metrics.nonfinite_losses else None


def uncompiled(metrics: RunMetrics) -> Finding | None:
    """Reports a forward pass that is NaN or Inf operation by operation, as `model(x)` runs it, but not compiled."""
    replay = metrics.replays[-1] if metrics.replays else None
    if replay is None or not replay.is_finite_compiled or metrics.run.last("overflow_count") != 0:
        return None
    found = _first_nonfinite(replay)
    if found is None or found.layer == LOSS_FUNCTION:  # the loss was not compiled
        return None
    finding = forward_finding(metrics, found, replay)
    title = f"{finding.title} The compiled model is finite; run operation by operation, it is not."
    return dataclasses.replace(finding, cause="uncompiled", severity=WARNING, title=title)


def _first_nonfinite(replay: Replay) -> NonfiniteOperation | None:
    """Returns the first NaN or Inf of the forward pass, preferably of what needs float32 or of the loss."""
    forward_pass = [found for found in replay.nonfinite if not found.is_backward]
    needed = {*(replay.float32_layers or ()), LOSS_FUNCTION}
    return next(
        (found for found in forward_pass if found.layer in needed), next(iter(forward_pass), None)
    )


def forward_finding(metrics: RunMetrics, found: NonfiniteOperation, replay: Replay) -> Finding:
    """Returns the finding for an operation of the forward pass that float16 makes NaN or Inf."""
    cause, title, operand = _explained(metrics, found, replay)
    in_single, proof = "all outputs are finite", "the outputs for the batch are finite"
    if not replay.is_forward_only:
        in_single, proof = (
            f"the loss is {replay.float32_loss:.4g}",
            "the same batch has a finite loss and gradients",
        )
    return Finding(
        cause,
        ERROR,
        title,
        f"{failed_steps(metrics)}; replayed, {found.operation} in {metrics.describe(found.layer)}"
        f" is the first to return {found.value}, for {operand}; in float32 {in_single}",
        *replayed_change(metrics, replay, proof),
        found.layer,
    )


def _explained(
    metrics: RunMetrics, found: NonfiniteOperation, replay: Replay
) -> tuple[str, str, str]:
    """Returns the cause, a title and the operand of an operation of the forward pass."""
    where = metrics.describe(found.layer)
    start = f"{where[0].upper()}{where[1:]}"
    constants = replay.lost_constants.get(found.layer, [])
    large = next((value for value in constants if abs(value) > 1.0), None)
    small = next((value for value in constants if abs(value) < 1.0), None)

    # A constant that float16 makes infinite or zero, or a divisor.
    is_cast = (
        found.operation == "Cast"
        and found.constant is not None
        and abs(found.constant) > FLOAT16.max
    )
    if is_cast or found.has_infinite_constant or (found.value == "nan" and large is not None):
        value = found.constant if is_cast else large
        constant = "A constant" if value is None else f"The constant {value:g}"
        operand = f"{value:g}" if is_cast else "a scalar that is infinite"
        return (
            "constant",
            f"{constant} in {where} is infinite in float16, whose maximum is 65504.",
            operand,
        )
    if found.operation in DIVISIONS and found.smallest_input == 0.0:
        reason = (
            "in float16 the divisor is 0"
            if small is None
            else f"float16 rounds the constant {small:g} to 0"
        )
        return "constant", f"{start} divides by 0: {reason}.", "0"

    is_logarithm = found.operation in LOGARITHMS
    if (
        found.value == "nan"
        and found.operation in _OF_POSITIVE_NUMBERS
        and found.has_negative_input
    ):
        function = "logarithm" if is_logarithm else "root"
        return (
            "rounding",
            f"{start} takes the {function} of a number that float16 makes negative.",
            "a negative number",
        )
    if is_logarithm:
        return (
            "forward_underflow",
            f"{start} takes the logarithm of a number that is 0 in float16.",
            "0",
        )

    operand = f"numbers up to {found.largest_input:.5g}"
    if found.layer != LOSS_FUNCTION and found.layer in replay.nonfinite_outputs:
        return (
            "forward_overflow",
            f"The output of {where} overflows float16's maximum of 65504.",
            operand,
        )
    what = "The loss" if found.layer == LOSS_FUNCTION else f"The loss that {where} adds"
    return "loss_overflow", f"{what} overflows float16's maximum of 65504.", operand


def _nonfinite_in_float32(metrics: RunMetrics, replay: Replay) -> Finding:
    """Returns the finding for a loss that float32 does not make finite either."""
    if replay.nonfinite_variables:
        path, count = replay.nonfinite_variables[0], len(replay.nonfinite_variables)
        title, reason = (
            f"{path} contains NaN or Inf, so every loss is NaN.",
            f"{count} variables contain NaN or Inf",
        )
        note = "an update made them so; train again from weights that are finite"
        return _loss(metrics, title, reason, smaller_learning_rate(metrics), note, path)
    title, reason = (
        "The loss is NaN or Inf in float32 too.",
        "replayed in float32 it is not finite either",
    )
    note, layer = (
        "not a matter of precision: look at that operation, and at what the batch contains",
        "",
    )
    for found in replay.nonfinite[:1]:
        layer = found.layer
        reason += (
            f": {found.operation} in {metrics.describe(layer)} is the first to return {found.value}"
        )
    return _loss(metrics, title, reason, note=note, location=layer)


def _not_replayed(metrics: RunMetrics) -> Finding:
    """Returns what is known of non-finite losses without a replay that shows them."""
    if metrics.run.last("loss_dtype") == FLOAT16.name:
        return Finding(
            "loss_overflow",
            ERROR,
            "The loss is computed in float16, whose maximum is 65504.",
            f"{failed_steps(metrics)}, and it is a float16 tensor",
            in_float32(metrics, metrics.settings.get("output_layers", [])),
            "or cast the outputs to float32 before the loss is computed; not tried, because no"
            " replay has this loss",
            LOSS_FUNCTION,
        )
    replay = metrics.forward_replay
    if replay and replay.is_forward_only and replay.is_finite:
        title = "The loss function returns NaN or Inf for finite outputs."
        note = "compute the loss in float32, and clip the argument of a log"
        return _loss(
            metrics,
            title,
            "replayed, the outputs of the model are finite",
            note=note,
            location=LOSS_FUNCTION,
        )
    pattern = "that is most steps"
    if metrics.ends_nonfinite:
        pattern = f"among them the last {metrics.consecutive_overflows}"
    elif metrics.nonfinite_losses < metrics.steps / 2:
        pattern = "most losses are finite"
    note = (
        "kmp.callbacks.defaults() replays such a batch, and names the first layer that is not"
        " finite"
    )
    if metrics.replays:
        note = "no replay shows where: train in float32, to know whether float16 is the cause"
    return _loss(
        metrics,
        "The loss is NaN or Inf before scaling, so no loss scale helps.",
        pattern,
        note=note,
    )


def _loss(
    metrics: RunMetrics,
    title: str,
    reason: str,
    edits: Sequence[Edit] = (),
    note: str = "",
    location: str = "",
) -> Finding:
    return Finding(
        "loss", ERROR, title, f"{failed_steps(metrics)}; {reason}", edits, note, location
    )
