"""Errors and warnings for mistakes that Keras does not report; each message says how to fix the mistake."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from kmp.backend import (
    compute_dtypes,
    direct_sublayers,
    is_keras_class,
    keras_internals,
    output_layers,
    sublayers,
)
from kmp.optimizer import LossScaleOptimizer
from kmp.policy.optimizers import all_optimizers_of
from kmp.utils import FLOAT16, FLOAT32, user_messages

_MIRRORED = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
_SOFTMAXES = (keras.activations.softmax, keras.activations.log_softmax, keras.ops.softmax, tf.nn.softmax)
_SIGMOIDS = (keras.activations.sigmoid, keras.ops.sigmoid, tf.sigmoid)
_issued_messages: set[str] = set()  # by message rather than by model: a model that is loaded again does not warn again


def check_distribution(
    strategy: tf.distribute.Strategy, optimizer: Any, steps_per_execution: int, jit_compile: str | bool
) -> None:
    """Checks arguments of `compile`, for a model that does not run eagerly, against its distribution strategy.

    Raises:
        ValueError: For arguments with which the first step would fail: with several replicas, `jit_compile=True` or
            `steps_per_execution` above 1; with mirrored variables, an optimizer with `gradient_accumulation_steps` or
            `ema_overwrite_frequency`, which updates variables in a branch.
    """
    name, has_several_replicas = type(strategy).__name__, strategy.num_replicas_in_sync > 1
    if has_several_replicas and jit_compile is True:
        raise ValueError(
            f"TensorFlow cannot compile a step of several replicas with XLA ({name}). Leave out `jit_compile=True`."
        )
    if has_several_replicas and steps_per_execution > 1:
        raise ValueError(
            f"TensorFlow fails on `steps_per_execution` above 1 with several replicas ({name}). Leave it out. "
            f"Received: steps_per_execution={steps_per_execution!r}"
        )
    for argument in ("gradient_accumulation_steps", "ema_overwrite_frequency"):
        value = getattr(optimizer, argument, None)
        if value and isinstance(strategy, _MIRRORED):
            raise ValueError(
                f"Keras' optimizers fail on `{argument}` under a mirrored strategy ({name}). Leave it out, or compile "
                f"with `run_eagerly=True`. Received: {argument}={value!r}"
            )


def warn_after_compile(model: keras.Model) -> None:
    """Warns if a softmax, a sigmoid before a cross-entropy or a loss of the compiled model computes in float16."""
    sigmoids = _sigmoid_outputs_in_float16(model) if _has_crossentropy(model.loss) else ()
    found = dict([*_softmaxes_in_float16(model), *sigmoids, *_losses_in_float16(model.loss)])
    if found:
        warn_once(model, _IN_FLOAT16.format(names=", ".join(found), remedies=", ".join(found.values())))


def warn_before_training(model: keras.Model, was_compiled: bool) -> None:
    """Warns if a built model trains without float16, or in float16 without kmp's loss scale.

    Args:
        model: The model. Its own optimizers, if any, must exist already.
        was_compiled: Whether the model was compiled under `enable`.
    """
    dtypes = compute_dtypes(model)
    if dtypes == {FLOAT32.name}:
        warn_once(model, _NOT_FLOAT16)
    if FLOAT16.name in dtypes:
        _warn_if_unscaled(model, was_compiled)


def call_when_built(model: keras.Model, check: Callable[[], None]) -> None:
    """Calls `check` now if the model is built, else after the first call of its train function, which builds it."""
    if all(layer.built for layer in sublayers(model)):
        check()
        return
    train_function, pending_checks = model.train_function, [check]

    def run(iterator: Any) -> Any:
        logs = train_function(iterator)
        if pending_checks:
            pending_checks.pop()()
        return logs

    model.train_function = run


def _warn_if_unscaled(model: keras.Model, was_compiled: bool) -> None:
    optimizers = all_optimizers_of(model)
    unscaled = [optimizer for optimizer in optimizers if not isinstance(optimizer, LossScaleOptimizer)]
    own_unscaled = [optimizer for optimizer in unscaled if optimizer is not model.optimizer]
    if not unscaled:
        return
    if own_unscaled and type(model).train_step is not keras.Model.train_step:
        class_names = ", ".join(type(optimizer).__name__ for optimizer in own_unscaled)
        warn_once(model, _OWN_OPTIMIZERS.format(class_names=class_names))
    elif len(unscaled) < len(optimizers):
        return
    elif isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        warn_once(model, _STOCK_SCALER)
    else:
        compiled = "with auto_scale_loss=False" if was_compiled else "before kmp.enable()"
        warn_once(model, _UNSCALED.format(compiled=compiled))


def warn_once(layer: keras.Layer, mistake: str) -> None:
    """Issues a warning about a layer or model, unless it was issued before.

    Args:
        layer: The layer.
        mistake: The rest of the sentence that starts with the layer's class and name.
    """
    message = f"{type(layer).__name__} {layer.name!r} {mistake}"
    if message not in _issued_messages:
        _issued_messages.add(message)
        user_messages.warn(message)


def forget_issued_messages() -> None:
    """Makes every warning be issued again."""
    _issued_messages.clear()


def _softmaxes_in_float16(layer: keras.Layer) -> Iterable[tuple[str, str]]:
    """Yields the softmaxes that the user can change, each with the code to replace it."""
    if not _user_created_sublayers(layer):
        return
    for child in direct_sublayers(layer):
        is_layer = isinstance(child, keras.layers.Softmax | keras.layers.Activation)
        is_softmax = isinstance(child, keras.layers.Softmax) or getattr(child, "activation", None) in _SOFTMAXES
        if is_softmax and child.trainable and child.compute_dtype == FLOAT16.name:
            remedy = "kmp.layers.Softmax()" if is_layer else f"{type(child).__name__}(..., dtype='float32')"
            yield f"the softmax of layer {child.name!r}", remedy
        yield from _softmaxes_in_float16(child)


def _sigmoid_outputs_in_float16(model: keras.Model) -> Iterable[tuple[str, str]]:
    """Yields the sigmoids that produce outputs, each with the code to replace it. Others may saturate, as in an LSTM.

    Keras does not know the output layers of a subclassed model.
    """
    for layer in output_layers(model) if keras_internals.graph_tensors(model, "outputs") else ():
        if isinstance(layer, keras.Model):
            yield from _sigmoid_outputs_in_float16(layer)
        elif getattr(layer, "activation", None) in _SIGMOIDS and layer.compute_dtype == FLOAT16.name:
            yield f"the sigmoid of output layer {layer.name!r}", f"{type(layer).__name__}(..., dtype='float32')"


def _has_crossentropy(losses: Any) -> bool:
    names = (getattr(loss, "__name__", None) or getattr(loss, "name", loss) for loss in keras.tree.flatten(losses))
    return any("crossentropy" in str(name).lower() or str(name).lower() == "bce" for name in names)


def _user_created_sublayers(layer: keras.Layer) -> bool:
    """Whether user code created the sublayers of a layer, and can change them.

    True for functional and Sequential models, and for classes outside installed packages that derive from `keras.Layer`
    or `keras.Model` directly. Other base classes create sublayers themselves, such as the softmax inside attention.
    """
    installed = next(cls for cls in type(layer).__mro__ if issubclass(cls, keras.Layer) and _is_installed(cls))
    return installed is keras.Layer or (is_keras_class(installed) and issubclass(installed, keras.Model))


def _is_installed(cls: type) -> bool:
    file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
    return is_keras_class(cls) or bool({"site-packages", "dist-packages"} & set(Path(file).parts))


def _losses_in_float16(losses: Any) -> Iterable[tuple[str, str]]:
    for loss in keras.tree.flatten(losses):
        if isinstance(loss, keras.losses.Loss) and loss.dtype == FLOAT16.name:
            yield f"the loss {loss.name!r}", f"{type(loss).__name__}(..., dtype='float32')"


_IN_FLOAT16 = (
    "computes in float16: {names}. float16 rounds probabilities near 0 and 1 to 0 and 1, where the gradient is zero. "
    "Write {remedies} instead. kmp.layers.Softmax() computes in float32 under every policy."
)
_NOT_FLOAT16 = (
    "trains under kmp.enable() but has no layer that computes in float16. Its layers were created before kmp.enable() "
    "or under another policy set with keras.config.set_dtype_policy, or they were loaded or created with "
    "dtype='float32'. The model trains in float32 without a loss scale. Call kmp.enable() before the first layer is "
    "created, or use kmp.convert(model)."
)
_UNSCALED = (
    "computes in float16 and was compiled {compiled}, so its loss is not scaled: gradients of magnitude 2^-25 or less "
    "underflow to zero. Call compile under kmp.enable(), or pass it kmp.LossScaleOptimizer(optimizer)."
)
_STOCK_SCALER = (
    "is compiled with Keras' own LossScaleOptimizer, which kmp does not replace and cannot monitor or configure. Call "
    "compile under kmp.enable() with its inner optimizer."
)
_OWN_OPTIMIZERS = (
    "computes in float16 and trains with its own optimizers, which do not scale their loss: {class_names}. Wrap each "
    "with kmp.wrap(optimizer), and in train_step call its scale_loss, then its apply."
)
