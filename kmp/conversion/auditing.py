"""What mixed precision would mean for a model, layer by layer and operation by operation."""

from dataclasses import dataclass, field
from typing import Any

import keras

from kmp.backend import computes_in_16_bits, is_passthrough, keras_internals
from kmp.conversion import audit_table
from kmp.conversion.activation_statistics import ActivationStatistics, by_old_path, measure_activations
from kmp.conversion.audit_row import Row
from kmp.conversion.model_parts import Part, check_built, is_quantized, parts_of
from kmp.conversion.plan_application import apply_plan, convert_to_float32
from kmp.conversion.precision_plan import Plan, configurable_parts, planned, unreachable_operations
from kmp.conversion.precision_rules import FOLLOWS_INPUTS, NEEDS_FLOAT32, OpRule, rule_for
from kmp.conversion.tensor_core_alignment import unaligned
from kmp.utils import FLOAT32


@dataclass(frozen=True)
class Audit:
    """What `kmp.audit` found: shows itself as a table in terminals and notebooks.

    Args:
        model: The model's name.
        rows: One for each layer and operation, in the order of the graph, holders before what they hold.
        plan: What `kmp.convert` would do with it in float32; may be edited, saved, and given to `kmp.convert`.
    """

    model: str
    rows: tuple[Row, ...]
    plan: Plan = field(repr=False)

    @property
    def endangered(self) -> tuple[Row, ...]:
        """Those that float16 endangers."""
        return tuple(row for row in self.rows if row.category == NEEDS_FLOAT32)

    def to_dict(self) -> dict[str, Any]:
        """Returns the audit as JSON has it."""
        return {"model": self.model, "rows": [row.to_dict() for row in self.rows], "plan": self.plan.to_dict()}

    def __rich__(self) -> Any:
        return audit_table.render(self.model, self.rows)

    def __str__(self) -> str:
        return audit_table.as_text(self.model, self.rows)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return audit_table.as_html(self.model, self.rows)


def audit(model: keras.Model, batch: Any = None, policy: str = "mixed_float16") -> Audit:
    """Tells for each layer and operation of a model its dtypes, and what float16 endangers there, and why.

    Args:
        model: A `keras.Model` that is built: in float32, or in mixed precision already.
        batch: What the model is called with, such as an array of its input, to run it in float32 and in the candidate:
            what `kmp.convert(model, policy)` makes, or the model itself where it is not float32. Shows where values
            leave float16's range, and where they drift.
        policy: The policy of the candidate, as in `kmp.convert`. The reasons are float16's under each; bfloat16, which
            has float32's range, rounds to 8 bits.

    Returns:
        An `Audit`, which shows itself as a table; `to_dict()` has the data.

    Raises:
        TypeError: If `model` is no Keras model.
        ValueError: If it is not built, `policy` is another, or with a batch, if that does not fit, or the model is
            quantized or cannot be made anew.

    Example:
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(2, "softmax", name="p")])
    >>> audit(model).plan.float32
    {'p': 'exp, sum, quotient: float16 rounds small probabilities to 0'}
    """
    check_built(model)
    plan = planned(model, policy)
    if batch is not None and is_quantized(model):
        raise ValueError(f"{model.name!r} is quantized and has no float32 to compare with: leave out `batch`.")
    seen = _compared(model, plan, batch) if batch is not None else {}
    parts = parts_of(model)
    told = {part.path for part in (*configurable_parts(model), *unreachable_operations(parts))}
    stays = computes_in_16_bits(model) or is_quantized(model)
    rows = tuple(_row(part, plan, stays, part.path in told, seen.get(part.path)) for part in parts)
    return Audit(model.name, rows, plan)


def _compared(
    model: keras.Model, plan: Plan, batch: Any
) -> dict[str, tuple[ActivationStatistics, ActivationStatistics]]:
    """Returns by path what was seen in float32 and in the candidate."""
    narrow, wide = (
        (model, convert_to_float32(model)) if computes_in_16_bits(model) else (apply_plan(model, plan), model)
    )
    reference, candidate = (by_old_path(measure_activations(one, batch)[1], model, one) for one in (wide, narrow))
    return {path: (reference[path], candidate[path]) for path in reference if path in candidate}


def _row(
    part: Part, plan: Plan, stays: bool, is_told: bool, seen: tuple[ActivationStatistics, ActivationStatistics] | None
) -> Row:
    layer, output = part.operation, _output_dtype(part.operation)
    rule = rule_for(part) if is_told or isinstance(layer, keras.layers.InputLayer) else _made_by(part.holder)
    reason = plan.float32.get(part.path, rule.reason)
    has_dtypes = part.is_layer and not is_passthrough(layer)
    compute_dtype = layer.compute_dtype if has_dtypes else output or ""
    planned_dtype = compute_dtype if stays else _planned_dtype(part, plan)
    return Row(
        path=part.path,
        class_name=type(layer).__name__,
        compute_dtype=compute_dtype,
        variable_dtype=layer.variable_dtype if has_dtypes else None,
        output_dtype=output,
        category=rule.category,
        reason=reason,
        source=rule.source if reason == rule.reason else "",
        planned_dtype=planned_dtype,
        tensor_cores=() if planned_dtype == FLOAT32.name else tuple(unaligned(layer)),
        **_measured(*seen) if seen else {},
    )


def _made_by(holder: keras.Layer) -> OpRule:
    return OpRule(FOLLOWS_INPUTS, f"has the dtype of {holder.name}, which made it")


def _measured(reference: ActivationStatistics, candidate: ActivationStatistics) -> dict[str, Any]:
    return {
        "amax": reference.amax,
        "beyond": reference.beyond,
        "below": reference.below,
        "drift": candidate.drift(reference) if candidate.is_finite and reference.is_finite else None,
        "overflows": reference.is_finite and not candidate.is_finite,
    }


def _planned_dtype(part: Part, plan: Plan) -> str:
    if plan.policy_of(part.path) == FLOAT32.name:
        return FLOAT32.name
    if isinstance(part.operation, keras.layers.InputLayer):
        return part.operation.dtype
    if not part.is_layer or is_passthrough(part.operation):
        return FOLLOWS_INPUTS
    is_float = keras.backend.is_float_dtype(part.operation.compute_dtype)
    return plan.compute_dtype if is_float else part.operation.compute_dtype


def _output_dtype(operation: keras.Operation) -> str | None:
    try:
        outputs = keras.tree.flatten(operation.output)
    except (AttributeError, ValueError, RuntimeError):  # never called in a graph, or in several places
        outputs = [tensor for node in keras_internals.calls_of(operation) for tensor in node.output_tensors]
    dtypes = sorted({keras.backend.standardize_dtype(tensor.dtype) for tensor in outputs})
    return ", ".join(dtypes) or None
