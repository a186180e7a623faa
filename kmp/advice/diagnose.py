"""Diagnoses a run and sums up the findings in a verdict."""

from collections.abc import Callable

from kmp.advice import nonfinite_rules, scale_rules, underflow_rules
from kmp.advice.finding import INFO, SEVERITIES, Advice, Finding
from kmp.advice.run_metrics import RunMetrics
from kmp.advice.verdict import verdict
from kmp.records import RUN_EXPECTED, Run
from kmp.utils import validation

Rule = Callable[[RunMetrics], Finding | None]

# The most specific first. Of those of one group, only the first that applies is reported: the others are consequences.
GROUPS: tuple[tuple[Rule, ...], ...] = (
    (
        nonfinite_rules.data,
        nonfinite_rules.targets,
        nonfinite_rules.optimizer_state,
        nonfinite_rules.exploding,
        nonfinite_rules.forward,
        nonfinite_rules.backward,
        scale_rules.scale_too_large,
        underflow_rules.not_scaled,
        underflow_rules.lost_updates,
        underflow_rules.branch,
        underflow_rules.scale_too_small,
        underflow_rules.wide_range,
    ),
    (scale_rules.growth_interval_too_small, scale_rules.initial_scale),
    (underflow_rules.dead,),
)


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
    first_of_each = (next((found for rule in group if (found := rule(metrics))), None) for group in GROUPS)
    findings = [finding for finding in first_of_each if finding]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Advice(tuple(findings), verdict(metrics, [finding for finding in findings if finding.severity != INFO]))
