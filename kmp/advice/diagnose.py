"""`kmp.advise`: the diagnosis of a run, as findings and a verdict."""

from kmp.advice.finding import Advice, Finding
from kmp.diagnosis import SEVERITIES, Cause, Observations, causes_of, verdict_of
from kmp.records import Run
from kmp.records.run import RUN_EXPECTED
from kmp.utils import validation


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
    >>> import kmp
    >>> from kmp.records import Record, Run
    >>> run = Run([Record(step=500, overflow_count=0, loss_scale=32768.0)])
    >>> kmp.advise(run).verdict.partition(". ")[0]
    'It is not known whether float16 hurts this run'
    """
    validation.instance("run", run, Run, RUN_EXPECTED)
    return advice_of(Observations(run))


def advice_of(run: Observations) -> Advice:
    """Returns the findings and the verdict for what was observed of a run."""
    causes = sorted(causes_of(run), key=lambda cause: SEVERITIES.index(cause.severity))
    judged = verdict_of(run, causes)
    return Advice(list(map(finding_of, causes)), judged.text, judged.is_known)


def finding_of(cause: Cause) -> Finding:
    """Returns a cause in words."""
    change, code = cause.change, cause.code
    return Finding(
        cause=cause.name,
        severity=cause.severity,
        title=cause.title,
        evidence=cause.evidence,
        edits=change.edits,
        tried=change.tried if change.edits else "",
        note=cause.note,
        location=cause.location,
        code=f"{code.file}, line {code.line}" if code and code.file else "",
    )
