"""Diagnoses a run and sums up the findings in a verdict."""

from collections.abc import Callable

from kmp.advice import (
    batch_rules,
    forward_rules,
    precision_rules,
    scale_rules,
    underflow_rules,
    update_rules,
)
from kmp.advice.finding import ERROR, SEVERITIES, Advice, Finding
from kmp.advice.run_metrics import RunMetrics
from kmp.advice.verdict import verdict
from kmp.records import RUN_EXPECTED, Run
from kmp.utils import validation

# The findings up to the first error are reported: those after it are its consequences. So the most
# specific come first, after those that are no problem.
RULES: tuple[Callable[[RunMetrics], Finding | None], ...] = (
    precision_rules.fallback,
    underflow_rules.dead,
    underflow_rules.unused,
    batch_rules.data,
    batch_rules.targets,
    update_rules.division_by_epsilon,
    update_rules.lost_squares,
    update_rules.exploding,
    forward_rules.forward,
    forward_rules.uncompiled,
    precision_rules.unscaled_loss,
    precision_rules.outputs,
    precision_rules.states,
    scale_rules.nonfinite_gradients,
    scale_rules.hysteresis,
    scale_rules.backward,
    scale_rules.scale_too_large,
    scale_rules.min_scale,
    scale_rules.initial_scale,
    scale_rules.growth_interval_too_small,
    update_rules.lost_updates,
    underflow_rules.branch,
    underflow_rules.scale_too_small,
    underflow_rules.wide_range,
    precision_rules.gradients,
)


def advise(run: Run) -> Advice:
    """Diagnoses how float16 affects a run, why, and what to change.

    Args:
        run: Records of `kmp.callbacks.defaults()`. Without gradient samples only overflows are
            detected.

    Returns:
        Ranked findings and a verdict. A problem without evidence in the run is not reported.

    Example:
    >>> advise(Run([{"step": 500, "overflow_count": 0, "loss_scale": 32768.0}])).verdict.partition(";")[0]
    'It is not known whether float16 hurts this run. Not measured: gradients, because none were
    sampled'
    """
    validation.instance("run", run, Run, RUN_EXPECTED)
    return diagnosis_of(RunMetrics(run))


def diagnosis_of(metrics: RunMetrics) -> Advice:
    """Returns the findings and the verdict for the metrics of a run."""
    findings: list[Finding] = []
    for rule in RULES:
        if finding := rule(metrics):
            findings.append(finding)
            if finding.severity == ERROR:
                break
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Advice(findings, verdict(metrics, findings))
