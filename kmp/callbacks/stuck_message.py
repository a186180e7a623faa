"""When training is stuck, and what to say of it: from readings to words."""

from kmp.records import Snapshot


class StuckError(RuntimeError):
    """Raised by `kmp.callbacks.StuckDetector`: float16 training does not get on; the message says why.

    Example:
    >>> try:
    ...     raise StuckError("Training is stuck: ...")  # as `fit` does
    ... except StuckError as error:
    ...     print("continue in bfloat16:", error)
    continue in bfloat16: Training is stuck: ...
    """


def is_at_lowest(now: Snapshot, before: Snapshot) -> bool:
    """Whether a step between two readings asked for a scale below the lowest one."""
    return now.overflows_at_min_scale > before.overflows_at_min_scale


def describe(now: Snapshot, before: Snapshot, is_fixed: bool, weights: str) -> str:
    """Returns what happened, the cause, the loss, the scale, the variable to blame, and what to try.

    Args:
        now: The reading that shows it.
        before: The last reading before it.
        is_fixed: Whether the scale never moves.
        weights: A sentence on where the weights are.
    """
    at_lowest = is_at_lowest(now, before)
    cause = _from_loss(now) if now.nonfinite_losses_in_a_row else _from_backward(now, at_lowest, is_fixed)
    return "\n".join([_happened(now, at_lowest), *cause, weights])


def _happened(now: Snapshot, at_lowest: bool) -> str:
    count = now.overflows_in_a_row
    skipped = {0: "a step since the last reading was skipped", 1: "the last step was skipped"}.get(
        count, f"the last {count} steps were skipped"
    )
    loss = "" if now.last_loss is None else f"Last loss: {now.last_loss:g}. "
    lowest = " with the loss scale at its lowest" if at_lowest else ""
    return f"Training is stuck: at step {now.step} {skipped}{lowest}. {loss}Loss scale: {now.loss_scale:g}."


def _from_loss(now: Snapshot) -> list[str]:
    count = now.nonfinite_losses_in_a_row
    share = "" if count == now.overflows_in_a_row else f" in {count} of these steps"
    first = [] if now.nonfinite_activation is None else [f"The first to be inf or nan: {now.nonfinite_activation}."]
    return [
        f"Cause: the loss was inf or nan before it was scaled{share}, so no loss scale helps.",
        *first,
        "Try: look for inf and nan in the data (np.isfinite(x).all()); normalize inputs, because float16 ends at "
        "65504; wrap the layer whose output is the first to overflow in kmp.layers.Float32; lower the learning rate, "
        "or set clipnorm on the inner optimizer, if the loss rose before it."
        + ("" if first else " kmp.callbacks.ForwardProbe() names the batch or the layer that is the first."),
    ]


def _how_often(now: Snapshot) -> str:
    count = now.overflow_origins_by_variable.get(now.overflow_origin or "", 0)
    times, steps = "once" if count == 1 else f"{count} times", "step" if now.overflow_count == 1 else "steps"
    return f" ({times} in {now.overflow_count} skipped {steps})" if count else ""


def _from_backward(now: Snapshot, at_lowest: bool, is_fixed: bool) -> list[str]:
    loss = "the loss went through no scale_loss" if now.last_loss is None else "the loss was finite"
    layers = "wrap the layers between that variable and the loss in kmp.layers.Float32"
    loss_mean = "take the mean of the loss, not its sum"
    if is_fixed:
        ways = ["pass a lower loss_scale, or loss_scale='dynamic'", loss_mean, layers]
    elif at_lowest:
        ways = [layers, loss_mean, "pass a lower min_scale"]
    else:
        still = "pass a lower initial_scale, or more patience, because the scale was still falling"
        ways = [layers, loss_mean, still]
    return [
        f"Cause: {loss}, and a gradient overflowed float16 in the backward pass.",
        f"To blame: {now.overflow_origin}, of the variables whose gradient is not finite the nearest to the loss"
        f"{_how_often(now)}; an overflow spreads from there to all before it.",
        f"Try: {'; '.join(ways)}; or train with kmp.enable('mixed_bfloat16').",
    ]
