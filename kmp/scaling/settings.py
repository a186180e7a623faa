"""The public arguments that choose the loss scale rule."""

from typing import Any, TypedDict, Unpack

from kmp.scaling.rules import DynamicScale, FixedScale, Rule


class LossScaleSettings(TypedDict, total=False):
    """The public loss scale arguments, as `DynamicScale` and `loss_scale_rule` explain them."""

    loss_scale: float | str
    initial_scale: float
    growth_interval: int
    growth_factor: float
    backoff_factor: float
    hysteresis: int
    min_scale: float
    max_scale: float


def loss_scale_rule(loss_scale: float | str = "dynamic", **settings: Any) -> Rule:
    """Returns the rule for the public arguments.

    Args:
        loss_scale: `"dynamic"` for a dynamic loss scale, or a float from 2^-126 to 2^127, a fixed
            loss scale.
        **settings: Arguments of `DynamicScale`.

    Raises:
        TypeError: If an argument has the wrong type or is unknown.
        ValueError: If an argument is outside its range, or a fixed loss scale has other settings.
    """
    if is_dynamic(loss_scale):
        return DynamicScale(**settings)
    fixed = FixedScale(loss_scale)  # type: ignore[arg-type]  # it raises for a string
    defaults = vars(DynamicScale())
    others = {
        name: value
        for name, value in settings.items()
        if value != defaults.get(name) and (name, value) != ("initial_scale", fixed.initial_scale)
    }
    if others:
        # It raises its own error for an unknown name or a value outside its range.
        DynamicScale(**others)
        raise ValueError(
            f"A fixed loss scale has no other settings. Received: loss_scale={loss_scale!r} with"
            f" {others!r}. Leave them out, or pass loss_scale='dynamic'."
        )
    return fixed


def override(inherited: LossScaleSettings, **own: Unpack[LossScaleSettings]) -> LossScaleSettings:
    """Returns the `inherited` settings of `kmp.enable`, overridden by the `own` ones.

    If either has a fixed loss scale, the `own` settings replace all inherited ones.
    """
    scales = (settings.get("loss_scale", "dynamic") for settings in (inherited, own))
    has_fixed = not all(map(is_dynamic, scales))
    return own if own and has_fixed else LossScaleSettings(**{**inherited, **own})


def is_dynamic(loss_scale: Any) -> bool:
    """Whether the public argument `loss_scale` chooses the dynamic rule."""
    return isinstance(loss_scale, str) and loss_scale == "dynamic"
