"""A cause of a problem: its numbers, its location, the change that cures it, and its sentences."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from kmp.diagnosis.edits import NO_CHANGE, Change
from kmp.diagnosis.observations import Observations
from kmp.records.step_facts import CodeLine

ERROR, WARNING, INFO = SEVERITIES = ("error", "warning", "info")


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One cause of a problem of a run.

    A subclass has a class method `of`, which returns the cause if the run has it; adds the numbers
    as fields; and says in `title`, `evidence` and `note` what they mean. One module in
    `kmp.diagnosis.causes` has all of it.

    Args:
        run: What was observed.
        name: Short name, such as `"data"`; see `kmp.diagnosis.names_of_causes`.
        severity: `"error"`, `"warning"` or `"info"`.
        location: The path of the layer or variable, the part of the batch, `"the loss function"`
            or the argument that it is about; empty if it is about all of the model.
        change: What to change in the program.

    Attributes:
        names: What each name means that no other class of causes describes, in a few words.
    """

    names: ClassVar[Mapping[str, str]] = {}

    run: Observations = field(repr=False, compare=False)
    name: str
    severity: str = ERROR
    location: str = ""
    change: Change = NO_CHANGE

    @property
    def title(self) -> str:
        """The problem, as a sentence."""
        raise NotImplementedError

    @property
    def evidence(self) -> str:
        """The records that show it, with numbers."""
        raise NotImplementedError

    @property
    def note(self) -> str:
        """What else to know about the change, or an alternative; may be empty."""
        return ""

    @property
    def code(self) -> CodeLine | None:
        """The operation of the program that it is about, with its line, if it is known."""
        return None

    @property
    def is_measured(self) -> bool:
        """Whether the graph of the step shows it, and the records what it does."""
        return False

    @property
    def is_cured_by_float32(self) -> bool:
        """Whether layers in float32 cure it."""
        return False
