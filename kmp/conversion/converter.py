"""Converts a float32 model to mixed precision and back.

The result is a new model with the same architecture and weights.
"""

import logging
from typing import Any

import keras

from kmp.backend.keras_internals import compute_dtypes
from kmp.backend.patching import patches
from kmp.conversion.cloning import clone_model
from kmp.conversion.compile_state import transfer_compile_state
from kmp.conversion.measurement import measured_with
from kmp.conversion.model_parts import Part, check_built, check_not_float64, is_quantized, parts_of
from kmp.conversion.overflow_search import clone_without_overflow
from kmp.conversion.plan import Plan, extend_plan, make_plan
from kmp.conversion.precision import NEEDS_FLOAT32, precision_of
from kmp.utils.float_formats import DTYPES_16_BIT, FLOAT16, FLOAT32

_MOST_NAMED = 6

logger = logging.getLogger("kmp")


def convert(
    model: keras.Model,
    policy: str | Plan = "mixed_float16",
    keep_float32: Any = None,
    batch: Any = None,
) -> keras.Model:
    """Returns a mixed-precision copy of a float32 model, with its architecture and weights.

    Layers and operations that need float32 (see `kmp.audit`) and the output layers stay float32.
    `keras.layers.BatchNormalization` becomes `kmp.layers.BatchNormalization`. The weights are
    bitwise equal, or rounded if the policy keeps weights in 16 bits.

    A compiled model is compiled again, with the state of its optimizer, and for float16 with a loss
    scale. Not transferred: the values of metrics, `exclude_from_weight_decay` settings, and the
    compile state of nested models and of classes that override `compile`. To compile the model
    yourself, or after loading it, use `kmp.enable()` or `kmp.wrap(optimizer)`; otherwise Keras may
    train float16 without a loss scale.

    Limitations:

    - Keras does not know the output layers of a subclassed model: pass them to `keep_float32`, or
      cast the outputs.
    - A custom layer or function is traced, and stays float32 as a whole if its code needs that. If
      it multiplies matrices, and only large data are a problem, such as the terms of a product or
      of a long sum, it runs in 16 bits, which is logged. A layer whose code cannot be traced runs
      in 16 bits too, and a function that cannot be traced stays float32.
    - The softmax inside attention layers uses the dtype of the layer.
    - Custom layers and models that create sublayers in code get the policy, and sublayers that need
      float32 get float32. Operations in such a functional graph cannot be changed, which is logged.
      `BatchNormalization` remains Keras' own there, and symbolic tensors have the dtypes of the
      policy.
    - Keras casts the float arguments of a layer to its compute dtype. float16 has every integer
      only up to 2048, bfloat16 up to 256, float32 up to 2^24. So a custom layer with an `Embedding`
      of more rows stays float32 if its argument is an `Input` of floats. Declare the `Input` with
      `dtype="int32"`, and the layer computes in 16 bits. kmp does not find indices that reach such
      a layer through other layers, or inside a subclassed model.
    - Keras does not save the policies of sublayers created in code: load such a model under
      `kmp.enable(policy)`, and pass `dtype` to the sublayers that you create.

    Args:
        model: A built `keras.Model`: functional, Sequential, or subclassed with a `get_config`.
        policy: `"mixed_float16"`, `"mixed_bfloat16"`, `"float16"` or `"bfloat16"`, with kmp's rules
            for what stays float32; or a `kmp.Plan`, which replaces these rules.
        keep_float32: What stays float32 in addition: a path as `kmp.audit` shows it, a pattern of
            paths with `*` and `?`, a name if no path matches, a layer, a class, a function that
            takes a layer and returns whether it stays float32, or a list of these.
        batch: An input of the model, such as an array. The ranges of what layers and operations
            return for it, up to 16 times as large, then decide which operations stay float32.
            Layers whose output overflows with it in 16 bits but not in float32 do so too, until no
            output overflows, or a layer next to them or around them if that is what it takes; they
            are logged under `"kmp"`. Without a batch, the layers in float16 that large data may
            overflow are logged.

    Returns:
        The new model; `model` itself if it already computes in 16 bits or is quantized, which is
        logged.

    Raises:
        TypeError: If `model` is not a Keras model, or `policy` or `keep_float32` has another type.
        ValueError: If `model` is not built, computes in float64 or cannot be rebuilt from its
            config; if a pattern, class, layer or path of a plan matches no layer; if `policy` is
            another string; or if the batch does not fit.

    Example:
    >>> import keras, kmp
    >>> hidden, last = keras.layers.Dense(8), keras.layers.Dense(2, "softmax")
    >>> model = keras.Sequential([keras.Input((8,)), hidden, last])
    >>> [layer.compute_dtype for layer in kmp.convert(model).layers]
    ['float16', 'float32']
    """
    check_built(model)
    given = policy if isinstance(policy, Plan) else Plan(policy)
    if _cannot_be_converted(model):
        return model
    check_not_float64(model)
    measurement = None if batch is None else measured_with(model, batch)
    if isinstance(policy, Plan):
        parts = parts_of(model)
        plan = extend_plan(policy, parts, keep_float32)
    else:
        ranges = measurement.ranges if measurement else {}
        parts = parts_of(model, precision_of(model, given.policy, ranges))
        plan = make_plan(model, parts, given.policy, keep_float32)
    _log_what_cannot_be_set(parts, plan)
    if measurement is None:
        paths = _depending_on_data(parts, plan)
        if paths:
            logger.warning(
                "Whether these overflow float16 depends on the data: %s. Pass `batch` to"
                " kmp.convert, and those that overflow with it stay float32.",
                paths,
            )
        converted, _ = clone_model(model, parts, plan)
    else:
        converted = clone_without_overflow(model, parts, plan, batch, measurement.exact)
    transfer_compile_state(model, converted, scale_loss=plan.compute_dtype == FLOAT16.name)
    patches.use(converted)  # its custom layers may combine operands of two dtypes
    return converted


