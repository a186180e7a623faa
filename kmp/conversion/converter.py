"""Converts a float32 model to mixed precision and back, as a new model with the same architecture and weights."""

import logging
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from kmp.backend import compute_dtypes
from kmp.conversion.activation_statistics import ActivationStatistics, by_original_path, measure_activations
from kmp.conversion.compile_state_transfer import transfer_compile_state
from kmp.conversion.constructor_arguments import obstacles_to_dtypes
from kmp.conversion.model_parts import check_built, check_not_float64, computes_in_16_bits, is_quantized, parts_of
from kmp.conversion.plan_application import apply_plan, convert_to_float32
from kmp.conversion.precision_plan import (
    Plan,
    complete_plan,
    configurable_parts,
    make_plan,
    unreachable_operations,
)
from kmp.conversion.precision_rules import NEEDS_FLOAT32, rule_for
from kmp.utils import FLOAT16, validation

logger = logging.getLogger("kmp")

_UNREACHABLE = (
    "%s needs float32 but follows its inputs, because the code of %s creates it: %s. Use kmp.layers.Float32(function) "
    "there."
)
_OVERFLOWED = "overflowed with the batch: amax {amax:.3g} in float32"


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
    `keras.layers.BatchNormalization` becomes `kmp.layers.BatchNormalization`. The weights are bitwise equal, or rounded
    if the policy keeps weights in 16 bits.

    A compiled model is compiled again, with the state of its optimizer, and for float16 with a loss scale. Not
    transferred: the values of metrics, `exclude_from_weight_decay` settings, and the compile state of nested models and
    of classes that override `compile`. To compile the model yourself, or after loading it, use `kmp.enable()` or
    `kmp.wrap(optimizer)`; otherwise Keras may train float16 without a loss scale.

    Limitations:

    - Keras does not know the output layers of a subclassed model: pass them to `keep_float32`, or cast the outputs.
    - The rules do not inspect custom functions. `Lambda` layers stay float32; the softmax inside attention layers uses
      the dtype of the layer.
    - Custom layers and models that create sublayers in code get the policy, and sublayers that need float32 get
      float32. Operations in such a functional graph cannot be changed, which is logged. `BatchNormalization` remains
      Keras' own there, and symbolic tensors have the dtypes of the policy.
    - Keras casts the float arguments of a layer to its compute dtype. float16 has every integer only up to 2048,
      bfloat16 up to 256, float32 up to 2^24. So a custom layer with an `Embedding` of more rows stays float32 if its
      argument is an `Input` of floats. Declare the `Input` with `dtype="int32"`, and the layer computes in 16 bits.
      kmp does not find indices that reach such a layer through other layers, or inside a subclassed model.
    - Keras does not save the policies of sublayers created in code: load such a model under `kmp.enable(policy)`, and
      pass `dtype` to the sublayers that you create.

    Args:
        model: A built `keras.Model`: functional, Sequential, or subclassed with a `get_config`.
        policy: `"mixed_float16"`, `"mixed_bfloat16"`, `"float16"` or `"bfloat16"`; or a `kmp.Plan`.
        keep_float32: What stays float32 in addition to kmp's rules: a path as `kmp.audit` shows it, a pattern of paths
            with `*` and `?`, a name if no path matches, a layer, a class, a function that takes a layer and returns
            whether it stays float32, or a list of these.
        batch: An input of the model, such as an array. Layers whose output overflows with it in 16 bits but not in
            float32 stay float32 too, until no output overflows; they are logged under `"kmp"`.
        float32_layers: Whether kmp's rules for float32 layers apply, in addition to `keep_float32`.

    Returns:
        The new model; `model` itself if it already computes in 16 bits or is quantized, which is logged.

    Raises:
        TypeError: If `model` is not a Keras model, or `policy`, `keep_float32` or `float32_layers` has another type.
        ValueError: If `model` is not built, computes in float64 or cannot be rebuilt from its config; if a pattern,
            class, layer or path of a plan matches no layer; if `policy` is another string; if `keep_float32` or
            `float32_layers` is used with a plan; or if the batch does not fit.

    Example:
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(2, "softmax")])
    >>> [layer.compute_dtype for layer in convert(model).layers]
    ['float16', 'float32']
    """
    check_built(model)
    plan = _resolve_plan(model, policy, keep_float32, validation.boolean("float32_layers", float32_layers))
    if _is_already_converted(model):
        return model
    for path, obstacle in obstacles_to_dtypes(configurable_parts(model)).items():
        if path in plan.float32:
            logger.warning("%s stays float32: %s.", path, obstacle)
    if float32_layers:
        _warn_unreachable(model, plan.compute_dtype)
    converted, plan = (
        _convert_until_finite(model, plan, batch) if batch is not None else (apply_plan(model, plan), plan)
    )
    transfer_compile_state(model, converted, scale_loss=plan.compute_dtype == FLOAT16.name)
    return converted


def to_float32(model: keras.Model) -> keras.Model:
    """Returns a float32 model with the architecture and weights of a mixed-precision model, which is not changed.

    The inverse of `convert`, for export: kmp's layers are replaced by Keras' own, so loading the model does not require
    kmp. A compiled model is compiled again, with the state of its optimizer and without a loss scale.

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
    if _is_quantized(model):
        return model
    check_not_float64(model)
    converted = convert_to_float32(model)
    transfer_compile_state(model, converted, scale_loss=False)
    return converted


