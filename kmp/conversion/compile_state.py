"""Transfers the compile arguments and the optimizer state of a model to its converted copy."""

from typing import Any

import keras

from kmp.backend import keras_internals
from kmp.backend.keras_internals import defining_class, is_keras_class
from kmp.enabling import wrap
from kmp.enabling.optimizers import rewrap
from kmp.optimizer import LossScaleOptimizer
from kmp.scaling import FixedScale
from kmp.utils import user_messages

# The scale that records a float32 model's gradients. With it, float16 gradients would underflow.
_UNIT_SCALE = FixedScale(1.0)


def transfer_compile_state(original: keras.Model, converted: keras.Model, scale_loss: bool) -> None:
    """Compiles a converted model like the original, if that is compiled.

    Copies the state of its optimizer. Warns if the model cannot be compiled or the state does not
    fit. If `scale_loss` is false, a loss scale is removed.
    """
    if not original.compiled:
        return
    with original.distribute_strategy.scope():
        try:
            _compile(original, converted, scale_loss)
        # Keras raises the last of these without a `get_config`.
        except (TypeError, ValueError, NotImplementedError) as error:
            reason = user_messages.one_line(error)
            user_messages.warn(
                f"{type(converted).__name__} {converted.name!r} is not compiled. Call its `compile`"
                f" yourself: {reason}"
            )
            return
        if converted.optimizer is not None and original.optimizer.built:
            _copy_optimizer_state(original, converted)


def _compile(original: keras.Model, converted: keras.Model, scale_loss: bool) -> None:
    if not is_keras_class(defining_class(type(original), "compile")):
        raise ValueError("its class overrides `compile`")
    arguments = dict(keras_internals.compile_arguments(original))

    def metric_of_clone(metric: Any) -> Any:  # a metric, whose state is of one model, or its name
        is_object = isinstance(metric, keras.Metric)
        return type(metric).from_config(metric.get_config()) if is_object else metric

    for name in ("metrics", "weighted_metrics"):
        arguments[name] = keras.tree.map_structure(metric_of_clone, arguments[name])
    if arguments["optimizer"] is not None:
        arguments["optimizer"] = _clone_optimizer(arguments["optimizer"], scale_loss)
    converted.compile(**arguments, auto_scale_loss=False)


def _clone_optimizer(
    original: keras.optimizers.Optimizer, scale_loss: bool
) -> keras.optimizers.Optimizer:
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
        is_chosen = original.jit_compile != "auto"
        wrapped = wrap(clone, jit_compile=original.jit_compile if is_chosen else None)
        wrapped.name = original.name
        return wrapped
    return rewrap(clone, original)


def _copy_optimizer_state(original: keras.Model, converted: keras.Model) -> None:
    converted.optimizer.build(converted.trainable_variables)
    sources = keras_internals.optimizer_state(_unwrapped(original.optimizer))
    targets = keras_internals.optimizer_state(_unwrapped(converted.optimizer))
    if [variable.shape for variable in sources] != [variable.shape for variable in targets]:
        user_messages.warn(
            f"The optimizer of {converted.name!r} starts with fresh state: the original optimizer"
            " was built on different variables."
        )
        return
    for source, target in zip(sources, targets, strict=True):
        target.assign(source)


def _unwrapped(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    return getattr(optimizer, "inner_optimizer", optimizer)
