"""From float32 to mixed precision, and back: a new model of the same architecture and weights."""

import logging
from collections.abc import Mapping
from typing import Any

import keras

from kmp._by_plan import by_plan, in_float32
from kmp._carry_over import carry_over
from kmp._formats import BFLOAT16, FLOAT16
from kmp._plan import NO_DTYPE, Plan, planned, told_parts
from kmp._state import compute_dtypes, sublayers
from kmp._structure import parts_of
from kmp._trace import Seen, traced

logger = logging.getLogger("kmp")

_HALF = {FLOAT16.name, BFLOAT16.name}
_OVERFLOWED = "overflowed with the batch: up to {amax:.3g} in float32"


def convert(
    model: keras.Model,
    policy: str | Plan = "mixed_float16",
    keep_float32: Any = None,
    batch: Any = None,
    *,
    islands: bool = True,
) -> keras.Model:
    """Returns a mixed-precision model with the architecture and the weights of a float32 one, which stays as it is.

    What float16 endangers stays float32, as `kmp.audit` shows it, and so does what makes the model's outputs; stock
    `BatchNormalization` becomes kmp's. Weights are the same bit for bit (rounded, with the policies that keep them in
    16 bits).

    A compiled model comes back compiled, with kmp's loss scale around its optimizer for float16, and with the
    optimizer's state. What does not carry over: the values of metrics, a `compile` method of the model's own, a
    `train_function` that was put in place, callbacks' state.

    Layers that make layers of their own get their policy, and those inside that float16 endangers get float32. But
    Keras does not write the policies of those inside to a file: load such a model under `kmp.enable(policy)`, and hand
    `dtype` on to the layers that you make.

    Args:
        model: A `keras.Model` that is built: functional, Sequential, or subclassed with a `get_config`.
        policy: `"mixed_float16"`, `"mixed_bfloat16"`, `"float16"` or `"bfloat16"`; or a `kmp.Plan`.
        keep_float32: What is to stay float32 beside that: a path or pattern as `kmp.audit` shows paths (`*` and `?` as
            in a shell), a class, a function of a layer that returns whether it is to, or a list of these.
        batch: What the model is called with, such as an array of its input. Layers whose output overflows with it, and
            does not in float32, stay float32 too, until none does; they are logged under `"kmp"`.
        islands: Whether kmp's rules apply. Otherwise only `keep_float32` stays float32.

    Returns:
        The new model; the one given where it computes in 16 bits already, or is quantized, which is logged.

    Raises:
        TypeError: If `model` is no Keras model, or `keep_float32` is of another type.
        ValueError: If `model` is not built or cannot be made anew, a pattern or class matches no layer, a value is
            outside its range, or the batch does not fit. Nothing has changed then.

    Example:
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(2, "softmax")])
    >>> [layer.compute_dtype for layer in convert(model).layers]
    ['float16', 'float32']
    """
    check(model)
    plan = policy if isinstance(policy, Plan) else planned(model, policy, keep_float32, islands)
    if _is_settled(model):
        return model
    for path, reason in plan.float32.items():
        if reason == NO_DTYPE:
            logger.warning("%s stays float32: %s.", path, reason)
    made, plan = _until_finite(model, plan, batch) if batch is not None else (by_plan(model, plan), plan)
    carry_over(model, made, scaled=plan.compute_dtype == FLOAT16.name)
    return made


def to_float32(model: keras.Model) -> keras.Model:
    """Returns a float32 model with the architecture and the weights of a mixed-precision one, which stays as it is.

    The way back from `convert`, for export: made of Keras' own layers where kmp's stood, so that whoever loads it needs
    no kmp. A compiled model comes back compiled, with its optimizer's state, and without a loss scale.

    Args:
        model: A `keras.Model` that is built.

    Raises:
        TypeError: If `model` is no Keras model.
        ValueError: If it is not built, or cannot be made anew.

    Example:
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2, "softmax")])
    >>> sorted({layer.compute_dtype for layer in to_float32(convert(model)).layers})
    ['float32']
    """
    check(model)
    made = in_float32(model)
    carry_over(model, made, scaled=False)
    return made


def check(model: Any) -> None:
    """Makes sure that a model can be looked at.

    Raises:
        TypeError: If it is no Keras model.
        ValueError: If it, or a layer in it, is not built.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a keras.Model. Received: model={model!r}")
    unbuilt = [layer.name for layer in sublayers(model) if not layer.built]
    if unbuilt:
        raise ValueError(
            f"{type(model).__name__} {model.name!r} is not built: call it on a batch first, or give it an `Input`. "
            f"Without weights are: {', '.join(unbuilt)}"
        )


def _is_settled(model: keras.Model) -> bool:
    """Whether there is nothing to convert; says so."""
    if any(getattr(layer, "quantization_mode", None) for layer in sublayers(model)):
        logger.warning("%r is quantized, and left as it is.", model.name)
        return True
    dtypes = compute_dtypes(model)
    if dtypes & _HALF:
        logger.warning(
            "%r computes in %s already, and is left as it is. To convert it anew, take kmp.to_float32(model) first.",
            model.name,
            " and ".join(sorted(dtypes)),
        )
    return bool(dtypes & _HALF)


def _until_finite(model: keras.Model, plan: Plan, batch: Any) -> tuple[keras.Model, Plan]:
    """Converts, and converts again with what overflows in float32, until nothing does that does not in float32."""
    _, reference = traced(model, batch)
    told = [part.path for part in told_parts(model)]
    while True:
        made = by_plan(model, plan)
        _, seen = traced(made, batch)
        found = _overflowing(by_old_path(seen, model, made), reference, plan, told)
        if not found:
            return made, plan
        for path, reason in found.items():
            logger.warning("%s stays float32: it %s.", path, reason)
        plan = Plan(plan.policy, plan.float32 | found)


def _overflowing(
    seen: Mapping[str, Seen], reference: Mapping[str, Seen], plan: Plan, told: list[str]
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


def by_old_path(seen: Mapping[str, Seen], old: keras.Model, new: keras.Model) -> dict[str, Seen]:
    """Names what was seen of a new model by the paths of the old one, where layers named what they made otherwise."""
    old_path = {after.path: before.path for before, after in zip(parts_of(old), parts_of(new), strict=True)}
    return {old_path[path]: one for path, one in seen.items()}
