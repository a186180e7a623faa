"""The changes of a program that findings advise, as data: the printed lines are made from them."""

from collections.abc import Mapping
from dataclasses import dataclass

from kmp.utils import printable


@dataclass(frozen=True)
class SetArguments:
    """Arguments to pass to a call.

    Args:
        call: The function, method or class that is called, such as `"kmp.enable"` or `"model.compile"`.
        arguments: The Python source of each value, by the name of the argument.
        name: The name of the layer or weight that the call creates, if it creates one.
    """

    call: str
    arguments: Mapping[str, str]
    name: str = ""

    def __str__(self) -> str:
        values = [f"{name}={value}" for name, value in self.arguments.items()]
        name = [f"name={self.name!r}"] if self.name else []
        return printable(f"{self.call}({', '.join([*values, *name])})")


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
        return printable(f"kmp.layers.Float32({self.class_name or 'Layer'}(..., name={self.layer!r}))")


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
