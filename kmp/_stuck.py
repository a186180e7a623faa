"""When training is stuck, and what to say of it: from readings to words."""

from kmp.records import Snapshot


class StuckError(RuntimeError):
    """Raised by `kmp.callbacks.StuckDetector`: float16 training does not get on; the message says why."""


def is_stuck(now: Snapshot, before: Snapshot, patience: int) -> bool:
    """Whether a reading shows `patience` skipped steps in a row, or one, since the last reading, at the lowest scale.

    Args:
        now: The reading.
        before: The last reading before it.
        patience: In steps.
    """
    return now.overflows_in_a_row >= patience or now.overflows_at_min_scale > before.overflows_at_min_scale


def describe(now: Snapshot, weights: str) -> str:
    """Returns what happened, the cause, the loss, the scale, the variable to blame, and what to try.

    Args:
        now: The reading that shows it.
        weights: A sentence on where the weights are.
    """
    return "\n".join([_happened(now), *_cause(now), weights])


def _happened(now: Snapshot) -> str:
    steps = now.overflows_in_a_row
    skipped = f"the last {steps} steps were skipped" if steps != 1 else "the last step was skipped"
    at_lowest = " at the lowest loss scale" if now.overflows_at_min_scale else ""
    return f"Training is stuck: at step {now.step} {skipped}{at_lowest}. {_numbers(now)}"


def _numbers(now: Snapshot) -> str:
    loss = "" if now.last_loss is None else f"Last loss: {now.last_loss:g}. "
    return f"{loss}Loss scale: {now.loss_scale:g}."


def _cause(now: Snapshot) -> list[str]:
    from_loss, skipped = now.nonfinite_losses_in_a_row, now.overflows_in_a_row
    share = "" if from_loss in (0, skipped) else f" in {from_loss} of these steps"
    if from_loss:
        return [
            f"Cause: the loss was inf or nan before it was scaled{share}, so no loss scale helps.",
            "Try: look for inf and nan in the data (np.isfinite(x).all()); normalize inputs, because float16 ends at "
            "65504; wrap the layer whose output is the first to overflow in kmp.layers.Float32; lower the learning "
            "rate, or set clipnorm on the inner optimizer, if the loss rose before it.",
        ]
    return [
        "Cause: the loss is finite, and a gradient overflows float16 in the backward pass at every scale tried.",
        f"To blame: {now.culprit}, of the variables whose gradient is not finite the one nearest the loss; an overflow "
        "spreads from there to all before it.",
        "Try: wrap the layers between that variable and the loss in kmp.layers.Float32; take the mean of the loss, not "
        "its sum; pass a lower min_scale; or train with kmp.enable('mixed_bfloat16').",
    ]
