"""Audits a model for mixed precision, layer by layer and operation by operation."""

import math
from typing import Any

import keras

from kmp.backend import compute_dtypes, is_keras_class, is_passthrough, jit_compilation
from kmp.conversion.audit_table import Audit, Row
from kmp.conversion.cloning import clone_model
from kmp.conversion.measurement import ActivationStatistics, measure_activations
from kmp.conversion.model_parts import (
    Part,
    check_built,
    check_not_float64,
    is_quantized,
    output_operations,
    parts_of,
)
from kmp.conversion.op_rule import FOLLOWS_INPUTS
from kmp.conversion.plan import Plan, make_plan
from kmp.conversion.step_traffic import step_traffic
from kmp.utils import DTYPES_16_BIT, FLOAT32

Statistics = dict[str, ActivationStatistics]

# Elements: 16 bytes of float16. Source: NVIDIA, "Matrix Multiplication Background User's Guide",
# section "Tensor Core Requirements".
_TENSOR_CORE_MULTIPLE = 8


def audit(model: keras.Model, batch: Any = None, policy: str = "mixed_float16") -> Audit:
    """Returns the dtypes of each layer and operation of a model, and whether it needs float32 and why.

    Also whether Keras compiles the model with XLA, and why not if not. For a model that already
    computes in 16 bits: which share of the bytes of a training step is float32, and which classes
    of layers move them. For this, its forward and backward pass are traced once, and not run.

    With a batch, runs the model in float32 and as a mixed-precision candidate, and reports
    overflow, underflow and the relative error of each layer's output. The candidate of a float32
    model is `kmp.convert(model, policy)`; a model that already computes in 16 bits is its own
    candidate.

    A float32 model with custom classes is rebuilt, even without a batch, to find out whether
    `kmp.convert` can do so. This takes the time and memory of a conversion, and Keras numbers the
    unnamed layers of later models after those of the copy.

    Args:
        model: A built `keras.Model`, in float32 or mixed precision.
        batch: An input of the model, such as an array, without targets.
        policy: The policy of the candidate, as in `kmp.convert`. The categories and the reasons
            are those for it.

    Returns:
        An `Audit`, which displays as a table. `to_dict()` returns the data.

    Raises:
        TypeError: If `model` is not a Keras model, or `policy` is not a string.
        ValueError: If `model` is not built, or `policy` is another string. With a batch: if it does
            not fit the model, the model is quantized, or `kmp.convert` raises an error for it.

    Example:
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(2, "softmax", name="p")])
    >>> audit(model).plan.float32
    {'p': 'exp, sum and division: float16 flushes small probabilities to zero'}
    """
    check_built(model)
    plan = Plan(policy)
    parts = parts_of(model, plan.policy)
    plan = make_plan(model, parts, plan)
    has_batch, quantized = batch is not None, is_quantized(model)
    if has_batch and quantized:
        raise ValueError(
            f"{model.name!r} is quantized and has no float32 version to compare with: omit `batch`."
        )
    is_converted = quantized or bool(compute_dtypes(model) & set(DTYPES_16_BIT))
    # Without a batch, a model is rebuilt for its custom classes: nothing else shows whether their
    # configs suffice.
    classes = {type(model), *(type(part.operation) for part in parts)}
    has_custom_classes = not all(
        is_keras_class(cls) or cls.__module__.startswith("kmp.") for cls in classes
    )
    error, reference, candidate = "", Statistics(), Statistics()
    try:
        if not quantized:
            check_not_float64(model)
        if has_batch or (has_custom_classes and not is_converted):
            rebuilt, operations = clone_model(model, parts, None if is_converted else plan)
        if has_batch:
            reference = measure_activations(
                model, {part.path: part.operation for part in parts}, batch
            )
            candidate = measure_activations(rebuilt, operations, batch)
    except ValueError as caught:
        if has_batch:
            raise
        error = str(caught)
    if is_converted:  # it is its own candidate
        reference, candidate = candidate, reference
    keeps_dtypes = is_converted or bool(error)
    rows = tuple(
        _row(part, plan, keeps_dtypes, reference.get(part.path), candidate.get(part.path))
        for part in parts
    )
    notes = []
    for operation in dict.fromkeys(output_operations(model)):
        dtype, is_layer = _output_dtype(operation), isinstance(operation, keras.Layer)
        if dtype in DTYPES_16_BIT and not (is_layer and operation.compute_dtype != dtype):
            remedy = (
                "create the layer with dtype='float32'"
                if is_layer
                else "use keras.ops.cast(x, 'float32')"
            )
            notes.append(
                f"The output of {operation.name!r} is {dtype}, as is what `predict` returns. For"
                f" float32, {remedy}."
            )
    traffic = step_traffic(model) if is_converted and not quantized else None
    return Audit(model.name, rows, plan, error, tuple(notes), traffic, jit_compilation(model))


