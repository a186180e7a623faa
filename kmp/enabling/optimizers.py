"""Wraps optimizers in `LossScaleOptimizer`, for `wrap` and for `compile`."""

from typing import Any, Unpack

import keras

from kmp.enabling.active_settings import current_settings
from kmp.optimizer import LossScaleOptimizer
from kmp.optimizer.inner_optimizer import resolve_optimizer
from kmp.scaling import DynamicScale
from kmp.scaling.settings import LossScaleSettings, override


def wrap(
    optimizer: keras.optimizers.Optimizer | str,
    *,
    jit_compile: bool | str | None = None,
    **loss_scale_settings: Unpack[LossScaleSettings],
) -> LossScaleOptimizer:
    """Wraps an optimizer that is not passed to `compile`, as in a GAN or a custom training loop.

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
    >>> generator_optimizer = wrap(keras.optimizers.Adam(1e-4), growth_interval=500)
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
    if jit_compile is None:
        jit_compile = enabled.jit_compile if enabled else "auto"
    inherited = enabled.settings if enabled else LossScaleSettings()
    wrapped = LossScaleOptimizer(
        optimizer, **override(inherited, **loss_scale_settings), jit_compile=jit_compile
    )
    wrapped.settings_call = "kmp.wrap" if loss_scale_settings or enabled is None else "kmp.enable"
    return wrapped


def wrap_for_compile(identifier: Any) -> keras.optimizers.Optimizer | None:
    """Returns the optimizer that replaces the `optimizer` argument of `compile`.

    `None` if it is `None`.
    """
    optimizer = keras.optimizers.get(identifier)
    if optimizer is None or isinstance(optimizer, LossScaleOptimizer):
        return optimizer
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return wrap(optimizer)
    if optimizer.built:
        return optimizer
    # Keras' own, not yet built, for example while `load_model` compiles a model.
    settings: LossScaleSettings = {}
    if optimizer.initial_scale != DynamicScale.initial_scale:
        settings["initial_scale"] = optimizer.initial_scale
    if optimizer.dynamic_growth_steps != DynamicScale.growth_interval:
        settings["growth_interval"] = optimizer.dynamic_growth_steps
    return wrap(optimizer.inner_optimizer, **settings)


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
