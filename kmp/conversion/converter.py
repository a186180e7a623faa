"""From float32 to mixed precision, and back: a new model of the same architecture and weights."""

import logging
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from kmp.backend import compute_dtypes, computes_in_16_bits
from kmp.conversion.activation_statistics import ActivationStatistics, by_old_path, measure_activations
from kmp.conversion.compile_state_transfer import transfer_compile_state
from kmp.conversion.model_parts import check_built, is_quantized, parts_of
from kmp.conversion.plan_application import apply_plan, convert_to_float32
from kmp.conversion.precision_plan import NO_DTYPE, Plan, completed, configurable_parts, planned, unreachable_operations
from kmp.conversion.precision_rules import NEEDS_FLOAT32, rule_for
from kmp.utils import FLOAT16, validation

logger = logging.getLogger("kmp")

_OUT_OF_REACH = "%s follows its inputs: %s makes it in its own code. Put kmp.layers.Float32(function) there (%s)."
_OVERFLOWED = "overflowed with the batch: up to {amax:.3g} in float32"


def convert(
    model: keras.Model,
    policy: str | Plan = "mixed_float16",
    keep_float32: Any = None,
    batch: Any = None,
    *,
    float32_layers: bool = True,
) -> keras.Model:
    """Returns a mixed-precision model with the architecture and the weights of a float32 one, which stays as it is.

    What float16 endangers stays float32, as `kmp.audit` shows it, and so does what makes the model's outputs; stock
    `BatchNormalization` becomes kmp's. Weights are the same bit for bit (rounded, with the policies that keep them in
    16 bits).

    A compiled model comes back compiled, with kmp's loss scale around its optimizer for float16, and with the
    optimizer's state. What does not carry over: the values of metrics, what `exclude_from_weight_decay` was told, and
    how a model with a `compile` of its own, or a nested one, was compiled.

    To compile it anew, or after it was loaded, do so under `kmp.enable()`, or with `kmp.wrap(optimizer)`: elsewhere
    Keras may give float16 no loss scale.

    Of a subclassed model Keras does not know what makes the outputs: give its last layer to `keep_float32`, or cast
    them. The rules look at layers and operations, not into functions of your own, save that a `Lambda` layer stays
    float32. The softmax inside of attention layers follows them.

    Classes that make layers in their own code, models too, get their policy; of what they make, layers that float16
    endangers get float32, and operations of a functional graph cannot, which is logged. `BatchNormalization` stays
    Keras' there, and the dtypes of symbolic tensors are the policy's. Keras does not write the policies of what is
    inside to a file: load such a model under `kmp.enable(policy)`, and hand `dtype` on to the layers that you make.

    Args:
        model: A `keras.Model` that is built: functional, Sequential, or subclassed with a `get_config`.
        policy: `"mixed_float16"`, `"mixed_bfloat16"`, `"float16"` or `"bfloat16"`; or a `kmp.Plan`.
        keep_float32: What is to stay float32 beside what kmp's rules say: a path or pattern as `kmp.audit` shows paths
            (`*` and `?` as in a shell), a name where no path is the same, a layer, a class, a function of a layer that
            returns whether it is to, or a list of these.
        batch: What the model is called with, such as an array of its input. Layers whose output overflows with it, and
            does not in float32, stay float32 too, until none does; they are logged under `"kmp"`.
        float32_layers: Whether kmp's rules apply. Otherwise only `keep_float32` stays float32.

    Returns:
        The new model; the one given where it computes in 16 bits already, or is quantized, which is logged.

    Raises:
        TypeError: If `model` is no Keras model, or `keep_float32` or `float32_layers` is of another type.
        ValueError: If `model` is not built or cannot be made anew, a pattern, class or path of a plan matches no layer,
            `policy` is another, there is a plan beside `keep_float32` or `float32_layers`, or the batch does not fit. Nothing
            has changed then.

    Example:
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(2, "softmax")])
    >>> [layer.compute_dtype for layer in convert(model).layers]
    ['float16', 'float32']
    """
    check_built(model)
    plan = _plan_of(model, policy, keep_float32, validation.boolean("float32_layers", float32_layers))
    if _is_settled(model):
        return model
    for path, reason in plan.float32.items():
        if reason == NO_DTYPE:
            logger.warning("%s stays float32: %s.", path, reason)
    if float32_layers:
        _tell_what_is_out_of_reach(model)
    made, plan = _until_finite(model, plan, batch) if batch is not None else (apply_plan(model, plan), plan)
    transfer_compile_state(model, made, scaled=plan.compute_dtype == FLOAT16.name)
    return made


