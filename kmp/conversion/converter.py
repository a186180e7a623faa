"""Converts a float32 model to mixed precision and back, as a new model with the same architecture and weights."""

import logging
from typing import Any

import keras

from kmp.backend import compute_dtypes
from kmp.conversion.cloning import clone_model
from kmp.conversion.compile_state import transfer_compile_state
from kmp.conversion.measurement import measure_activations
from kmp.conversion.model_parts import Part, check_built, check_not_float64, is_quantized, parts_of
from kmp.conversion.op_rule import NEEDS_FLOAT32
from kmp.conversion.plan import Plan, complete_plan, make_plan
from kmp.utils import DTYPES_16_BIT, FLOAT16, validation

logger = logging.getLogger("kmp")


def convert(
    model: keras.Model,
    policy: str | Plan = "mixed_float16",
    keep_float32: Any = None,
    batch: Any = None,
    *,
    float32_layers: bool = True,
) -> keras.Model:
    """Returns a mixed-precision model with the architecture and weights of a float32 model, which is not changed.

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
    - The rules do not inspect custom functions. `Lambda` layers stay float32; the softmax inside
      attention layers uses the dtype of the layer.
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
        policy: `"mixed_float16"`, `"mixed_bfloat16"`, `"float16"` or `"bfloat16"`; or a `kmp.Plan`.
        keep_float32: What stays float32 in addition to kmp's rules: a path as `kmp.audit` shows it,
            a pattern of paths with `*` and `?`, a name if no path matches, a layer, a class, a
            function that takes a layer and returns whether it stays float32, or a list of these.
        batch: An input of the model, such as an array. Layers whose output overflows with it in 16
            bits but not in float32 stay float32 too, until no output overflows; they are logged
            under `"kmp"`.
        float32_layers: Whether kmp's rules for float32 layers apply, in addition to `keep_float32`.

    Returns:
        The new model; `model` itself if it already computes in 16 bits or is quantized, which is
        logged.

    Raises:
        TypeError: If `model` is not a Keras model, or `policy`, `keep_float32` or `float32_layers`
            has another type.
        ValueError: If `model` is not built, computes in float64 or cannot be rebuilt from its
            config; if a pattern, class, layer or path of a plan matches no layer; if `policy` is
            another string; if `keep_float32` or `float32_layers` is used with a plan; or if the
            batch does not fit.

    Example:
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(2, "softmax")])
    >>> [layer.compute_dtype for layer in convert(model).layers]
    ['float16', 'float32']
    """
    check_built(model)
    validation.boolean("float32_layers", float32_layers)
    plan = policy if isinstance(policy, Plan) else Plan(policy)
    parts = parts_of(model, plan.policy)
    if plan is not policy:
        plan = make_plan(model, parts, plan, keep_float32, float32_layers)
    elif keep_float32 is None and float32_layers:
        plan = complete_plan(plan, parts)
    else:
        raise ValueError(
            "`keep_float32` and `float32_layers` cannot be used with a `kmp.Plan`. Edit the plan's"
            " `float32` instead."
        )
    if is_quantized(model):
        logger.warning("%r is quantized and is returned unchanged.", model.name)
        return model
    check_not_float64(model)
    dtypes = compute_dtypes(model)
    if dtypes & set(DTYPES_16_BIT):
        logger.warning(
            "%r already computes in %s and is returned unchanged. To convert it, call"
            " kmp.to_float32(model) first.",
            model.name,
            " and ".join(sorted(dtypes)),
        )
        return model
    _log_what_cannot_be_set(parts, plan, float32_layers)
    if batch is None:
        converted, _ = clone_model(model, parts, plan)
    else:
        converted = _convert_until_finite(model, parts, plan, batch)
    transfer_compile_state(model, converted, scale_loss=plan.compute_dtype == FLOAT16.name)
    return converted


def to_float32(model: keras.Model) -> keras.Model:
    """Returns a float32 model with the architecture and weights of a mixed-precision model, which is not changed.

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
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2, "softmax")])
    >>> sorted({layer.compute_dtype for layer in to_float32(convert(model)).layers})
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


def _log_what_cannot_be_set(parts: list[Part], plan: Plan, float32_layers: bool) -> None:
    for part in parts:
        if part.obstacle and part.path in plan.float32:
            logger.warning("%s stays float32: %s.", part.path, part.obstacle)
        if (
            float32_layers
            and part.rule.category == NEEDS_FLOAT32
            and not (part.is_planned or part.is_layer)
        ):
            logger.warning(
                "%s needs float32 but follows its inputs, because the code of %s creates it: %s."
                " Use kmp.layers.Float32(function) there.",
                part.path,
                type(part.parent).__name__,
                part.rule.reason,
            )


def _convert_until_finite(
    model: keras.Model, parts: list[Part], plan: Plan, batch: Any
) -> keras.Model:
    """Converts repeatedly, each time with the overflowing layers in float32, until none overflows only in 16 bits."""
    reference = measure_activations(model, {part.path: part.operation for part in parts}, batch)
    if "" in reference and not reference[""].is_finite:
        logger.warning(
            "With this batch the outputs of %r have NaN or Inf in float32 too.", model.name
        )
    # A path without its own policy is kept float32 through its closest parent that has one. The
    # model has the path "".
    closest: dict[str, str] = {"": ""}
    for part in parts:
        closest[part.path] = part.path if part.is_planned else closest[part.parent_path]
    while True:
        converted, operations = clone_model(model, parts, plan)
        statistics = measure_activations(converted, operations, batch)
        finite_before = [
            path for path in statistics if path in reference and reference[path].is_finite
        ]
        overflowed = [path for path in finite_before if not statistics[path].is_finite]
        nonfinite = [path for path in overflowed if closest[path] not in ("", *plan.float32)]
        if not nonfinite:
            if "" in overflowed:
                logger.warning(
                    "With this batch the outputs of %r have NaN or Inf in %s.",
                    model.name,
                    plan.policy,
                )
            return converted
        # All whose float32 output exceeds float16's range; if there are none, the first that is
        # non-finite.
        out_of_range = [path for path in nonfinite if reference[path].amax > FLOAT16.max]
        additions = {
            closest[path]: f"overflowed with the batch: amax {reference[path].amax:.3g} in float32"
            for path in out_of_range or nonfinite[:1]
        }
        for path, reason in additions.items():
            logger.warning("%s stays float32: it %s.", path, reason)
        plan = Plan(plan.policy, plan.float32 | additions)
