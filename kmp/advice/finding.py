"""The result of a diagnosis: findings with their evidence, and a verdict."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from kmp.utils import printable


@dataclass(frozen=True)
class Finding:
    """One problem of a run. Control characters, direction marks and the like in its texts are escaped.

    Args:
        cause: Short name of the cause: `"exploding"`, `"data"`, `"layer"`, `"loss"`, `"not_scaled"`,
            `"scale_too_large"`, `"scale_too_small"`, `"range"`, `"growth_interval_too_small"` or `"initial_scale"`.
        title: The problem, as a sentence.
        evidence: The records that show it, with numbers.
        change: A line of code to change.

    Example:
    >>> print(Finding("range", "The gradients span too much.", "what was counted", "kmp.enable('mixed_bfloat16')"))
    The gradients span too much.
      Evidence: what was counted
      Change: kmp.enable('mixed_bfloat16')
    """

    cause: str
    title: str
    evidence: str
    change: str

    def __post_init__(self) -> None:
        for text in fields(self):
            object.__setattr__(self, text.name, printable(getattr(self, text.name)))

    def __str__(self) -> str:
        return f"{self.title}\n  Evidence: {self.evidence}\n  Change: {self.change}"


class Advice(tuple[Finding, ...]):
    """A tuple of findings, most important first. Empty for a healthy run.

    Args:
        findings: The findings.
        verdict: The effect of float16 on this run, in a sentence.

    Example:
    >>> print(Advice([], "float16 does not hurt this run."))
    float16 does not hurt this run.
    """

    verdict: str

    def __new__(cls, findings: Iterable[Finding], verdict: str) -> "Advice":
        advice = super().__new__(cls, tuple(findings))
        advice.verdict = printable(verdict)
        return advice

    def __str__(self) -> str:
        return "\n".join([self.verdict, *(f"{number}. {finding}" for number, finding in enumerate(self, 1))])
