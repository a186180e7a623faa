"""What is told of a run: findings with their evidence, and a verdict."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that costs the run something.

    Args:
        cause: What it is, as a short name: `"exploding"`, `"data"`, `"layer"`, `"loss"`, `"scale_too_large"`,
            `"scale_too_small"`, `"range"`, `"growth_interval_too_small"` or `"initial_scale"`.
        title: What is wrong, as a sentence.
        evidence: What in the run says so, with numbers.
        change: A line of code to change.

    Example:
    >>> print(Finding("range", "The gradients span too much.", "what was counted", "kmp.enable('mixed_bfloat16')"))
    The gradients span too much.
      RunMetrics: what was counted
      Change: kmp.enable('mixed_bfloat16')
    """

    cause: str
    title: str
    evidence: str
    change: str

    def __str__(self) -> str:
        return f"{self.title}\n  RunMetrics: {self.evidence}\n  Change: {self.change}"


class Advice(tuple[Finding, ...]):
    """Findings, the most important first; none for a healthy run.

    Args:
        findings: The findings.
        verdict: What float16 costs this run, in a sentence.

    Example:
    >>> print(Advice([], "float16 costs nothing here."))
    float16 costs nothing here.
    """

    verdict: str

    def __new__(cls, findings: Iterable[Finding], verdict: str) -> "Advice":
        advice = super().__new__(cls, tuple(findings))
        advice.verdict = verdict
        return advice

    def __str__(self) -> str:
        return "\n".join([self.verdict, *(f"{number}. {finding}" for number, finding in enumerate(self, 1))])
