"""The audit result for one layer or operation."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """The audit result for one layer, or for one operation of a functional graph.

    Args:
        path: Its name, prefixed with the names of its parents, joined by `/`.
        class_name: The name of its class.
        compute_dtype: Its current compute dtype; the output dtype of an operation.
        variable_dtype: The current dtype of its weights; `None` for an operation.
        output_dtype: Its current output dtype; `None` if Keras does not know it.
        category: `"float16"`, `"follows its inputs"` or `"float32"`.
        reason: Why it is in this category, or why it would stay float32.
        source: The source of the rule.
        planned_dtype: Its compute dtype after `kmp.convert`; the current one if the model already computes in 16 bits
            or is quantized, or if `kmp.convert` raises an error for it.
        tensor_cores: Dimensions not divisible by 8, each with the padded size; empty if it stays float32.
        amax: With a batch: the largest magnitude of its finite outputs in float32.
        overflow_share: With a batch: the share of its float32 outputs that exceed 65504 or are NaN or Inf.
        underflow_share: With a batch: the share of its nonzero float32 outputs that float16 flushes to zero.
        relative_error: With a batch: the L2 norm of the difference between its outputs in the candidate and in float32,
            divided by the norm of the float32 outputs; `None` if either has NaN or Inf.
        overflows: With a batch: whether the candidate's outputs have NaN or Inf while the float32 outputs are finite.
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
    overflow_share: float | None = None
    underflow_share: float | None = None
    relative_error: float | None = None
    overflows: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Returns the row as a dict for JSON, without the fields that are `None`."""
        return {key: value for key, value in asdict(self).items() if value is not None}
