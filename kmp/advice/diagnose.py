"""Diagnoses a run and sums up the findings in a verdict."""

from kmp.advice.diagnosis_rules import CAUSES
from kmp.advice.finding import Advice, Finding
from kmp.advice.run_metrics import RunMetrics
from kmp.records import RUN_EXPECTED, Run
from kmp.utils import as_power, validation

_MANY_ZEROS = 0.75
_MANY_SKIPPED = 0.05


def advise(run: Run) -> Advice:
    """Diagnoses how float16 affects a run, why, and what to change.

    Args:
        run: Records of `kmp.callbacks.defaults()`. Without gradient samples only overflows are detected.

    Returns:
        Ranked findings and a verdict. A problem without evidence in the run is not reported.

    Raises:
        TypeError: If `run` is not a `kmp.records.Run`.

    Example:
    >>> advise(Run([{"step": 500, "overflow_count": 0, "loss_scale": 32768.0}])).verdict
    '0 of 500 steps were skipped. No gradients were sampled, so underflow is unknown.'
    """
    validation.instance("run", run, Run, RUN_EXPECTED)
    return diagnosis_of(RunMetrics(run))


def diagnosis_of(metrics: RunMetrics) -> Advice:
    """Returns the findings and the verdict for the metrics of a run."""
    findings = [finding for rule in CAUSES if (finding := rule(metrics))]
    return Advice(tuple(findings), _verdict(metrics, findings))


def _verdict(metrics: RunMetrics, findings: list[Finding]) -> str:
    if not metrics.steps:
        return "The run is empty: nothing was recorded."
    if findings:
        return findings[0].title
    skipped = f"{metrics.overflows} of {metrics.steps} steps {'was' if metrics.overflows == 1 else 'were'} skipped"
    if metrics.curve is None or not metrics.finite_samples:
        reason = "No sampled step was finite" if metrics.samples else "No gradients were sampled"
        return f"{skipped}. {reason}, so underflow is unknown."
    if not metrics.is_float16:
        return f"{skipped}. The run computed in {metrics.dtypes}, where gradients need no loss scale."
    all_zero = metrics.all_zero_variables
    is_ambiguous = metrics.excess_zeros is None and (metrics.zero_share > _MANY_ZEROS or bool(all_zero))
    effect = "No sign that float16 hurts this run" if is_ambiguous else "float16 does not hurt this run"
    if metrics.overflows > _MANY_SKIPPED * metrics.steps:
        effect = "Apart from the skipped steps, float16 has little effect on this run"
    variables = all_zero[0] if len(all_zero) == 1 else f"{len(all_zero)} variables"
    including = f", including all of {variables}" if all_zero else ""
    caveat = (
        f" {metrics.zero_share:.1%} are exactly zero{including}; only a float32 reference shows whether float16 "
        "flushed them."
    )
    return (
        f"{effect}: {skipped}, and at the loss scale in use, {as_power(metrics.scale)}, {metrics.subnormal_share:.1%} "
        f"of the nonzero gradient elements are subnormal in float16 and {metrics.underflow_share:.1%} are too small "
        f"for float16.{caveat * is_ambiguous}"
    )
