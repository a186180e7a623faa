"""Puts the diagnosis of a run into words."""

from kmp.advice import (  # they add their causes to `text_of`
    batch_texts,
    forward_texts,
    precision_texts,
    range_texts,
    scale_texts,
    step_texts,
    underflow_texts,
    update_texts,
)
from kmp.advice.finding import Advice, Finding
from kmp.advice.sentences import text_of
from kmp.advice.verdict import verdict
from kmp.diagnosis import SEVERITIES, Cause, RunMetrics, causes_of
from kmp.records import Run
from kmp.records.run import RUN_EXPECTED
from kmp.utils import validation

__all__ = [
    "advice_of",
    "advise",
    "batch_texts",
    "finding_of",
    "forward_texts",
    "precision_texts",
    "range_texts",
    "scale_texts",
    "step_texts",
    "underflow_texts",
    "update_texts",
]


def advise(run: Run) -> Advice:
    """Diagnoses what is wrong with a run, why, and what to change.

    The number format of the run decides what that can be. float16 overflows, underflows and
    rounds; bfloat16, with the range of float32 and fewer bits, only rounds. In float32, NaN, data,
    targets, learning rate and layers without a gradient are diagnosed.

    Args:
        run: Records of `kmp.callbacks.defaults()`. Without gradient samples only overflows are
            detected.

    Returns:
        Ranked findings and a verdict. A problem without evidence in the run is not reported.

    Example:
    >>> from kmp.records import Record
    >>> run = Run([Record(step=500, overflow_count=0, loss_scale=32768.0)])
    >>> advise(run).verdict.partition(". ")[0]
    'It is not known whether float16 hurts this run'
    """
    validation.instance("run", run, Run, RUN_EXPECTED)
    return advice_of(RunMetrics(run))


def advice_of(run: RunMetrics) -> Advice:
    """Returns the findings and the verdict for the metrics of a run."""
    findings = [finding_of(cause, run) for cause in causes_of(run)]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Advice(findings, verdict(run, findings))


def finding_of(cause: Cause, run: RunMetrics) -> Finding:
    """Returns a cause in words."""
    text = text_of(cause, run)
    return Finding(
        cause.name,
        cause.severity,
        text.title,
        text.evidence,
        cause.edits,
        text.note,
        cause.location,
    )
