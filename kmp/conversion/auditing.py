"""Audits a model for mixed precision, layer by layer and operation by operation."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import keras

from kmp.backend.jit_support import jit_compilation
from kmp.backend.keras_internals import compute_dtypes, is_library_class, is_passthrough
from kmp.backend.layer_graph import calls_in, output_operations
from kmp.backend.promotion import Place, promotions_recorded
from kmp.conversion.audit_table import Audit, AuditRow
from kmp.conversion.cloning import clone_model
from kmp.conversion.measurement import (
    Measurement,
    Statistics,
    inference_passes,
    measured_with,
    statistics_of,
)
from kmp.conversion.model_parts import (
    Part,
    check_built,
    check_not_float64,
    is_quantized,
    parts_of,
)
from kmp.conversion.plan import Plan, make_plan
from kmp.conversion.precision import FOLLOWS_INPUTS, precision_of
from kmp.conversion.step_traffic import step_traffic
from kmp.conversion.tensor_cores import unaligned_dimensions
from kmp.diagnosis.format_errors import FormatErrors
from kmp.replay import OTHER_FORMATS, PassResult, other_format_of
from kmp.utils.float_formats import (
    BFLOAT16,
    DTYPES_16_BIT,
    FLOAT32,
    FORMATS_16_BIT,
    FloatFormat,
    computing_format,
)


def audit(model: keras.Model, batch: Any = None, policy: str | None = None) -> Audit:
    """Returns the dtypes of each layer and operation, and whether it needs float32 and why.

    The reasons come from the range and the rounding error of what is computed, for any data. The
    code of custom layers, `Lambda` layers, functions and subclassed models is traced for this, and
    not run; a reason in it names the file and line. The rows of what cannot be traced say so.

    The result also says whether Keras compiles the model with XLA, and if not, why. For a model
    that already computes in 16 bits, it has the share of the bytes of a training step that is
    float32, and the classes of layers that move them. For this, its forward and backward pass are
    traced once, and not run.

    With a batch, runs the model in float32 and as a mixed-precision candidate, and reports
    overflow, underflow and the relative error of each layer's output. The measured ranges decide
    which operations need float32, as in `kmp.convert`. The candidate of a float32 model is the one
    of `plan`: `kmp.convert` adds to it what overflows in it. A model that already computes in 16
    bits is its own candidate, and runs once more with all its layers in float32. The same is done
    in the other 16-bit format, so that float16 and bfloat16 can be compared before training: of a
    float32 model with the policy of that format, else with the same layers in float32.

    A float32 model with custom classes is rebuilt, even without a batch, to find out whether
    `kmp.convert` can do so. This takes the time and memory of a conversion, and Keras numbers the
    unnamed layers of later models after those of the copy.

    Args:
        model: A built `keras.Model`, in float32 or mixed precision.
        batch: An input of the model, such as an array, without targets.
        policy: The policy of the candidate, as in `kmp.convert`. The categories and the reasons
            are those for it. Defaults to that of a model that computes in bfloat16, and to
            `"mixed_float16"` for others.

    Returns:
        An `Audit`, which displays as a table. `to_dict()` returns the data.

    Raises:
        TypeError: If `model` is not a Keras model, or `policy` is not a string or `None`.
        ValueError: If `model` is not built, or `policy` is another string. With a batch: if it does
            not fit the model, the model is quantized, or `kmp.convert` raises an error for it.

    Example:
    >>> import keras, kmp
    >>> hidden, last = keras.layers.Dense(8), keras.layers.Dense(2, "softmax", name="p")
    >>> model = keras.Sequential([keras.Input((8,)), hidden, last])
    >>> kmp.audit(model).plan.float32
    {'p': 'exp, sum and division: float16 flushes small probabilities to zero'}
    """
    check_built(model)
    if policy is None:
        is_bfloat16 = computing_format(compute_dtypes(model)) is BFLOAT16
        policy = "mixed_bfloat16" if is_bfloat16 else "mixed_float16"
    policy = Plan(policy).policy
    quantized = is_quantized(model)
    if quantized and batch is not None:
        raise ValueError(
            f"{model.name!r} is quantized and has no float32 version to compare with: omit `batch`."
        )
    measurement = None
    if batch is not None:
        check_not_float64(model)
        measurement = measured_with(model, batch)
    precision = precision_of(model, policy, measurement.ranges if measurement else {})
    parts = parts_of(model, precision)
    plan = make_plan(model, parts, policy)
    is_converted = quantized or not compute_dtypes(model).isdisjoint(DTYPES_16_BIT)
    error = "" if batch is not None else _conversion_error(model, parts, plan, is_converted)
    keeps_dtypes = is_converted or bool(error)
    rows = [_row(part, plan, keeps_dtypes) for part in parts]
    formats: tuple[FormatErrors, ...] = ()
    with promotions_recorded() as promoted:
        if measurement is not None:
            rows, formats = _with_statistics(rows, plan, measurement)
        traffic = step_traffic(model) if is_converted and not quantized else None
    return Audit(
        model=model.name,
        rows=tuple(rows),
        plan=plan,
        conversion_error=error,
        notes=(*_notes(model, promoted.values()), *precision.notes),
        traffic=traffic,
        jit_compile=jit_compilation(model),
        formats=formats,
    )


def _conversion_error(model: keras.Model, parts: list[Part], plan: Plan, is_converted: bool) -> str:
    """Returns the message of the error that `convert` raises for a model; empty if it does not."""
    if is_quantized(model):
        return ""
    classes = {type(model), *(type(part.operation) for part in parts)}
    has_custom_classes = not all(map(is_library_class, classes))
    try:
        check_not_float64(model)
        # Nothing but a rebuilt model shows whether the configs of custom classes suffice.
        if has_custom_classes and not is_converted:
            clone_model(model, parts, plan)
    except ValueError as error:
        return str(error)
    return ""


def _row(part: Part, plan: Plan, keeps_dtypes: bool) -> AuditRow:
    layer: Any = part.operation
    rule, reason = part.rule, plan.float32.get(part.path, part.rule.reason)
    has_dtypes = part.is_layer and not is_passthrough(layer)
    output_dtype = _output_dtype(layer)
    compute_dtype = layer.compute_dtype if has_dtypes else output_dtype or ""
    planned_dtype = compute_dtype if keeps_dtypes else _planned_dtype(part, plan, compute_dtype)
    return AuditRow(
        path=part.path,
        class_name=type(layer).__name__,
        compute_dtype=compute_dtype,
        variable_dtype=layer.variable_dtype if has_dtypes else None,
        output_dtype=output_dtype,
        category=rule.category_in(plan.compute_dtype),
        reason=reason,
        source=rule.source if reason == rule.reason else "",
        planned_dtype=planned_dtype,
        tensor_cores=() if planned_dtype == FLOAT32.name else tuple(unaligned_dimensions(layer)),
    )


def _planned_dtype(part: Part, plan: Plan, compute_dtype: str) -> str:
    """Returns the compute dtype of a part after the conversion."""
    is_input = isinstance(part.operation, keras.layers.InputLayer)
    has_dtypes = part.is_layer and not is_passthrough(part.operation)
    is_lookup = has_dtypes and not keras.backend.is_float_dtype(compute_dtype)
    if is_input or is_lookup:
        return compute_dtype
    if plan.policy_of(part.path) == FLOAT32.name:
        return FLOAT32.name
    return plan.compute_dtype if has_dtypes else FOLLOWS_INPUTS


def _with_statistics(
    rows: list[AuditRow], plan: Plan, measurement: Measurement
) -> tuple[list[AuditRow], tuple[FormatErrors, ...]]:
    """Returns rows with the statistics of a batch, and the errors of the outputs by format."""
    reference = statistics_of(measurement.exact)
    by_format = _passes_by_format(measurement, plan)
    name, result = next(by_format)
    candidate = statistics_of(result)
    rows = [_measured(row, reference, candidate, FORMATS_16_BIT[name]) for row in rows]
    formats = [_errors_in(name, reference, candidate)]
    # The code of a custom layer may not take the other format.
    with contextlib.suppress(ValueError):
        for name, result in by_format:
            candidate = statistics_of(result)
            rows = [_measured(row, reference, candidate) for row in rows]
            formats.append(_errors_in(name, reference, candidate))
    outputs = reference.get("")
    is_comparable = outputs is not None and outputs.is_finite
    return rows, tuple(formats) if is_comparable else ()


def _passes_by_format(measurement: Measurement, plan: Plan) -> Iterator[tuple[str, PassResult]]:
    """Yields both 16-bit formats, each with a pass in it: first that of the candidate.

    A converted model is its own candidate, and computes in the other format for a pass. One that
    computes in both formats is passed only as it is.
    """
    passes, number_format = measurement.passes, plan.compute_dtype
    model = passes.model
    if not compute_dtypes(model).isdisjoint(DTYPES_16_BIT):
        other = other_format_of(model)
        yield OTHER_FORMATS[other] if other else number_format, passes.in_own_precision()
        if other:
            yield other, passes.in_format(other)
        return
    for name in (number_format, OTHER_FORMATS[number_format]):
        policy = plan.policy.replace(number_format, name)
        parts = parts_of(model, precision_of(model, policy, measurement.ranges))
        clone, operations = clone_model(model, parts, make_plan(model, parts, policy))
        yield name, inference_passes(clone, operations, passes.data).in_own_precision()


def _measured(
    row: AuditRow,
    reference: Statistics,
    candidate: Statistics,
    number_format: FloatFormat | None = None,
) -> AuditRow:
    """Returns a row with what a pass shows: of the candidate in its format, or in the other one."""
    exact, rounded = reference.get(row.path), candidate.get(row.path)
    if exact is None or rounded is None:
        return row
    error = rounded.relative_error(exact)
    overflows = exact.is_finite and not rounded.is_finite
    if number_format is None:
        return replace(row, other_relative_error=error, overflows_in_other=overflows)
    return replace(
        row,
        amax=exact.amax,
        overflow_share=exact.overflow_share(number_format),
        underflow_share=exact.underflow_share(number_format),
        relative_error=error,
        overflows=overflows,
    )


def _errors_in(name: str, reference: Statistics, candidate: Statistics) -> FormatErrors:
    """Returns the error of the model's outputs in a format, or the first layer that overflows."""
    for path, each in candidate.items():
        if not each.is_finite and path in reference and reference[path].is_finite:
            return FormatErrors(name, None, failures=(f"layer {path!r} returns NaN or Inf",))
    exact, rounded = reference.get(""), candidate.get("")
    if exact is None or rounded is None:
        return FormatErrors(name, None)
    return FormatErrors(name, rounded.relative_error(exact))


def _notes(model: keras.Model, promoted: Iterable[Place]) -> Iterator[str]:
    """Yields a sentence for each output in 16 bits, and for each operation that is promoted."""
    for operation in output_operations(calls_in(model)):
        dtype = _output_dtype(operation)
        is_layer = isinstance(operation, keras.Layer)
        if dtype not in DTYPES_16_BIT or (is_layer and operation.compute_dtype != dtype):
            continue
        remedy = "use keras.ops.cast(x, 'float32')"
        if is_layer:
            remedy = "create the layer with dtype='float32'"
        yield (
            f"The output of {operation.name!r} is {dtype}, as is what `predict` returns. For"
            f" float32, {remedy}."
        )
    for place in promoted:
        yield (
            f"{place} computes in float32, because one operand is float32. For {place.dtype}, cast"
            " that operand."
        )


def _output_dtype(operation: keras.Operation) -> str | None:
    # An operation that was never called in a graph has no `output`.
    outputs = keras.tree.flatten(getattr(operation, "output", []))
    dtypes = {keras.backend.standardize_dtype(tensor.dtype) for tensor in outputs}
    return ", ".join(sorted(dtypes)) or None
