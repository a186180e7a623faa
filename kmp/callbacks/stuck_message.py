"""The error message of a stuck training, written from two snapshots of the optimizer."""

from kmp.advice import Finding
from kmp.records import Snapshot


class StuckError(RuntimeError):
    """Raised by `kmp.callbacks.StuckDetector` if float16 training makes no progress. The message names the cause.

    Example:
    >>> try:
    ...     raise StuckError("Training is stuck: ...")  # as `fit` does
    ... except StuckError as error:
    ...     print("continue in bfloat16:", error)
    continue in bfloat16: Training is stuck: ...
    """


def is_at_min_scale(now: Snapshot, before: Snapshot) -> bool:
    """Whether a step between two snapshots overflowed at the minimum loss scale."""
    return now.overflows_at_min_scale > before.overflows_at_min_scale


def format_message(
    now: Snapshot, before: Snapshot, is_fixed: bool, weights: str, finding: Finding | None = None
) -> str:
    """Returns a message with the cause, the loss, the loss scale, the origin of the overflow, and what to try.

    Args:
        now: The snapshot at which training is stuck.
        before: The previous snapshot.
        is_fixed: Whether the loss scale is fixed.
        weights: A sentence that says which weights the model has and where they are saved.
        finding: The finding in the records of the run, if there is one.
    """
    at_min_scale = is_at_min_scale(now, before)
    if finding:
        cause = f"Cause: {finding}".splitlines()
        return "\n".join([_summary(now, at_min_scale), *cause, weights])
    cause = _nonfinite_loss(now) if now.nonfinite_losses_in_a_row else _gradient_overflow(now, at_min_scale, is_fixed)
    return "\n".join([_summary(now, at_min_scale), *cause, weights])


def _summary(now: Snapshot, at_min_scale: bool) -> str:
    count = now.overflows_in_a_row
    skipped = {0: "a step since the last check was skipped", 1: "the last step was skipped"}.get(
        count, f"the last {count} steps were skipped"
    )
    loss = "" if now.last_loss is None else f"Last loss: {now.last_loss:g}. "
    scale = " with the loss scale at its lowest value" if at_min_scale else ""
    return f"Training is stuck: at step {now.step} {skipped}{scale}. {loss}Loss scale: {now.loss_scale:g}."


def _nonfinite_loss(now: Snapshot) -> list[str]:
    count = now.nonfinite_losses_in_a_row
    share = "" if count == now.overflows_in_a_row else f" in {count} of these steps"
    return [
        f"Cause: the loss was NaN or Inf before it was scaled{share}, so no loss scale helps.",
        "Try: check the data for NaN and Inf (np.isfinite(x).all()); normalize the inputs, because float16 ends at "
        "65504; wrap the layer whose output overflows first in kmp.layers.Float32; if the loss rose before it, lower "
        "the learning rate or set clipnorm on the inner optimizer. kmp.callbacks.defaults() replays the batch and "
        "names the layer.",
    ]


def _origin_count(now: Snapshot) -> str:
    count = now.overflow_origins_by_variable.get(now.overflow_origin or "", 0)
    times, steps = "once" if count == 1 else f"{count} times", "step" if now.overflow_count == 1 else "steps"
    return f" ({times} in {now.overflow_count} skipped {steps})" if count else ""


def _gradient_overflow(now: Snapshot, at_min_scale: bool, is_fixed: bool) -> list[str]:
    loss = "no loss was passed to scale_loss" if now.last_loss is None else "the loss was finite"
    wrap_layers = "wrap the layers between that variable and the loss in kmp.layers.Float32"
    loss_mean = "take the mean of the loss, not its sum"
    if is_fixed:
        remedies = ["pass a lower loss_scale, or loss_scale='dynamic'", loss_mean, wrap_layers]
    elif at_min_scale:
        remedies = [wrap_layers, loss_mean, "pass a lower min_scale"]
    else:
        still_falling = "pass a lower initial_scale or a higher patience, because the scale was still falling"
        remedies = [wrap_layers, loss_mean, still_falling]
    return [
        f"Cause: {loss}, and a gradient overflowed float16 in the backward pass.",
        f"Overflow origin: {now.overflow_origin}{_origin_count(now)}. Of the variables with a non-finite gradient, it "
        "is the nearest to the loss; the overflow spreads from there to all earlier layers.",
        f"Try: {'; '.join(remedies)}; or train with kmp.enable('mixed_bfloat16').",
    ]
