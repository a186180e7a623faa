"""The verdict of a diagnosis: the effect of its number format on a run, in a few sentences."""

from collections.abc import Sequence

from kmp.advice.finding import Finding
from kmp.advice.unknowns import doubt, lost_norm, unknowns
from kmp.advice.wording import counted, repaired_layers, skipped
from kmp.diagnosis import INFO, RunMetrics, soundness, thresholds
from kmp.records.replay import GradientError
from kmp.utils.float_formats import FLOAT16, FLOAT32, as_power

_MOST_LINES = 5


def verdict(run: RunMetrics, findings: Sequence[Finding]) -> str:
    """Returns the effect of the format on a run: the first finding if that is a problem."""
    if not run.last_step:
        return "The run is empty: nothing was recorded."
    if findings and findings[0].severity != INFO:
        return findings[0].title
    if run.format is FLOAT32:
        return _of_float32(run, findings)
    not_known = f"It is not known whether {run.format.name} hurts this run."
    if not run.finite_samples:
        return f"{not_known} Measured: {skipped(run)}. {_unsampled(run)}"
    # No headline reassures beside something that was not measured.
    unknown = list(unknowns(run))
    if unknown:
        return " ".join([not_known, f"Measured: {_measured(run)}", *unknown]) + _promoted(run)
    harmless = f"{run.format.name} does not hurt this run"
    if run.fallback:
        layers = repaired_layers(run.fallback.fallback or [], run)
        harmless = f"Since step {run.fallback.step}, with {layers} in float32, {harmless}"
    return f"{harmless}: {_measured(run, _norm_of_small(run))}{_promoted(run)}"


def _promoted(run: RunMetrics) -> str:
    """Returns the lines of the program that compute in float32, because an operand is float32."""
    lines = run.settings.promoted
    if not lines:
        return ""
    more = f" and {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else ""
    these = f"{'; '.join(lines[:_MOST_LINES])}{more}"
    return f" Computed in float32, because one operand is float32: {these}."


def _of_float32(run: RunMetrics, findings: Sequence[Finding]) -> str:
    """Returns what was seen of a run that loses nothing to its format."""
    if not run.finite_samples:
        not_known = "It is not known whether anything is wrong with this float32 run."
        return f"{not_known} Measured: {skipped(run)}. {_unsampled(run)}"
    norms = [sample.total_norm for sample in run.finite_samples]
    gradients = f"the norm of the gradients was {_range(norms)} in {_samples(run)}"
    updates = ""
    if not run.has_no_update:
        updates = (
            f", and no update seen was larger than {run.update_ratio[1]:.2g} times the weights"
        )
    nothing = "Nothing else" if findings else "Nothing"
    return (
        f"{nothing} is wrong with this float32 run that kmp can see: {skipped(run)},"
        f" {gradients}{updates}."
    )


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def _samples(run: RunMetrics) -> str:
    return counted(len(run.finite_samples), "sample")


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
    if run.format is not FLOAT16:  # which alone needs a loss scale
        return f"{_compared(run)}{skipped(run)}."
    scale = as_power(run.scale)
    subnormal = f"{run.subnormal_share:.1%} of the nonzero gradient elements"
    too_small = f"{run.underflow_share:.1%}"
    return (
        f"{_compared(run)}{skipped(run)},"
        f" and at the loss scale in use, {scale},"
        f" {subnormal} are subnormal in float16"
        f" and {too_small} are too small for float16{norm}, in {_samples(run)}."
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
    normal = _normal_difference(largest)
    return f", and the gradients of a layer by at most {largest.error:.1%}{until}{normal}"


def _normal_difference(found: GradientError) -> str:
    """Returns what to compare an error of gradients with that is not small."""
    if found.error < thresholds.SMALL_GRADIENT_ERROR:
        return ""
    if found.noise is None:
        return f" (harmful above {thresholds.HARMFUL_GRADIENT_ERROR:.0%})"
    return f" (another batch of this size changes them by {found.noise:.0%})"
