"""Transfers the compile arguments and the optimizer state of a model to its converted copy."""

from typing import Any

import keras

from kmp.backend import defining_class, is_keras_class, keras_internals
from kmp.optimizer import LossScaleOptimizer
from kmp.policy import rewrap, wrap
from kmp.scaling import FixedScale
from kmp.utils import user_messages

_UNIT_SCALE = FixedScale(1.0)  # records a float32 model's gradients; float16 gradients would underflow with it


def transfer_compile_state(original: keras.Model, converted: keras.Model, scale_loss: bool) -> None:
    """Compiles a converted model like the original, and copies the optimizer state.

    Warns if the model cannot be compiled or the optimizer state does not fit.

    Args:
        original: The model to copy from. Nothing happens if it is not compiled.
        converted: A model with the same variables.
        scale_loss: Whether the optimizer of `converted` needs loss scaling. If not, a loss scale is removed.
    """
    if not original.compiled:
        return
    try:
        arguments = _compile_arguments(original)
        arguments["optimizer"] = _clone_optimizer(arguments.get("optimizer"), scale_loss)
        converted.compile(**arguments, auto_scale_loss=False)
    except (TypeError, ValueError, NotImplementedError) as error:  # Keras raises the last without a `get_config`
        reason = user_messages.first_line(error)
        user_messages.warn(
            f"{type(converted).__name__} {converted.name!r} is not compiled. Call its `compile` yourself: {reason}"
        )
        return
    if converted.optimizer is not None and original.optimizer.built:
        _copy_optimizer_state(_unwrapped(original.optimizer), converted)


def _compile_arguments(model: keras.Model) -> dict[str, Any]:
    if not is_keras_class(defining_class(type(model), "compile")):
        raise ValueError("its class overrides `compile`")
    arguments = keras_internals.compile_arguments(model)
    metrics = {
        name: keras.tree.map_structure(_clone_metric, arguments[name]) for name in ("metrics", "weighted_metrics")
    }
    return arguments | metrics


def _clone_metric(metric: Any) -> Any:
    """Returns a copy of a metric with its own state. Names and functions are returned unchanged."""
    return type(metric).from_config(metric.get_config()) if isinstance(metric, keras.Metric) else metric


def _clone_optimizer(
    original: keras.optimizers.Optimizer | None, scale_loss: bool
) -> keras.optimizers.Optimizer | None:
    if original is None:
        return None
    inner = _unwrapped(original)
    config = inner.get_config()
    schedule = keras_internals.learning_rate_of(inner)
    if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        config["learning_rate"] = schedule
    clone = type(inner).from_config(config)
    if not scale_loss:
        return clone
    if not isinstance(original, LossScaleOptimizer):
        return wrap(clone)
    if original.rule == _UNIT_SCALE:
        wrapped = wrap(clone, jit_compile=original.jit_compile or None)
        wrapped.name = original.name
        return wrapped
    return rewrap(clone, original)


def _unwrapped(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _copy_optimizer_state(original: keras.optimizers.Optimizer, model: keras.Model) -> None:
    model.optimizer.build(model.trainable_variables)
    clone = _unwrapped(model.optimizer)
    sources, targets = keras_internals.optimizer_state(original), keras_internals.optimizer_state(clone)
    if [variable.shape for variable in sources] != [variable.shape for variable in targets]:
        user_messages.warn(
            f"The optimizer of {model.name!r} starts with fresh state: the original optimizer was built on different "
            "variables."
        )
        return
    for source, target in zip(sources, targets, strict=True):
        target.assign(source)