def _row(
    part: Part,
    plan: Plan,
    keeps_dtypes: bool,
    reference: ActivationStatistics | None,
    candidate: ActivationStatistics | None,
) -> Row:
    layer: Any = part.operation
    rule, reason = part.rule, plan.float32.get(part.path, part.rule.reason)
    has_dtypes = part.is_layer and not is_passthrough(layer)
    output_dtype = _output_dtype(layer)
    compute_dtype = layer.compute_dtype if has_dtypes else output_dtype or ""
    is_lookup = has_dtypes and not keras.backend.is_float_dtype(compute_dtype)
    if keeps_dtypes or is_lookup or isinstance(layer, keras.layers.InputLayer):
        planned_dtype = compute_dtype
    elif plan.policy_of(part.path) == FLOAT32.name:
        planned_dtype = FLOAT32.name
    else:
        planned_dtype = plan.compute_dtype if has_dtypes else FOLLOWS_INPUTS

    measured: dict[str, Any] = {}
    if reference and candidate:
        are_finite = candidate.is_finite and reference.is_finite
        measured = {
            "amax": reference.amax,
            "overflow_share": reference.overflow_share,
            "underflow_share": reference.underflow_share,
            "relative_error": candidate.relative_error(reference) if are_finite else None,
            "overflows": reference.is_finite and not candidate.is_finite,
        }
    return Row(
        path=part.path,
        class_name=type(layer).__name__,
        compute_dtype=compute_dtype,
        variable_dtype=layer.variable_dtype if has_dtypes else None,
        output_dtype=output_dtype,
        category=rule.category_in(plan.compute_dtype),
        reason=reason,
        source=rule.source if reason == rule.reason else "",
        planned_dtype=planned_dtype,
        tensor_cores=() if planned_dtype == FLOAT32.name else _unaligned(layer),
        **measured,
    )


def _output_dtype(operation: keras.Operation) -> str | None:
    outputs = keras.tree.flatten(
        getattr(operation, "output", [])
    )  # none if it was never called in a graph
    dtypes = sorted({keras.backend.standardize_dtype(tensor.dtype) for tensor in outputs})
    return ", ".join(dtypes) or None


def _unaligned(layer: Any) -> tuple[str, ...]:
    """Returns the dimensions of a layer's matrix products that are not divisible by 8, each with the padded size."""
    sizes: dict[str, int] = {}
    match layer if getattr(layer, "built", False) else None:
        case keras.layers.Dense():
            sizes["inputs"], sizes["units"] = layer.kernel.shape
        # the inputs are contracted; both may span several axes of the kernel
        case keras.layers.EinsumDense():
            operands, outputs = layer.equation.replace("...", "").split("->")
            axes = list(zip(operands.split(",")[1], layer.kernel.shape, strict=True))
            sizes["inputs"] = math.prod(size for axis, size in axes if axis not in outputs)
            sizes["units"] = math.prod(size for axis, size in axes if axis in outputs)
        case keras.layers.LSTM() | keras.layers.GRU() | keras.layers.SimpleRNN():
            sizes["inputs"], sizes["units"] = layer.cell.kernel.shape[0], layer.units
        case keras.layers.MultiHeadAttention():
            sizes["key_dim"], sizes["value_dim"] = layer.key_dim, layer.value_dim
        case keras.layers.GroupQueryAttention():
            sizes["head_dim"] = layer.head_dim
        case keras.layers.SeparableConv1D() | keras.layers.SeparableConv2D():
            sizes["channels"], sizes["filters"] = layer.pointwise_kernel.shape[-2:]
        case (
            keras.layers.Conv1DTranspose()
            | keras.layers.Conv2DTranspose()
            | keras.layers.Conv3DTranspose()
        ):
            sizes["filters"], sizes["channels"] = layer.kernel.shape[-2:]
        case keras.layers.Conv1D() | keras.layers.Conv2D() | keras.layers.Conv3D():
            sizes["channels"], sizes["filters"] = layer.kernel.shape[-2:]
    return tuple(
        f"{name} {size} -> {math.ceil(size / _TENSOR_CORE_MULTIPLE) * _TENSOR_CORE_MULTIPLE}"
        for name, size in sizes.items()
        if size % _TENSOR_CORE_MULTIPLE
    )
