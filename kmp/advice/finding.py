"""The result of a diagnosis: findings with their evidence, and a verdict."""

from collections.abc import Iterable
from dataclasses import dataclass

from kmp.advice.edits import Edit
from kmp.utils import printable

ERROR, WARNING, INFO = SEVERITIES = ("error", "warning", "info")


@dataclass(frozen=True)
class Finding:
    """One problem of a run. Control characters, direction marks and the like in its texts are escaped.

    Args:
        cause: Short name of the cause. Of skipped steps: `"data"`, `"targets"`, `"optimizer_state"`, `"exploding"`,
            `"constant"`, `"forward_overflow"`, `"forward_underflow"`, `"rounding"`, `"loss_overflow"`,
            `"loss"`, `"backward_overflow"` or `"scale_too_large"`. Of what float16 loses:
            `"lost_updates"`, `"branch_underflow"`, `"scale_too_small"` or `"range"`. Of settings:
            `"growth_interval_too_small"` or `"initial_scale"`. Or `"dead"` or `"unused"`.
        severity: `"error"` if the run is broken, `"warning"` if it loses accuracy or time, or `"info"`.
        title: The problem, as a sentence.
        evidence: The records that show it, with numbers.
        edits: What to change in the program, all of it.
        note: What else to know about the change, or an alternative.
        location: The path of the layer or variable, the part of the batch, `"the loss function"` or the argument that
            it is about; empty if it is about all of the model.

    Example:
    >>> from kmp.advice.edits import SetArguments
    >>> change = SetArguments("kmp.enable", {"policy": "'mixed_bfloat16'"})
    >>> print(Finding("range", "warning", "The gradients span too much.", "what was counted", [change]))
    The gradients span too much.
      Evidence: what was counted
      Change: kmp.enable(policy='mixed_bfloat16')
    """

    cause: str
    severity: str
    title: str
    evidence: str
    edits: tuple[Edit, ...] = ()
    note: str = ""
    location: str = ""

    def __post_init__(self) -> None:
        for name in ("cause", "severity", "title", "evidence", "note", "location"):
            object.__setattr__(self, name, printable(getattr(self, name)))
        object.__setattr__(self, "edits", tuple(self.edits))

    @property
    def change(self) -> str:
        """The lines of code to change; empty if there are none."""
        return "\n".join(map(str, self.edits))

    def __str__(self) -> str:
        parts = {"Evidence": self.evidence, "Change": self.change.replace("\n", "\n          "), "Note": self.note}
        return "\n".join([self.title, *(f"  {name}: {text}" for name, text in parts.items() if text)])


class Advice(tuple[Finding, ...]):
    """A tuple of findings, most important first. Empty for a healthy run.

    Attributes:
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

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings that are errors or warnings."""
        return tuple(finding for finding in self if finding.severity != INFO)

    def __str__(self) -> str:
        return "\n".join([self.verdict, *(f"{number}. {finding}" for number, finding in enumerate(self, 1))])
