"""What the graph of a training step says of its losses and gradients. Needs no Keras.

Nothing here judges: `kmp.diagnosis` does, from these values.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from kmp.records.log_types import Count, Names, Text

# What the step does with the loss scale before `apply`.
Scaling = Literal["right", "unscaled", "nonlinear", "added", "divided", "multiplied", "unknown"]


@dataclass(frozen=True)
class CodeLine:
    """An operation of the step, and the line of the program that made it.

    Args:
        operation: TensorFlow's type of the operation, such as `"Pow"`.
        dtype: The dtype of its result.
        file: The path of the file; empty if no line is the program's.
        line: The number of the line.

    Example:
    >>> from kmp.records.step_facts import CodeLine
    >>> print(CodeLine("Pow", "float16", "train.py", 12))
    Pow in train.py, line 12
    """

    operation: Text
    dtype: Text = ""
    file: Text = ""
    line: Count = 0

    def __str__(self) -> str:
        return f"{self.operation} in {self.file}, line {self.line}" if self.file else self.operation


@dataclass(frozen=True)
class StepFacts:
    """How the gradients of a step depend on the loss scale, and what of its loss is in 16 bits.

    The facts are those of the last trace of the step.

    Args:
        scaling: What the step does. `"right"`: each gradient is multiplied by the loss scale as
            often as `apply` divides by it. `"unscaled"`: it has terms of a loss that is not
            multiplied by it. `"nonlinear"`: an operation that is not linear, as in a clip, gets
            scaled gradients. `"added"`: the step adds to scaled gradients what is not scaled.
            `"divided"`: it divides by the loss scale, and `apply` divides too. `"multiplied"`: it
            multiplies more often than `apply` divides. `"unknown"`: of some gradients it is not
            known, and no gradient is known to be wrong.
        operation: The operation that does so: of an unscaled loss, the one that adds it, or that
            multiplies the other loss by the scale.
        variables: The paths of the variables whose gradients are not scaled as `apply` expects.
        are_all: Whether no gradient is scaled as `apply` expects.
        operations_in_16_bits: What rounds in 16 bits between the outputs of layers and the loss, in
            the order of the step. `None` if that is not known.
    """

    scaling: Scaling
    operation: CodeLine | None = None
    variables: Names = field(default_factory=list)
    are_all: bool = False
    operations_in_16_bits: Annotated[list[CodeLine], Meta(max_length=100)] | None = None
