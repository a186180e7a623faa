"""The result of a diagnosis in words: findings with their evidence and edits, and a verdict."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kmp.diagnosis import INFO, Edit
from kmp.utils.names import printable


@dataclass(frozen=True)
class Finding:
    """One problem of a run, with its evidence and what to change.

    The texts have names as in the log; `str` escapes control characters.

    Args:
        cause: Short name of the cause, such as `"forward_overflow"`;
            [What kmp advises, tested](../advice.md) lists them.
        severity: `"error"` if the run is broken, `"warning"` if it loses accuracy or time, or
            `"info"`.
        title: The problem, as a sentence.
        evidence: The records that show it, with numbers.
        edits: What to change in the program, all of it.
        tried: What a replay with this change showed. Without such a replay: `"not in a replay"`,
            with the reason if there is one. Empty if there is no change.
        note: What else to know about the change, or an alternative.
        location: The path of the layer or variable, the part of the batch, `"the loss function"`
            or the argument that it is about; empty if it is about all of the model.
        code: The file and the line of the program that it is about; empty if it is not known.

    Example:
    >>> from kmp.advice import ComputeInFloat32, Finding
    >>> change = ComputeInFloat32("norm", "RMSNormalization")
    >>> print(Finding("precision_loss", "error", "The outputs differ.", "measured", [change]))
    The outputs differ.
      Evidence: measured
      Change: kmp.layers.Float32(RMSNormalization(..., name='norm'))
    """

    cause: str
    severity: str
    title: str
    evidence: str
    edits: Sequence[Edit] = ()
    note: str = ""
    location: str = ""
    tried: str = ""
    code: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "edits", tuple(self.edits))

    @property
    def change(self) -> str:
        """The lines of code to change; empty if there are none."""
        return "\n".join(map(str, self.edits))

    def __str__(self) -> str:
        texts = {
            "Evidence": printable(self.evidence),
            "Change": self.change.replace("\n", "\n          "),
            "Tried": printable(self.tried),
            "Note": printable(self.note),
        }
        lines = [f"  {name}: {text}" for name, text in texts.items() if text]
        return "\n".join([printable(self.title), *lines])


@dataclass(frozen=True)
class Advice(Sequence[Finding]):
    """A sequence of findings, the most important first; empty for a healthy run.

    Args:
        findings: The findings.
        verdict: The effect of the number format on this run, in a few sentences.
        is_known: Whether the records suffice to know that effect.

    Example:
    >>> from kmp.advice import Advice
    >>> print(Advice([], "float16 does not hurt this run."))
    float16 does not hurt this run.
    """

    findings: Sequence[Finding]
    verdict: str
    is_known: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "findings", tuple(self.findings))

    def __len__(self) -> int:
        return len(self.findings)

    def __getitem__(self, index: Any) -> Any:
        return self.findings[index]

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings that are errors or warnings."""
        return tuple(finding for finding in self if finding.severity != INFO)

    def __str__(self) -> str:
        numbered = [f"{number}. {finding}" for number, finding in enumerate(self, 1)]
        return "\n".join([printable(self.verdict), *numbered])
