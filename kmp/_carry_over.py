"""What a converted model takes over from training: how it was compiled, and what its optimizer has learnt."""

import inspect
from typing import Any

import keras

from kmp import _warnings
from kmp._patch import definer
from kmp.optimizer import LossScaleOptimizer
from kmp.policy import wrap


def carry_over(old: keras.Model, new: keras.Model, scaled: bool) -> None:
    """Compiles a model as another is, and gives its optimizer the state of the other's.

    Args:
        old: A model. Where it is not compiled, nothing happens.
        new: One of the same variables.
        scaled: Whether the optimizer of `new` has to scale the loss. One that need not scale it does not.
    """
    if not old.compiled:
        return
    try:
        if _is_own(old, "compile"):
            _compile_by_config(old, new)
            return
        settings = _settings_of(old)
        settings["optimizer"] = _optimizer(settings.get("optimizer"), scaled)
        new.compile(**settings, auto_scale_loss=False)
    except (TypeError, ValueError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0]
        _warnings.warn(f"{type(new).__name__} {new.name!r} is not compiled, compile it as before: {reason}")
        return
    if new.optimizer is not None and old.optimizer.built:
        _hand_on(_inner(old.optimizer), new)


def _is_own(model: keras.Model, method: str) -> bool:
    """Whether a method is the user's and not Keras'."""
    return not definer(type(model), method).__module__.startswith("keras.")


def _compile_by_config(old: keras.Model, new: keras.Model) -> None:
    if not _is_own(old, "compile_from_config"):
        raise ValueError(f"{type(old).__name__} has a `compile` of its own, and no `compile_from_config`")
    new.compile_from_config(old.get_compile_config())


def _settings_of(model: keras.Model) -> dict[str, Any]:
    config = model.get_compile_config()
    live = keras.tree.flatten(list(model._compile_config.config.values()))  # Keras hands out no more than their config
    named: dict[str, Any] = {one.__name__: one for one in live if inspect.isfunction(one)}
    named |= {type(one).__name__: type(one) for one in live if isinstance(one, keras.Loss | keras.Metric)}
    return keras.saving.deserialize_keras_object(config, custom_objects=named)


def _optimizer(optimizer: keras.optimizers.Optimizer | None, scaled: bool) -> keras.optimizers.Optimizer | None:
    if optimizer is None or (scaled and isinstance(optimizer, LossScaleOptimizer)):
        return optimizer
    return wrap(_inner(optimizer)) if scaled else _inner(optimizer)


def _inner(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _hand_on(before: keras.optimizers.Optimizer, model: keras.Model) -> None:
    model.optimizer.build(model.trainable_variables)
    after = _inner(model.optimizer)
    if [variable.shape for variable in before.variables] != [variable.shape for variable in after.variables]:
        _warnings.warn(f"The optimizer of {model.name!r} starts anew: that of the other model was built on others.")
        return
    for source, target in zip(before.variables, after.variables, strict=True):
        target.assign(source)
