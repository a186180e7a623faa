"""The public arguments that define the loss scale rule."""

import numbers
from typing import Any, TypedDict, Unpack

from kmp.scaling.dynamic_scale import DynamicScale
from kmp.scaling.fixed_scale import FixedScale
from kmp.utils import validation

Rule = FixedScale | DynamicScale


class LossScaleSettings(TypedDict, total=False):
    """The public loss scale arguments, with the meaning and ranges of `DynamicScale` and `make_rule`."""

    loss_scale: float | str
    initial_scale: float
    growth_interval: int
    dynamic_growth_steps: int
    growth_factor: float
    backoff_factor: float
    hysteresis: int
    min_scale: float
    max_scale: float


def make_rule(**settings: Unpack[LossScaleSettings]) -> Rule:
    """Returns the rule for the public arguments.

    Args:
        **settings: Arguments of `DynamicScale`; `dynamic_growth_steps`, Keras' name for `growth_interval`; and
            `loss_scale`: `"dynamic"`, or 0 as in apex and DeepSpeed, for a dynamic loss scale; or a float from 2^-126
            to 2^127, a fixed loss scale.

    Raises:
        TypeError: If an argument has the wrong type or is unknown.
        ValueError: If an argument is outside its range or contradicts another.
    """
    arguments: dict[str, Any] = dict(settings)
    _check_names(arguments)
    loss_scale = arguments.pop("loss_scale", "dynamic")
    _merge_growth_intervals(arguments)
    if _is_dynamic(loss_scale):
        return DynamicScale(**arguments)
    fixed = FixedScale(loss_scale)
    if _equals(arguments.get("initial_scale"), fixed.initial_scale):
        del arguments["initial_scale"]
    others = {name: value for name, value in arguments.items() if not _equals(value, getattr(DynamicScale, name))}
    if others:
        DynamicScale(**others)  # a value outside its range raises its own error
        raise ValueError(
            f"A fixed loss scale has no other settings. Received: loss_scale={loss_scale!r} with {others!r}. "
            "Leave them out, or pass loss_scale='dynamic'."
        )
    return fixed


def override(inherited: LossScaleSettings, own: LossScaleSettings) -> LossScaleSettings:
    """Returns the `inherited` settings, overridden by the `own` ones.

    Inherited settings that contradict `own` are dropped: the growth interval under both of its names, and, if `own` is
    not empty and one of the loss scales is fixed, all of them.

    Args:
        inherited: Settings of `kmp.enable`.
        own: Settings that override them.

    Raises:
        TypeError: If `own` has an unknown setting.
    """
    _check_names(dict(own))
    kept: dict[str, Any] = dict(inherited)
    if own.keys() & {"growth_interval", "dynamic_growth_steps"}:
        kept = {k: v for k, v in kept.items() if k not in ("growth_interval", "dynamic_growth_steps")}
    was_fixed = not _is_dynamic(kept.get("loss_scale", "dynamic"))
    if own and (was_fixed or not _is_dynamic(own.get("loss_scale", "dynamic"))):
        kept = {}
    return LossScaleSettings(**kept | own)  # type: ignore[typeddict-item]


def _check_names(settings: dict[str, Any]) -> None:
    known = (*LossScaleSettings.__annotations__, "jit_compile")  # the callers handle `jit_compile`
    validation.check_argument_names(settings, known, "the loss scale")


def _merge_growth_intervals(settings: dict[str, Any]) -> None:
    """Renames `dynamic_growth_steps` to `growth_interval`; if both are given, ignores a default one."""
    if "dynamic_growth_steps" not in settings:
        return
    growth_steps = validation.positive_integer("dynamic_growth_steps", settings.pop("dynamic_growth_steps"))
    growth_interval = validation.positive_integer("growth_interval", settings.get("growth_interval", growth_steps))
    settings["growth_interval"] = growth_interval
    if growth_interval == DynamicScale.growth_interval:
        settings["growth_interval"] = growth_steps
    elif growth_interval != growth_steps:
        raise ValueError(
            "`growth_interval` and `dynamic_growth_steps` are the same setting; pass only one of them. Received: "
            f"growth_interval={growth_interval!r}, dynamic_growth_steps={growth_steps!r}"
        )


def _is_dynamic(loss_scale: Any) -> bool:
    """Whether the public argument `loss_scale` selects the dynamic rule."""
    return (isinstance(loss_scale, str) and loss_scale == "dynamic") or _equals(loss_scale, 0)


def _equals(value: Any, number: float) -> bool:
    """Whether an argument that is not validated yet is this number."""
    scalar = validation.python_scalar(value)
    return isinstance(scalar, numbers.Real) and not isinstance(scalar, bool) and scalar == number
