"""Wrapping optimizers in `LossScaleOptimizer`: by the user, and in `compile`."""

from typing import Any, Unpack

import keras

from kmp.backend import inner_optimizer
from kmp.optimizer import LossScaleOptimizer
from kmp.policy.active_settings import active
from kmp.scaling import DynamicScale, LossScaleSettings, override


def wrap(
    optimizer: keras.optimizers.Optimizer | str,
    *,
    jit_compile: bool | None = None,
    **loss_scale_settings: Unpack[LossScaleSettings],
) -> LossScaleOptimizer:
    """Wraps an optimizer that `compile` does not see: one of several that a model holds, or one of a custom loop.

    Args:
        optimizer: A `keras.optimizers.Optimizer`, or the name of one; one that kmp wrapped already is returned as it
            is.
        jit_compile: As in `enable`, whose setting `None` stands for.
        **loss_scale_settings: As in `enable`, whose settings they are added to.

    Returns:
        A `kmp.LossScaleOptimizer`. Use it with `scale_loss` and `apply`.

    Raises:
        TypeError: If `optimizer` is no optimizer, or one that scales the loss already.
        ValueError: If it is not the name of one, or a setting is outside its range.

    Example:
    >>> generator_optimizer = wrap(keras.optimizers.Adam(1e-4), growth_interval=500)
    >>> generator_optimizer.rule.growth_interval
    500
    """
    if isinstance(optimizer, LossScaleOptimizer) and not loss_scale_settings and jit_compile is None:
        return optimizer
    optimizer = inner_optimizer("optimizer", optimizer)
    if jit_compile is None:
        jit_compile = bool(active) and active[-1].jit_compile
    inherited = active[-1].settings if active else LossScaleSettings()
    return LossScaleOptimizer(optimizer, **override(inherited, loss_scale_settings), jit_compile=jit_compile)


def scaled(optimizer: Any) -> keras.optimizers.Optimizer | None:
    """Returns the optimizer that `compile` gets in place of its argument; `None` for none."""
    found = keras.optimizers.get(optimizer)
    if found is None or isinstance(found, LossScaleOptimizer):
        return found
    if isinstance(found, keras.optimizers.LossScaleOptimizer):
        return found if found.built else _replacing(found)
    return wrap(found)


def _replacing(stock: keras.optimizers.LossScaleOptimizer) -> LossScaleOptimizer:
    """Returns kmp's optimizer for one of Keras' that has not trained yet, such as one that `load_model` is making."""
    settings: LossScaleSettings = {}
    if stock.initial_scale != DynamicScale.initial_scale:
        settings["initial_scale"] = stock.initial_scale
    if stock.dynamic_growth_steps != DynamicScale.growth_interval:
        settings["growth_interval"] = stock.dynamic_growth_steps
    return wrap(stock.inner_optimizer, **settings)