def to_float32(model: keras.Model) -> keras.Model:
    """Returns a float32 model with the architecture and the weights of a mixed-precision one, which stays as it is.

    The way back from `convert`, for export: made of Keras' own layers where kmp's stood, so that whoever loads it needs
    no kmp. A compiled model comes back compiled, with its optimizer's state, and without a loss scale.

    Args:
        model: A `keras.Model` that is built.

    Returns:
        The new model; the one given where it is quantized, which is logged.

    Raises:
        TypeError: If `model` is no Keras model.
        ValueError: If it is not built, computes in float64, or cannot be made anew.

    Example:
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2, "softmax")])
    >>> sorted({layer.compute_dtype for layer in to_float32(convert(model)).layers})
    ['float32']
    """
    check_built(model)
    if _is_quantized(model):
        return model
    _refuse_float64(model)
    made = convert_to_float32(model)
    transfer_compile_state(model, made, scaled=False)
    return made


def _tell_what_is_out_of_reach(model: keras.Model) -> None:
    for part in unreachable_operations(parts_of(model)):
        rule = rule_for(part)
        if rule.category == NEEDS_FLOAT32:
            logger.warning(_OUT_OF_REACH, part.path, type(part.holder).__name__, rule.reason)


def _plan_of(model: keras.Model, policy: str | Plan, keep_float32: Any, float32_layers: bool) -> Plan:
    if not isinstance(policy, Plan):
        return planned(model, policy, keep_float32, float32_layers)
    if keep_float32 is not None or not float32_layers:
        raise ValueError(
            "`keep_float32` and `float32_layers` make a plan; one that is given says all. Edit its `float32`."
        )
    return completed(policy, model)


def _is_quantized(model: keras.Model) -> bool:
    found = is_quantized(model)
    if found:
        logger.warning("%r is quantized, and left as it is.", model.name)
    return found


def _is_settled(model: keras.Model) -> bool:
    """Whether there is nothing to convert; says so."""
    if _is_quantized(model):
        return True
    _refuse_float64(model)
    settled = computes_in_16_bits(model)
    if settled:
        dtypes = " and ".join(sorted(compute_dtypes(model)))
        message = (
            "%r computes in %s already, and is left as it is. To convert it anew, take kmp.to_float32(model) first."
        )
        logger.warning(message, model.name, dtypes)
    return settled


def _refuse_float64(model: keras.Model) -> None:
    if "float64" in compute_dtypes(model):
        raise ValueError(f"{model.name!r} computes in float64: in float32 its weights would change.")


def _until_finite(model: keras.Model, plan: Plan, batch: Any) -> tuple[keras.Model, Plan]:
    """Converts, and converts again with what overflows in float32, until nothing does that does not in float32."""
    outputs, reference = measure_activations(model, batch)
    were_finite = _are_finite(outputs)
    if not were_finite:
        logger.warning("With this batch the outputs of %r are inf or nan in float32 too.", model.name)
    told = [part.path for part in configurable_parts(model)]
    while True:
        made = apply_plan(model, plan)
        outputs, seen = measure_activations(made, batch)
        found = _overflowing(by_old_path(seen, model, made), reference, plan, told)
        if not found:
            if were_finite and not _are_finite(outputs):
                logger.warning("With this batch the outputs of %r are inf or nan in %s.", model.name, plan.policy)
            return made, plan
        for path, reason in found.items():
            logger.warning("%s stays float32: it %s.", path, reason)
        plan = Plan(plan.policy, plan.float32 | found)


def _are_finite(outputs: Any) -> bool:
    return all(np.isfinite(np.asarray(one)).all() for one in keras.tree.flatten(outputs))


def _overflowing(
    seen: Mapping[str, ActivationStatistics], reference: Mapping[str, ActivationStatistics], plan: Plan, told: list[str]
) -> dict[str, str]:
    """Returns what to keep in float32 with its reason: what float32 has beyond float16's range, or came first."""
    spoilt = [
        path for path, one in seen.items() if not one.is_finite and path in reference and reference[path].is_finite
    ]
    beyond = [path for path in spoilt if reference[path].amax > FLOAT16.max]
    for paths in (beyond, *([path] for path in spoilt)):
        found = {}
        for path in paths:
            at = next((one for one in reversed(told) if path == one or path.startswith(f"{one}/")), None)
            if at is not None and at not in plan.float32:
                found[at] = _OVERFLOWED.format(amax=reference[path].amax)
        if found:
            return found
    return {}
