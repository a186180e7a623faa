"""What a converted model takes over from training: how it was compiled, and what its optimizer has learnt."""

from typing import Any

import keras

from kmp.backend import defining_class, is_keras_class, keras_internals
from kmp.optimizer import LossScaleOptimizer
from kmp.policy import wrap
from kmp.scaling import FixedScale
from kmp.utils import user_messages

_NO_SCALE = FixedScale(1.0)  # what a float32 model is recorded with, and float16 would underflow with


def transfer_compile_state(old: keras.Model, new: keras.Model, scaled: bool) -> None:
    """Compiles a model as another is, and gives its optimizer the state of the other's.

    Args:
        old: A model. Where it is not compiled, nothing happens.
        new: One of the same variables.
        scaled: Whether the optimizer of `new` has to scale the loss. One that need not scale it does not.
    """
    if not old.compiled:
        return
    try:
        settings = _settings_of(old)
        settings["optimizer"] = _optimizer(settings.get("optimizer"), scaled)
        new.compile(**settings, auto_scale_loss=False)
    except (TypeError, ValueError, NotImplementedError) as error:  # the last is Keras', of what has no `get_config`
        reason = user_messages.first_line(error)
        user_messages.warn(f"{type(new).__name__} {new.name!r} is not compiled, compile it as before: {reason}")
        return
    if new.optimizer is not None and old.optimizer.built:
        _hand_on(_inner(old.optimizer), new)


def _settings_of(model: keras.Model) -> dict[str, Any]:
    if not is_keras_class(defining_class(type(model), "compile")):
        raise ValueError("it has a `compile` of its own")
    live = keras_internals.compile_arguments(model)
    again = {name: keras.tree.map_structure(_anew, live[name]) for name in ("metrics", "weighted_metrics")}
    return live | again


def _anew(metric: Any) -> Any:
    """Returns a metric like one that has a state of its own; names and functions as they are."""
    return type(metric).from_config(metric.get_config()) if isinstance(metric, keras.Metric) else metric


def _optimizer(old: keras.optimizers.Optimizer | None, scaled: bool) -> keras.optimizers.Optimizer | None:
    if old is None:
        return None
    inner = _inner(old)
    config = inner.get_config()
    schedule = keras_internals.learning_rate_of(inner)
    if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        config["learning_rate"] = schedule
    made = type(inner).from_config(config)
    if not scaled:
        return made
    if not isinstance(old, LossScaleOptimizer):
        return wrap(made)
    if old.rule == _NO_SCALE:
        wrapped = wrap(made, jit_compile=old.jit_compile or None)
        wrapped.name = old.name
        return wrapped
    return LossScaleOptimizer(
        made, **{name: value for name, value in old.get_config().items() if name != "inner_optimizer"}
    )


def _inner(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _hand_on(before: keras.optimizers.Optimizer, model: keras.Model) -> None:
    model.optimizer.build(model.trainable_variables)
    after = _inner(model.optimizer)
    sources, targets = keras_internals.optimizer_state(before), keras_internals.optimizer_state(after)
    if [variable.shape for variable in sources] != [variable.shape for variable in targets]:
        user_messages.warn(f"The optimizer of {model.name!r} starts anew: that of the other model was built on others.")
        return
    for source, target in zip(sources, targets, strict=True):
        target.assign(source)
