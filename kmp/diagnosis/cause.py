"""What a diagnosis finds: a cause, with its numbers, its location and the edits that cure it."""

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from kmp.utils.float_formats import BFLOAT16, FLOAT16, FLOAT32, FORMATS, FloatFormat
from kmp.utils.names import printable

ERROR, WARNING, INFO = SEVERITIES = ("error", "warning", "info")

# What causes are about, as `Cause.formats`.
LOSS_SCALES = (FLOAT16,)  # and the gradients that these keep in float16's range
SIXTEEN_BITS = (FLOAT16, BFLOAT16)
FLOAT32_RANGE = (BFLOAT16, FLOAT32)  # in which nothing but NaN, Inf and huge values overflows


@dataclass(frozen=True)
class SetArguments:
    """Arguments to pass to a call.

    Args:
        call: The function, method or class that is called, such as `"kmp.enable"` or
            `"model.compile"`.
        arguments: The Python source of each value, by the name of the argument.
        name: The name of the layer or weight that the call creates, if it creates one.

    Example:
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
    """A layer to wrap in `kmp.layers.Float32`.

    Args:
        layer: The name of the layer.
        class_name: Its class, or `""` if it is unknown.

    Example:
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
    """Statements about the arrays `x` and `y` of `fit` or the model before it, or of a step.

    Args:
        statement: The Python source, in one line or several.

    Example:
    >>> print(PrepareData("y = y - 1"))
    y = y - 1
    """

    statement: str

    def __str__(self) -> str:
        return "\n".join(map(printable, self.statement.splitlines()))


Edit = SetArguments | ComputeInFloat32 | PrepareData
Edits = tuple[Edit, ...]


class Stage(enum.IntEnum):
    """Where a cause acts. Each may be the reason for what a later stage shows."""

    BATCH = enum.auto()
    WEIGHTS = enum.auto()  # which earlier updates have ruined
    FORWARD = enum.auto()
    LOSS_SCALING = enum.auto()
    OUTPUTS = enum.auto()
    STATES = enum.auto()
    SCALE_RULE = enum.auto()
    BACKWARD = enum.auto()
    MAGNITUDES = enum.auto()  # of gradients and updates, which a loss scale should fit
    GRADIENTS = enum.auto()
    LAST = enum.auto()  # nothing follows from it


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One cause of a problem. Subclasses add the numbers; `kmp.advice` has the sentences.

    Args:
        name: Short name, see `kmp.advice.Finding`.
        severity: `"error"`, `"warning"` or `"info"`.
        location: The path of the layer or variable, the part of the batch, `"the loss function"`
            or the argument that it is about; empty if it is about all of the model.
        edits: What to change in the program, all of it.

    Attributes:
        formats: The number formats that a run with such a cause computes in.
        stage: Where causes of this class act.
        cured_by_float32: Whether layers in float32 cure them.
    """

    formats: ClassVar[Collection[FloatFormat]] = FORMATS
    stage: ClassVar[Stage] = Stage.LAST
    cured_by_float32: ClassVar[bool] = False

    name: str
    severity: str = ERROR
    location: str = ""
    edits: Edits = ()

    @property
    def is_measured(self) -> bool:
        """Whether the graph of the step shows it, and the records what it does."""
        return False
