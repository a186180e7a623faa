"""The verdict of a diagnosis: the effect of float16 on a run, in a few sentences."""

from collections.abc import Sequence

from kmp.advice.finding import Finding
from kmp.advice.unknowns import doubt, lost_norm, unknowns
from kmp.advice.wording import counted, skipped
from kmp.diagnosis import INFO, RunMetrics, soundness, thresholds
from kmp.utils.float_formats import as_power

_NOT_KNOWN = "It is not known whether float16 hurts this run."


def verdict(run: RunMetrics, findings: Sequence[Finding]) -> str:
    """Returns the effect of float16 on a run: the first finding if that is a problem."""
    if not run.last_step:
        return "The run is empty: nothing was recorded."
    if findings and findings[0].severity != INFO:
        return findings[0].title
    if not run.is_float16:
        dtypes = f"The run computed in {run.dtypes}, where gradients need no loss scale."
        return f"{skipped(run).capitalize()}. {dtypes}"
    if run.curve is None or not run.finite_samples:
        return f"{_NOT_KNOWN} {_unsampled(run)} Measured: {skipped(run)}."
    # No headline reassures beside something that was not measured.
    unknown = list(unknowns(run))
    if unknown:
        not_measured = " ".join(unknown)
        return f"{_NOT_KNOWN} {not_measured} Measured: {_measured(run)}"
    norm = _norm_of_small(run)
    return f"float16 does not hurt this run: {_measured(run, norm)}"


def _unsampled(run: RunMetrics) -> str:
    reason = "no sampled step was finite" if run.samples else "none were sampled"
    remedy = "a run with kmp.callbacks.defaults() whose steps are finite"
    return doubt(f"gradients, because {reason}", remedy)


def _measured(run: RunMetrics, norm: str = "") -> str:
    """Returns what comparisons, counts and samples say of a run.

    Args:
        run: The run.
        norm: How much the elements are that are too small.
    """
    samples = counted(len(run.finite_samples), "sample")
    scale = as_power(run.scale)
    subnormal = f"{run.subnormal_share:.1%} of the nonzero gradient elements"
    too_small = f"{run.underflow_share:.1%}"
    return (
        f"{_compared(run)}{skipped(run)},"
        f" and at the loss scale in use, {scale},"
        f" {subnormal} are subnormal in float16"
        f" and {too_small} are too small for float16{norm}, in {samples}."
    )


def _norm_of_small(run: RunMetrics) -> str:
    """Returns how much the elements are that are too small, if they are many."""
    is_measured = run.curve is not None and run.curve.is_measured
    if is_measured and run.underflow_share > thresholds.FEW_TOO_SMALL:
        return f" (at most {lost_norm(run):.1g} of the norm)"
    return ""


def _compared(run: RunMetrics) -> str:
    """Returns how far outputs and gradients are from those in float32."""
    replays = [replay for _, replay in run.comparisons]
    if not replays:
        return ""
    errors = [replay.output_error or 0.0 for replay in replays]
    outputs = f"the outputs differ from float32 by at most {max(errors):.2%}"
    batches = counted(len(replays), "batch", "es")
    return f"in {batches} {outputs}{_gradients(run)}; "


def _gradients(run: RunMetrics) -> str:
    largest = run.largest_gradient_error
    if largest is None:
        return ""
    has_converged = False
    for _, replay in run.comparisons:
        errors = replay.gradient_errors
        has_converged |= len(soundness.unconverged(errors)) < len(errors)
    until = " until they nearly vanish" if has_converged else ""
    return f", and the gradients of a layer by at most {largest:.1%}{until}"
