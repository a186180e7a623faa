"""The edits of a program that cure a cause, and whether they were tried."""

from collections.abc import Mapping
from dataclasses import dataclass

from kmp.utils.names import printable


@dataclass(frozen=True)
class SetArguments:
    """A change of the program: arguments to pass to a call.

    Args:
        call: The function, method or class that is called, such as `"kmp.enable"` or
            `"model.compile"`.
        arguments: The Python source of each value, by the name of the argument.
        name: The name of the layer or weight that the call creates, if it creates one.

    Example:
    >>> from kmp.advice import SetArguments
    >>> print(SetArguments("kmp.enable", {"hysteresis": "1"}))
    kmp.enable(hysteresis=1)
    """

    call: str
    arguments: Mapping[str, str]
    name: str = ""

    def __str__(self) -> str:
        arguments = dict(self.arguments)
        if self.name:
            arguments["name"] = repr(self.name)
        listed = ", ".join(f"{name}={value}" for name, value in arguments.items())
        return printable(f"{self.call}({listed})")


@dataclass(frozen=True)
class ComputeInFloat32:
    """A change of the program: a layer to wrap in `kmp.layers.Float32`.

    Args:
        layer: The name of the layer.
        class_name: Its class, or `""` if it is unknown.

    Example:
    >>> from kmp.advice import ComputeInFloat32
    >>> print(ComputeInFloat32("norm", "RMSNormalization"))
    kmp.layers.Float32(RMSNormalization(..., name='norm'))
    """

    layer: str
    class_name: str = ""

    def __str__(self) -> str:
        class_name = self.class_name or "Layer"
        return printable(f"kmp.layers.Float32({class_name}(..., name={self.layer!r}))")


@dataclass(frozen=True)
class PrepareData:
    """A change of the program: statements about the data or the model, before `fit` or in a step.

    They use the arrays `x` and `y` of `fit`.

    Args:
        statement: The Python source, in one line or several.

    Example:
    >>> from kmp.advice import PrepareData
    >>> print(PrepareData("y = y - 1"))
    y = y - 1
    """

    statement: str

    def __str__(self) -> str:
        return "\n".join(map(printable, self.statement.splitlines()))


Edit = SetArguments | ComputeInFloat32 | PrepareData
Edits = tuple[Edit, ...]


NOT_TRIED = "not in a replay"


@dataclass(frozen=True)
class Change:
    """What to change in a program, and whether a batch was replayed with it.

    Args:
        edits: The edits, all of them.
        tried: What a replay with them showed; `NOT_TRIED` without such a replay, with a reason if
            there is one.
    """

    edits: Edits = ()
    tried: str = NOT_TRIED


NO_CHANGE = Change()