def to_float32(model: keras.Model) -> keras.Model:
    """Returns a float32 copy of a mixed-precision model, with its architecture and weights.

    The inverse of `convert`, for export: kmp's layers are replaced by Keras' own, so loading the
    model does not require kmp. A compiled model is compiled again, with the state of its optimizer
    and without a loss scale.

    Args:
        model: A built `keras.Model`.

    Returns:
        The new model; `model` itself if it is quantized, which is logged.

    Raises:
        TypeError: If `model` is not a Keras model.
        ValueError: If it is not built, computes in float64, or cannot be rebuilt from its config.

    Example:
    >>> import keras, kmp
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2, "softmax")])
    >>> mixed = kmp.convert(model)
    >>> sorted({layer.compute_dtype for layer in kmp.to_float32(mixed).layers})
    ['float32']
    """
    check_built(model)
    if is_quantized(model):
        logger.warning("%r is quantized and is returned unchanged.", model.name)
        return model
    check_not_float64(model)
    converted, _ = clone_model(model, parts_of(model), None)
    transfer_compile_state(model, converted, scale_loss=False)
    return converted


def _cannot_be_converted(model: keras.Model) -> bool:
    """Whether `convert` returns a model as it is, which is logged."""
    if is_quantized(model):
        logger.warning("%r is quantized and is returned unchanged.", model.name)
        return True
    dtypes = compute_dtypes(model)
    if dtypes.isdisjoint(DTYPES_16_BIT):
        return False
    logger.warning(
        "%r already computes in %s and is returned unchanged. To convert it, call"
        " kmp.to_float32(model) first.",
        model.name,
        " and ".join(sorted(dtypes)),
    )
    return True


def _log_what_cannot_be_set(parts: list[Part], plan: Plan) -> None:
    for part in parts:
        if part.obstacle and part.path in plan.float32:
            logger.warning("%s stays float32: %s.", part.path, part.obstacle)
        is_created_in_code = not (part.is_planned or part.is_layer)
        if is_created_in_code and part.rule.category == NEEDS_FLOAT32:
            logger.warning(
                "%s needs float32 but follows its inputs, because the code of %s creates it: %s."
                " Use kmp.layers.Float32(function) there.",
                part.path,
                type(part.parent).__name__,
                part.rule.reason,
            )


def _depending_on_data(parts: list[Part], plan: Plan) -> str:
    """Returns the paths of what may leave the range of float16 with some data; empty if none."""
    if plan.compute_dtype != FLOAT16.name:  # bfloat16 has the range of float32
        return ""
    found = [
        part.path
        for part in parts
        if part.is_planned and part.rule.unknown and plan.policy_of(part.path) != FLOAT32.name
    ]
    if len(found) > _MOST_NAMED:
        found[_MOST_NAMED:] = [f"and {len(found) - _MOST_NAMED} more"]
    return ", ".join(found)
