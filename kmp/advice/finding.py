"""The result of a diagnosis: findings with their evidence and the edits that cure them, and a verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kmp.utils import printable

ERROR, WARNING, INFO = SEVERITIES = ("error", "warning", "info")


@dataclass(frozen=True)
class SetArguments:
    """Arguments to pass to a call.

    Args:
        call: The function, method or class that is called, such as `"kmp.enable"` or
            `"model.compile"`.
        arguments: The Python source of each value, by the name of the argument.
        name: The name of the layer or weight that the call creates, if it creates one.
    """

    call: str
    arguments: Mapping[str, str]
    name: str = ""

    def __str__(self) -> str:
        arguments = dict(self.arguments) | ({"name": repr(self.name)} if self.name else {})
        return printable(
            f"{self.call}({', '.join(f'{name}={value}' for name, value in arguments.items())})"
        )


@dataclass(frozen=True)
class ComputeInFloat32:
    """A layer to wrap in `kmp.layers.Float32`.

    Args:
        layer: The name of the layer.
        class_name: Its class, or `""` if it is unknown.
    """

    layer: str
    class_name: str = ""

    def __str__(self) -> str:
        return printable(
            f"kmp.layers.Float32({self.class_name or 'Layer'}(..., name={self.layer!r}))"
        )


@dataclass(frozen=True)
class PrepareData:
    """Statements before the call of `fit`, about its arrays `x` and `y`.

    Args:
        statement: The Python source, in one line or several.
    """

    statement: str

    def __str__(self) -> str:
        return "\n".join(map(printable, self.statement.splitlines()))


Edit = SetArguments | ComputeInFloat32 | PrepareData


@dataclass(frozen=True)
class Finding:
    """One problem of a run. Names in its texts are as in the log; `str` escapes control characters and the like.

    Args:
        cause: Short name of the cause. Of skipped steps: `"data"`, `"targets"`,
            `"optimizer_state"`, `"exploding"`, `"constant"`, `"forward_overflow"`,
            `"forward_underflow"`, `"rounding"`, `"loss_overflow"`, `"loss"`, `"backward_overflow"`
            or `"scale_too_large"`. Of NaN or Inf that compiling hides: `"uncompiled"`. Of what
            float16 loses: `"precision_loss"`, `"unscaled_loss"`, `"lost_updates"`,
            `"branch_underflow"`, `"scale_too_small"` or `"range"`. Of settings:
            `"growth_interval_too_small"`, `"hysteresis_too_large"` or `"initial_scale"`. Or
            `"float32_fallback"`, `"dead"` or `"unused"`.
        severity: `"error"` if the run is broken, `"warning"` if it loses accuracy or time, or
            `"info"`.
        title: The problem, as a sentence.
        evidence: The records that show it, with numbers.
        edits: What to change in the program, all of it.
        note: What else to know about the change, or an alternative.
        location: The path of the layer or variable, the part of the batch, `"the loss function"` or
            the argument that it is about; empty if it is about all of the model.

    Example:
    >>> change = ComputeInFloat32("norm", "RMSNormalization")
    >>> print(Finding("precision_loss", "error", "The outputs differ.", "what was measured", [change]))
    The outputs differ.
      Evidence: what was measured
      Change: kmp.layers.Float32(RMSNormalization(..., name='norm'))
    """

    cause: str
    severity: str
    title: str
    evidence: str
    edits: Sequence[Edit] = ()
    note: str = ""
    location: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "edits", tuple(self.edits))

    @property
    def change(self) -> str:
        """The lines of code to change; empty if there are none."""
        return "\n".join(map(str, self.edits))

    def __str__(self) -> str:
        change = self.change.replace("\n", "\n          ")
        parts = {
            "Evidence": printable(self.evidence),
            "Change": change,
            "Note": printable(self.note),
        }
        return "\n".join(
            [printable(self.title), *(f"  {name}: {text}" for name, text in parts.items() if text)]
        )


@dataclass(frozen=True)
class Advice(Sequence[Finding]):
    """A sequence of findings, most important first. Empty for a healthy run.

    Args:
        findings: The findings.
        verdict: The effect of float16 on this run, in a sentence.

    Example:
    >>> print(Advice([], "float16 does not hurt this run."))
    float16 does not hurt this run.
    """

    findings: Sequence[Finding]
    verdict: str

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
        return "\n".join(
            [
                printable(self.verdict),
                *(f"{number}. {finding}" for number, finding in enumerate(self, 1)),
            ]
        )
