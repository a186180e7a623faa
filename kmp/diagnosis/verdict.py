"""The verdict of a diagnosis, its last rung: what the number format of a run does to it."""

from collections.abc import Sequence
from typing import NamedTuple

from kmp.diagnosis import soundness, thresholds
from kmp.diagnosis.cause import INFO, Cause
from kmp.diagnosis.observations import Observations
from kmp.diagnosis.unknowns import doubt, unknowns
from kmp.diagnosis.wording import counted, skipped
from kmp.utils.float_formats import FLOAT16, FLOAT32, as_power

_MOST_LINES = 5


class Verdict(NamedTuple):
    """The effect of the number format on a run.

    Attributes:
        text: The effect, in a few sentences.
        is_known: Whether the records suffice to know it.
    """

    text: str
    is_known: bool = True


def verdict_of(run: Observations, causes: Sequence[Cause]) -> Verdict:
    """Returns the effect of the format on a run.

    That is its first problem; or that it does no harm, with the evidence; or that this is not
    known, with what is missing.

    Args:
        run: What was observed.
        causes: Its causes, the gravest first.
    """
    if not run.last_step:
        return Verdict("The run is empty: nothing was recorded.", is_known=False)
    if causes and causes[0].severity != INFO:
        return Verdict(causes[0].title)
    if run.format is FLOAT32:
        return _of_float32(run, has_causes=bool(causes))
    not_known = f"It is not known whether {run.format.name} hurts this run."
    if not run.gradients.finite:
        text = f"{not_known} Measured: {skipped(run)}. {_unsampled(run)}"
        return Verdict(text, is_known=False)
    # No headline reassures beside something that was not measured.
    unknown = list(unknowns(run))
    if unknown:
        text = " ".join([not_known, f"Measured: {_measured(run)}", *unknown])
        return Verdict(text + _promoted(run), is_known=False)
    harmless = f"{run.format.name} does not hurt this run"
    if run.repair:
        layers = run.model.describe_repaired(run.repair.fallback or [])
        harmless = f"Since step {run.repair.step}, with {layers} in float32, {harmless}"
    # How much the elements are that are too small, if they are many.
    gradients, norm = run.gradients, ""
    is_measured = gradients.curve is not None and gradients.curve.is_measured
    if is_measured and gradients.underflow_share > thresholds.NEGLIGIBLE:
        norm = f" (at most {gradients.lost_norm:.1g} of the norm)"
    return Verdict(f"{harmless}: {_measured(run, norm)}{_promoted(run)}")


def _of_float32(run: Observations, *, has_causes: bool) -> Verdict:
    """Returns what was seen of a run that loses nothing to its format."""
    samples = run.gradients.finite
    if not samples:
        not_known = "It is not known whether anything is wrong with this float32 run."
        text = f"{not_known} Measured: {skipped(run)}. {_unsampled(run)}"
        return Verdict(text, is_known=False)
    norms = [sample.total_norm for sample in samples]
    low, high = f"{min(norms):.3g}", f"{max(norms):.3g}"
    norm = low if low == high else f"{low} to {high}"
    updates = ""
    if not run.updates.are_unmeasured:
        updates = f", and no update seen was larger than {run.updates.ratio:.2g} times the weights"
    nothing = "Nothing else" if has_causes else "Nothing"
    return Verdict(
        f"{nothing} is wrong with this float32 run that kmp can see: {skipped(run)}, the norm of"
        f" the gradients was {norm} in {counted(len(samples), 'sample')}{updates}."
    )


def _unsampled(run: Observations) -> str:
    reason = "no sampled step was finite" if run.gradients.samples else "none were sampled"
    remedy = "a run with kmp.callbacks.defaults() whose steps are finite"
    return doubt(f"gradients, because {reason}", remedy)


def _measured(run: Observations, norm: str = "") -> str:
    """Returns what comparisons, counts and samples say of a run.

    Args:
        run: The run.
        norm: How much the elements are that are too small.
    """
    if run.format is not FLOAT16:  # which alone needs a loss scale
        return f"{_compared(run)}{skipped(run)}."
    gradients = run.gradients
    return (
        f"{_compared(run)}{skipped(run)},"
        f" and at the loss scale in use, {as_power(run.loss_scale)},"
        f" {gradients.subnormal_share:.1%} of the nonzero gradient elements are subnormal in"
        f" float16 and {gradients.underflow_share:.1%} are too small for float16{norm}, in"
        f" {counted(len(gradients.finite), 'sample')}."
    )


def _compared(run: Observations) -> str:
    """Returns how far outputs and gradients are from those in float32."""
    replays = [replay for _, replay in run.passes.comparisons]
    if not replays:
        return ""
    errors = [replay.output_error or 0.0 for replay in replays]
    batches = counted(len(replays), "batch", "es")
    outputs = f"in {batches} the outputs differ from float32 by at most {max(errors):.2%}"
    largest = run.passes.largest_gradient_error
    if largest is None:
        return f"{outputs}; "

    # An error that is not small is printed with the limit, or with the noise of a batch.
    beside = ""
    if largest.error >= thresholds.SMALL_GRADIENT_ERROR:
        beside = f" (harmful above {thresholds.HARMFUL_GRADIENT_ERROR:.0%})"
        is_above = largest.error > thresholds.HARMFUL_GRADIENT_ERROR
        if is_above and largest.noise is not None:
            beside = f" (another batch of this size changes them by {largest.noise:.0%})"
    have_converged = any(
        len(soundness.unconverged(replay.gradient_errors)) < len(replay.gradient_errors)
        for replay in replays
    )
    until = " until they nearly vanish" if have_converged else ""
    gradients = f"the gradients of a layer by at most {largest.error:.1%}{until}{beside}"
    return f"{outputs}, and {gradients}; "


def _promoted(run: Observations) -> str:
    """Returns the lines of the program that compute in float32, because an operand is float32."""
    lines = run.settings.promoted
    if not lines:
        return ""
    more = f" and {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else ""
    these = f"{'; '.join(lines[:_MOST_LINES])}{more}"
    return f" Computed in float32, because one operand is float32: {these}."
