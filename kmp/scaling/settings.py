"""The public arguments that choose a rule of the loss scale."""

import numbers
from typing import Any, TypedDict, Unpack

from kmp.scaling.dynamic_scale import DynamicScale
from kmp.scaling.fixed_scale import FixedScale
from kmp.utils import validation

Rule = FixedScale | DynamicScale


class LossScaleSettings(TypedDict, total=False):
    """The public arguments that choose a rule; their meaning and ranges are those of `DynamicScale`."""

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
    """Returns the rule that the public arguments describe.

    Args:
        **settings: Arguments of `DynamicScale`; `dynamic_growth_steps`, Keras' name for `growth_interval`; and
            `loss_scale`: `"dynamic"`, or 0 as apex and DeepSpeed write it, or the fixed scale, a float from 2^-126 to
            2^127.

    Raises:
        TypeError: If an argument is of the wrong type or unknown.
        ValueError: If an argument is outside its range, or contradicts another.
    """
    rest: dict[str, Any] = dict(settings)
    _check_names(rest)
    loss_scale = rest.pop("loss_scale", "dynamic")
    _join_intervals(rest)
    if _is_dynamic(loss_scale):
        return DynamicScale(**rest)
    fixed = FixedScale(loss_scale)
    if rest.get("initial_scale") == fixed.initial_scale:
        del rest["initial_scale"]
    others = {name: value for name, value in rest.items() if value != getattr(DynamicScale(), name)}
    if others:
        DynamicScale(**others)  # is an error of its own for a value outside its range
        raise ValueError(
            f"A fixed loss scale has no other settings. Received: loss_scale={loss_scale!r} with {others!r}. "
            "Leave them out, or pass loss_scale='dynamic'."
        )
    return fixed


def override(inherited: LossScaleSettings, own: LossScaleSettings) -> LossScaleSettings:
    """Returns `own` settings over `inherited` ones.

    An inherited growth interval under its other name, and a fixed scale beside settings of a dynamic one or the other
    way round, give way.

    Args:
        inherited: Settings that are in force.
        own: Settings given on top of them.

    Raises:
        TypeError: If there is no such setting.
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
    known = LossScaleSettings.__annotations__
    for name in settings:
        if name not in known:
            raise TypeError(f"There is no argument {name!r}. There are: {', '.join(known)}, jit_compile")


def _join_intervals(settings: dict[str, Any]) -> None:
    """Renames `dynamic_growth_steps` to `growth_interval`; where both are given, the default gives way."""
    if "dynamic_growth_steps" not in settings:
        return
    keras_name = validation.positive_integer("dynamic_growth_steps", settings.pop("dynamic_growth_steps"))
    ours = settings.setdefault("growth_interval", keras_name)
    if ours == DynamicScale.growth_interval:
        settings["growth_interval"] = keras_name
    elif ours != keras_name:
        raise ValueError(
            "`growth_interval` and `dynamic_growth_steps` are the same thing; give one of them. Received: "
            f"growth_interval={ours!r}, dynamic_growth_steps={keras_name!r}"
        )


def _is_dynamic(loss_scale: Any) -> bool:
    """Whether the public argument `loss_scale` asks for the dynamic rule."""
    if isinstance(loss_scale, str) and loss_scale == "dynamic":
        return True
    return isinstance(loss_scale, numbers.Real) and not isinstance(loss_scale, bool) and loss_scale == 0