def _warn_unreachable(model: keras.Model, dtype: str) -> None:
    for part in unreachable_operations(parts_of(model)):
        rule = rule_for(part, dtype)
        if rule.category == NEEDS_FLOAT32:
            logger.warning(_UNREACHABLE, part.path, type(part.parent).__name__, rule.reason)


def _resolve_plan(model: keras.Model, policy: str | Plan, keep_float32: Any, float32_layers: bool) -> Plan:
    if not isinstance(policy, Plan):
        return make_plan(model, policy, keep_float32, float32_layers)
    if keep_float32 is not None or not float32_layers:
        raise ValueError(
            "`keep_float32` and `float32_layers` cannot be used with a `kmp.Plan`. Edit the plan's `float32` instead."
        )
    return complete_plan(policy, model)


def _is_quantized(model: keras.Model) -> bool:
    quantized = is_quantized(model)
    if quantized:
        logger.warning("%r is quantized and is returned unchanged.", model.name)
    return quantized


def _is_already_converted(model: keras.Model) -> bool:
    """Returns whether the model is quantized or computes in 16 bits, and logs it."""
    if _is_quantized(model):
        return True
    check_not_float64(model)
    is_converted = computes_in_16_bits(model)
    if is_converted:
        dtypes = " and ".join(sorted(compute_dtypes(model)))
        message = (
            "%r already computes in %s and is returned unchanged. To convert it, call kmp.to_float32(model) first."
        )
        logger.warning(message, model.name, dtypes)
    return is_converted


def _convert_until_finite(model: keras.Model, plan: Plan, batch: Any) -> tuple[keras.Model, Plan]:
    """Converts repeatedly, each time with the overflowing layers in float32, until none overflows only in 16 bits."""
    outputs, reference = measure_activations(model, batch)
    finite_in_float32 = _all_finite(outputs)
    if not finite_in_float32:
        logger.warning("With this batch the outputs of %r have NaN or Inf in float32 too.", model.name)
    paths = [part.path for part in configurable_parts(model)]
    while True:
        converted = apply_plan(model, plan)
        outputs, statistics = measure_activations(converted, batch)
        additions = _overflowing_layers(by_original_path(statistics, model, converted), reference, plan, paths)
        if not additions:
            if finite_in_float32 and not _all_finite(outputs):
                logger.warning("With this batch the outputs of %r have NaN or Inf in %s.", model.name, plan.policy)
            return converted, plan
        for path, reason in additions.items():
            logger.warning("%s stays float32: it %s.", path, reason)
        plan = Plan(plan.policy, plan.float32 | additions)


def _all_finite(outputs: Any) -> bool:
    return all(np.isfinite(np.asarray(output)).all() for output in keras.tree.flatten(outputs))


def _overflowing_layers(
    statistics: Mapping[str, ActivationStatistics],
    reference: Mapping[str, ActivationStatistics],
    plan: Plan,
    configurable_paths: list[str],
) -> dict[str, str]:
    """Returns the paths to add to the plan, with reasons.

    All whose float32 output exceeds float16's range; if there are none, the first whose output is non-finite only in
    16 bits.
    """
    nonfinite = [
        path
        for path, measured in statistics.items()
        if not measured.is_finite and path in reference and reference[path].is_finite
    ]
    out_of_range = [path for path in nonfinite if reference[path].amax > FLOAT16.max]
    for candidates in (out_of_range, *([path] for path in nonfinite)):
        additions = {}
        for path in candidates:
            # A path without its own policy is kept float32 through its closest configurable parent.
            configurable = next(
                (prefix for prefix in reversed(configurable_paths) if path == prefix or path.startswith(f"{prefix}/")),
                None,
            )
            if configurable is not None and configurable not in plan.float32:
                additions[configurable] = _OVERFLOWED.format(amax=reference[path].amax)
        if additions:
            return additions
    return {}
