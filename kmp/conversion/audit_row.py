"""What an audit found of one layer or operation."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One layer, or one operation of a functional graph.

    Args:
        path: Its name, behind the names of what holds it, joined by `/`.
        class_name: The name of its class.
        compute_dtype: What it computes in now; of an operation, what it puts out.
        variable_dtype: What its weights are in now; `None` for an operation.
        output_dtype: What it puts out now, `None` where Keras does not know.
        category: The field's kind: `"float16"`, `"follows its inputs"` or `"float32"`.
        reason: Why, or why it would stay float32.
        source: Where the rule comes from.
        planned_dtype: What it would compute in after `kmp.convert`; of a model that computes in 16 bits already, or is
            quantized, what it computes in.
        tensor_cores: Dimensions that 8 does not divide, each with the padded number; none where it stays float32.
        amax: With a batch: the largest magnitude that it puts out in float32.
        beyond: With a batch: the share of its outputs beyond 65504 in float32, inf and nan included.
        below: With a batch: the share of its outputs that are not zero in float32, and zero in float16.
        drift: With a batch: the norm of the difference between its outputs in the candidate and in float32, over the
            norm of those in float32; `None` where one of them is not finite.
        overflows: With a batch: whether the candidate's outputs have inf or nan, and those in float32 have not.
    """

    path: str
    class_name: str
    compute_dtype: str
    variable_dtype: str | None
    output_dtype: str | None
    category: str
    reason: str
    source: str
    planned_dtype: str
    tensor_cores: tuple[str, ...] = ()
    amax: float | None = None
    beyond: float | None = None
    below: float | None = None
    drift: float | None = None
    overflows: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Returns the row as JSON has it: without what is not known."""
        return {key: value for key, value in asdict(self).items() if value is not None}
