"""Wraps optimizers in `LossScaleOptimizer`, for `wrap` and for `compile`."""

from typing import Any, Unpack

import keras

from kmp.enabling.active_settings import current_settings, is_float16_enabled
from kmp.optimizer import LossScaleOptimizer
from kmp.optimizer.inner_optimizer import resolve_optimizer
from kmp.scaling import DynamicScale
from kmp.scaling.settings import LossScaleSettings, loss_scale_rule, override


def wrap(
    optimizer: keras.optimizers.Optimizer | str,
    *,
    jit_compile: bool | str | None = None,
    **loss_scale_settings: Unpack[LossScaleSettings],
) -> LossScaleOptimizer:
    """Wraps an optimizer: in a GAN or a custom training loop, or for `compile` without `enable`.

    Without settings of its own, the loss scale is that of the active `enable`. `compile` replaces
    it by a fixed scale of 1 if no layer of the model computes in float16; in a custom loop, the
    policy of the active `enable` decides. With a scale of 1 nothing is multiplied or divided: steps
    with a non-finite loss or gradient are skipped and counted, and callbacks can watch.

    Args:
        optimizer: A `keras.optimizers.Optimizer` or the name of one. A `kmp.LossScaleOptimizer` is
            returned unchanged if no other argument is given.
        jit_compile: As in `enable`. `None` uses the setting of the active `enable`.
        **loss_scale_settings: As in `enable`. They override the settings of the active `enable`.

    Returns:
        A `kmp.LossScaleOptimizer`. Call its `scale_loss` on the loss and its `apply` on the
        gradients.

    Raises:
        TypeError: If `optimizer` is not an optimizer, or already scales the loss.
        ValueError: If `optimizer` is an unknown name, or a setting is out of range.

    Example:
    >>> import keras, kmp
    >>> generator_optimizer = kmp.wrap(keras.optimizers.Adam(1e-4), growth_interval=500)
    >>> generator_optimizer.rule.growth_interval
    500
    """
    if (
        isinstance(optimizer, LossScaleOptimizer)
        and not loss_scale_settings
        and jit_compile is None
    ):
        return optimizer
    optimizer = resolve_optimizer("optimizer", optimizer)
    enabled = current_settings()
    if loss_scale_settings:
        inherited = enabled.settings if enabled else LossScaleSettings()
        settings = override(inherited, **loss_scale_settings)
    else:
        settings = _settings_for(optimizer, enabled is None or is_float16_enabled())
    wrapped = _wrapped(optimizer, settings, jit_compile)
    wrapped.settings_call = "kmp.wrap" if loss_scale_settings or enabled is None else "kmp.enable"
    wrapped.follows_model &= not loss_scale_settings
    return wrapped


def wrap_for_compile(
    identifier: Any, computes_in_float16: bool
) -> keras.optimizers.Optimizer | None:
    """Returns the optimizer that replaces the `optimizer` argument of `compile`.

    Returns `None` if that is `None`.
    """
    optimizer = keras.optimizers.get(identifier)
    if optimizer is None:
        return None

    if isinstance(optimizer, LossScaleOptimizer):
        # One that was built without a loss scale, which the model needs now, is wrapped again.
        has_none_unasked = optimizer.follows_model and not optimizer.rule.scales_loss
        if not (computes_in_float16 and optimizer.built and has_none_unasked):
            follow_model(optimizer, computes_in_float16)
            return optimizer
        optimizer = optimizer.inner_optimizer

    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        if optimizer.built:
            return optimizer
        # Keras' own, not yet built, for example while `load_model` compiles a model. Its settings
        # are kept where they are not the defaults.
        settings: LossScaleSettings = {}
        if optimizer.initial_scale != DynamicScale.initial_scale:
            settings["initial_scale"] = optimizer.initial_scale
        if optimizer.dynamic_growth_steps != DynamicScale.growth_interval:
            settings["growth_interval"] = optimizer.dynamic_growth_steps
        optimizer = optimizer.inner_optimizer
        if settings:
            return wrap(optimizer, **settings)

    wrapped = _wrapped(optimizer, _settings_for(optimizer, computes_in_float16))
    wrapped.settings_call = "kmp.enable" if current_settings() else "kmp.wrap"
    return wrapped


def follow_model(optimizer: LossScaleOptimizer, computes_in_float16: bool) -> None:
    """Sets the loss scale that fits the model, for an optimizer that `wrap` got without one."""
    if not optimizer.follows_model or optimizer.built:
        return
    settings = _settings_for(optimizer.inner_optimizer, computes_in_float16)
    rule = loss_scale_rule(**settings)
    if optimizer.rule != rule:
        optimizer.use_rule(rule)


def _settings_for(
    optimizer: keras.optimizers.Optimizer, computes_in_float16: bool
) -> LossScaleSettings:
    """Returns the settings of the active `enable`; a fixed scale of 1 for other dtypes."""
    if computes_in_float16:
        enabled = current_settings()
        return enabled.settings if enabled else LossScaleSettings()
    if optimizer.loss_scale_factor is not None:  # it becomes the fixed scale
        return LossScaleSettings()
    return LossScaleSettings(loss_scale=1.0)


def _wrapped(
    optimizer: keras.optimizers.Optimizer,
    settings: LossScaleSettings,
    jit_compile: bool | str | None = None,
) -> LossScaleOptimizer:
    if jit_compile is None:
        enabled = current_settings()
        jit_compile = enabled.jit_compile if enabled else "auto"
    has_own_scale = optimizer.loss_scale_factor is not None
    wrapped = LossScaleOptimizer(optimizer, **settings, jit_compile=jit_compile)
    wrapped.follows_model = not has_own_scale
    return wrapped


def rewrap(
    optimizer: keras.optimizers.Optimizer, original: LossScaleOptimizer
) -> LossScaleOptimizer:
    """Wraps an optimizer with the settings of another one's wrapper."""
    settings = {
        name: value for name, value in original.get_config().items() if name != "inner_optimizer"
    }
    wrapped = LossScaleOptimizer(optimizer, **settings)
    wrapped.settings_call = original.settings_call
    return wrapped
