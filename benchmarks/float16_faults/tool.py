"""What a tool has to be."""

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True)
class Finding:
    """What a tool reports of a program.

    Attributes:
        text: What is wrong. The place is right if its name occurs in the text.
        cause: A category of `float16_faults.truth.CAUSES`, if the tool has one.
        change: The source of the program with a cure, if the tool has one. It is run and scored.
    """

    text: str
    cause: str | None = None
    change: str | None = None


class Tool:
    """Watches one training. Subclasses override what they need.

    The training runs inside `with tool:`. An exception that `__exit__` lets pass is added to the
    findings; its text is the message.

    Args:
        source: The source of the program, as it is run.
        folder: An empty folder, which is also the working directory of the training.
        repair: Whether the tool may change the training. Only of interest to one that repairs.

    Attributes:
        uses_kmp: Whether programs are run as they are written, with `kmp.enable`, and not in
            Keras' own `mixed_float16`.
        repairs: Whether the tool can repair a training while it runs. If so, a program with a fault
            is run twice: for the findings without a repair, and once more with it.
    """

    uses_kmp = False
    repairs = False

    def __init__(self, source: str, folder: Path, repair: bool = False) -> None:
        self.source, self.folder, self.repair = source, folder, repair

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        """Ends what `__enter__` began. `True` if an exception is no finding."""
        return None

    def callbacks(self) -> list[Any]:
        """Returns callbacks for `fit`. Called once, inside the `with` statement."""
        return []

    def findings(self) -> list[Finding]:
        """Returns what the tool found, after the training. The first one is scored."""
        return []

    def verdict(self) -> str:
        """Returns a sentence on the run as a whole, which is printed and not scored."""
        return ""
