"""Audits a model for mixed precision, layer by layer and operation by operation."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import keras

from kmp.backend import is_keras_class, is_passthrough, keras_internals
from kmp.conversion import audit_table
from kmp.conversion.activation_statistics import ActivationStatistics, by_original_path, measure_activations
from kmp.conversion.audit_row import Row
from kmp.conversion.model_parts import Part, check_built, check_not_float64, computes_in_16_bits, is_quantized, parts_of
from kmp.conversion.plan_application import apply_plan, convert_to_float32
from kmp.conversion.precision_plan import (
    Plan,
    configurable_parts,
    make_plan,
    output_operations,
    unreachable_operations,
)
from kmp.conversion.precision_rules import FOLLOWS_INPUTS, NEEDS_FLOAT32, OpRule, rule_for
from kmp.conversion.tensor_core_alignment import unaligned
from kmp.utils import DTYPES_16_BIT, FLOAT32


@dataclass(frozen=True)
class Audit:
    """The result of `kmp.audit`. Displays as a table in terminals and notebooks.

    Args:
        model: The model's name.
        rows: One row for each layer and operation, in graph order, parents before children.
        plan: The plan that `kmp.convert` would use for the float32 model. It can be edited, saved, and passed to
            `kmp.convert`.
        conversion_error: The message of the `ValueError` that `kmp.convert` raises for this model; empty if it does
            not.
        notes: One sentence for each output of the model that is in 16 bits.
    """

    model: str
    rows: tuple[Row, ...]
    plan: Plan = field(repr=False)
    conversion_error: str = ""
    notes: tuple[str, ...] = ()

    @property
    def needs_float32(self) -> tuple[Row, ...]:
        """The rows of layers and operations that float16 makes inaccurate or lets overflow."""
        return tuple(row for row in self.rows if row.category == NEEDS_FLOAT32)

    def to_dict(self) -> dict[str, Any]:
        """Returns the audit as a dict for JSON."""
        return {
            "model": self.model,
            "rows": [row.to_dict() for row in self.rows],
            "plan": self.plan.to_dict(),
            "conversion_error": self.conversion_error,
            "notes": list(self.notes),
        }

    @property
    def summary(self) -> str:
        """How many layers and operations need float32, and the first of them with the reasons."""
        return audit_table.as_text(audit_table.render_summary(self.model, self.rows, self.conversion_error, self.notes))

    def __rich__(self) -> Any:
        return audit_table.render(self.model, self.rows, self.conversion_error, self.notes)

    def __str__(self) -> str:
        return audit_table.as_text(self.__rich__())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return audit_table.as_html(self.__rich__())


def audit(model: keras.Model, batch: Any = None, policy: str = "mixed_float16") -> Audit:
    """Returns the dtypes of each layer and operation of a model, and whether it needs float32 and why.

    With a batch, runs the model in float32 and as a mixed-precision candidate, and reports overflow, underflow and the
    relative error of each layer's output. The candidate of a float32 model is
    `kmp.convert(model, policy)`; a model that already computes in 16 bits is its own candidate.

    A float32 model with custom classes is rebuilt, even without a batch, to find out whether `kmp.convert` can do so.
    This takes the time and memory of a conversion.

    Args:
        model: A built `keras.Model`, in float32 or mixed precision.
        batch: An input of the model, such as an array, without targets.
        policy: The policy of the candidate, as in `kmp.convert`. The reasons are always those for float16; bfloat16 has
            float32's range but only 8 significant bits.

    Returns:
        An `Audit`, which displays as a table. `to_dict()` returns the data.

    Raises:
        TypeError: If `model` is not a Keras model, or `policy` is not a string.
        ValueError: If `model` is not built, or `policy` is another string. With a batch: if it does not fit the model,
            the model is quantized, or `kmp.convert` raises an error for it.

    Example:
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(2, "softmax", name="p")])
    >>> audit(model).plan.float32
    {'p': 'exp, sum and division: float16 flushes small probabilities to zero'}
    """
    check_built(model)
    plan = make_plan(model, policy)
    if batch is not None and is_quantized(model):
        raise ValueError(f"{model.name!r} is quantized and has no float32 version to compare with: omit `batch`.")
    with keras_internals.layer_names_restored():
        reference, candidate, conversion_error = _variants(model, plan, batch)
    keeps_dtypes = computes_in_16_bits(model) or is_quantized(model) or bool(conversion_error)
    statistics = _compare(model, reference, candidate, batch) if batch is not None else {}
    parts = parts_of(model)
    has_own_rule = {part.path for part in (*configurable_parts(model), *unreachable_operations(parts))}
    rows = [_row(part, plan, keeps_dtypes, part.path in has_own_rule, statistics.get(part.path)) for part in parts]
    return Audit(model.name, tuple(rows), plan, conversion_error, tuple(_notes_on_outputs(model)))


def _variants(model: keras.Model, plan: Plan, batch: Any) -> tuple[keras.Model, keras.Model, str]:
    """Returns the float32 reference, the candidate, and the message of the error that `kmp.convert` raises, if any.

    The model itself stands for a variant that is not needed. A model with custom classes is rebuilt even without a
    batch: nothing else shows whether their configs suffice.
    """
    if is_quantized(model):
        return model, model, ""
    try:
        check_not_float64(model)
        if computes_in_16_bits(model):
            return (model if batch is None else convert_to_float32(model)), model, ""
        classes = {type(model), *(type(part.operation) for part in parts_of(model))}
        has_custom_classes = not all(map(_is_known_class, classes))
        if batch is not None or has_custom_classes:
            return model, apply_plan(model, plan), ""
    except ValueError as error:
        if batch is not None:
            raise
        return model, model, str(error)
    return model, model, ""


def _is_known_class(cls: type) -> bool:
    return is_keras_class(cls) or cls.__module__.startswith("kmp.")


def _notes_on_outputs(model: keras.Model) -> Iterator[str]:
    for operation in dict.fromkeys(output_operations(model)):
        dtype, is_layer = _output_dtype(operation), isinstance(operation, keras.Layer)
        if dtype in DTYPES_16_BIT and not (is_layer and operation.compute_dtype != dtype):
            remedy = "create the layer with dtype='float32'" if is_layer else "use keras.ops.cast(x, 'float32')"
            yield f"The output of {operation.name!r} is {dtype}, as is what `predict` returns. For float32, {remedy}."


def _compare(
    model: keras.Model, reference: keras.Model, candidate: keras.Model, batch: Any
) -> dict[str, tuple[ActivationStatistics, ActivationStatistics]]:
    """Returns a dict that maps paths to the statistics in float32 and in the candidate."""
    in_float32, in_candidate = (
        by_original_path(measure_activations(variant, batch)[1], model, variant) for variant in (reference, candidate)
    )
    return {path: (in_float32[path], in_candidate[path]) for path in in_float32 if path in in_candidate}


def _row(
    part: Part,
    plan: Plan,
    keeps_dtypes: bool,
    has_own_rule: bool,
    statistics: tuple[ActivationStatistics, ActivationStatistics] | None,
) -> Row:
    layer, output_dtype = part.operation, _output_dtype(part.operation)
    is_input = isinstance(layer, keras.layers.InputLayer)
    rule = rule_for(part, plan.compute_dtype) if has_own_rule or is_input else _inherited_rule(part.parent)
    reason = plan.float32.get(part.path, rule.reason)
    has_dtypes = part.is_layer and not is_passthrough(layer)
    compute_dtype = layer.compute_dtype if has_dtypes else output_dtype or ""
    planned_dtype = compute_dtype if keeps_dtypes else _planned_dtype(part, plan)
    return Row(
        path=part.path,
        class_name=type(layer).__name__,
        compute_dtype=compute_dtype,
        variable_dtype=layer.variable_dtype if has_dtypes else None,
        output_dtype=output_dtype,
        category=rule.category,
        reason=reason,
        source=rule.source if reason == rule.reason else "",
        planned_dtype=planned_dtype,
        tensor_cores=() if planned_dtype == FLOAT32.name else tuple(unaligned(layer)),
        **_measured_fields(*statistics) if statistics else {},
    )


def _inherited_rule(parent: keras.Layer) -> OpRule:
    return OpRule(FOLLOWS_INPUTS, f"uses the dtype of {parent.name}, which creates it")


def _measured_fields(reference: ActivationStatistics, candidate: ActivationStatistics) -> dict[str, Any]:
    are_finite = candidate.is_finite and reference.is_finite
    return {
        "amax": reference.amax,
        "overflow_share": reference.overflow_share,
        "underflow_share": reference.underflow_share,
        "relative_error": candidate.relative_error(reference) if are_finite else None,
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
    except (AttributeError, ValueError, RuntimeError):  # never called in a graph, or called several times
        outputs = [tensor for node in keras_internals.calls_of(operation) for tensor in node.output_tensors]
    dtypes = sorted({keras.backend.standardize_dtype(tensor.dtype) for tensor in outputs})
    return ", ".join(dtypes) or None
