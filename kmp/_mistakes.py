"""Mistakes that Keras trains on with in silence: one error or warning each, that says what to do."""

import warnings
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import keras
import tensorflow as tf

from kmp._formats import FLOAT16
from kmp._guard import optimizers_of
from kmp._state import sublayers

_MIRRORED = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
_warned: WeakSet[keras.Model] = WeakSet()


def computes_in_float16(model: keras.Model) -> bool:
    """Whether any layer of `model`, itself included, computes in float16."""
    return any(layer.compute_dtype == FLOAT16.name for layer in sublayers(model))


def refuse_what_replicas_cannot(model: keras.Model, arguments: dict[str, Any]) -> None:
    """Raises an error for arguments of `compile` that TensorFlow or Keras fail on in the first step under a strategy.

    Raises:
        ValueError: If there are several replicas, and `jit_compile` is true or `steps_per_execution` above 1; or if
            variables are mirrored, and the optimizer updates some in a branch of its own.
    """
    strategy = model.distribute_strategy
    if arguments["run_eagerly"]:
        return
    name = f"{type(strategy).__name__} with {strategy.num_replicas_in_sync} replicas"
    if strategy.num_replicas_in_sync > 1 and arguments["jit_compile"] is True:
        raise ValueError(f"TensorFlow cannot compile a step with XLA under {name}. Leave out `jit_compile=True`.")
    if strategy.num_replicas_in_sync > 1 and arguments["steps_per_execution"] > 1:
        raise ValueError(
            f"TensorFlow fails on `steps_per_execution` above 1 under {name}. Leave it out. Received: "
            f"steps_per_execution={arguments['steps_per_execution']!r}"
        )
    optimizer = getattr(arguments["optimizer"], "inner_optimizer", arguments["optimizer"])
    for argument in ("gradient_accumulation_steps", "ema_overwrite_frequency"):
        value = getattr(optimizer, argument, None)
        if value and isinstance(strategy, _MIRRORED):
            raise ValueError(
                f"Keras' optimizers fail on `{argument}` under {name}. Leave it out, or compile with "
                f"`run_eagerly=True`. Received: {argument}={value!r}"
            )


def warn_of_compiled(model: keras.Model) -> None:
    """Warns of what a model just compiled would do in float16, or fail to do in it."""
    message = _not_float16(model) or _unscaled(model, "with auto_scale_loss=False")
    if message:
        _warn(model, message, stacklevel=4)
    in_float16 = [*_softmaxes_in_float16(model), *_losses_in_float16(model.loss)]
    if in_float16:
        warnings.warn(_IN_FLOAT16.format(names=", ".join(in_float16)), stacklevel=3)


def warn_of_training(model: keras.Model) -> None:
    """Warns of a model about to train that was compiled before `enable`; one that was compiled since has been seen."""
    message = _unscaled(model, "before kmp.enable()") or _not_float16(model)
    if message and model not in _warned:
        _warn(model, message, stacklevel=6)  # Keras has two frames of its own between here and `fit`


def _warn(model: keras.Model, message: str, stacklevel: int) -> None:
    _warned.add(model)
    warnings.warn(f"{type(model).__name__} {model.name!r} {message}", stacklevel=stacklevel)


def _not_float16(model: keras.Model) -> str | None:
    if not model.weights or computes_in_float16(model):
        return None
    return (
        "has no layer that computes in float16: it was built before kmp.enable(), or with dtype='float32'. It trains "
        "without float16 and without a loss scale. Call kmp.enable() before the first layer is made."
    )


def _unscaled(model: keras.Model, compiled: str) -> str | None:
    if model.optimizer is None or not computes_in_float16(model) or optimizers_of(model):
        return None
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        return (
            "is compiled with Keras' own LossScaleOptimizer, which kmp leaves alone: it can be neither seen nor "
            "configured. Call compile under kmp.enable(), with its inner optimizer."
        )
    return (
        f"computes in float16 and was compiled {compiled}, so its loss is not scaled: gradients of 2^-25 and less "
        "become zero. Call compile under kmp.enable(), or pass it kmp.LossScaleOptimizer(optimizer)."
    )


def _softmaxes_in_float16(model: keras.Model) -> Iterable[str]:
    for layer in _layers_of_models(model):
        is_softmax = isinstance(layer, keras.layers.Softmax)
        is_softmax = is_softmax or getattr(layer, "activation", None) is keras.activations.softmax
        if is_softmax and layer.compute_dtype == FLOAT16.name:
            yield f"the softmax of layer {layer.name!r}"


def _layers_of_models(model: keras.Model) -> Iterable[keras.Layer]:
    """Yields the layers that the user put into the model, and not those that a layer such as attention is made of."""
    for layer in model.layers:
        yield from _layers_of_models(layer) if isinstance(layer, keras.Model) else [layer]


def _losses_in_float16(losses: Any) -> Iterable[str]:
    for loss in keras.tree.flatten(losses):
        if isinstance(loss, keras.losses.Loss) and loss.dtype == FLOAT16.name:
            yield f"the loss {loss.name!r}"


_IN_FLOAT16 = (
    "Computed in float16: {names}. float16 rounds to 11 bits and has no exp beyond 11.1. End the model with "
    "kmp.layers.Softmax(), or give layer or loss dtype='float32'."
)
