"""Errors and warnings for mistakes that Keras does not report; each message says how to fix the mistake."""

import re
import sys
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kmp.backend import compute_dtypes, direct_sublayers, is_keras_class, keras_internals, output_layers
from kmp.optimizer import LossScaleOptimizer
from kmp.policy import guarding
from kmp.policy.optimizers import all_optimizers_of
from kmp.utils import FLOAT16, FLOAT32, user_messages

_MIRRORED = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
_issued_messages: set[str] = set()  # by message rather than by model: a model that is loaded again does not warn again


def warn_once(layer: keras.Layer, mistake: str) -> None:
    """Issues a warning once: `mistake` continues the sentence after the layer's class and name."""
    message = f"{type(layer).__name__} {layer.name!r} {mistake}"
    if message not in _issued_messages:
        _issued_messages.add(message)
        user_messages.warn(message)


def forget_issued_messages() -> None:
    """Makes every warning be issued again."""
    _issued_messages.clear()


def check_distribution(
    strategy: tf.distribute.Strategy, optimizer: Any, steps_per_execution: int, jit_compile: str | bool
) -> None:
    """Raises an error for arguments of `compile` with which the first step in a graph would fail under a strategy."""
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
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    for argument in ("gradient_accumulation_steps", "ema_overwrite_frequency"):
        value = getattr(optimizer, argument, None)
        if value and isinstance(strategy, _MIRRORED):  # such an optimizer updates variables in a branch
            raise ValueError(
                f"Keras' optimizers fail on `{argument}` under a mirrored strategy ({name}). Leave it out, or compile "
                f"with `run_eagerly=True`. Received: {argument}={value!r}"
            )


_IN_FLOAT16 = (
    "computes in float16: {names}. float16 rounds probabilities near 0 and 1 to 0 and 1, where the gradient is zero. "
    "Write {remedies} instead. kmp.layers.Softmax() computes in float32 under every policy."
)


def warn_after_compile(model: keras.Model) -> None:
    """Warns if a softmax, a sigmoid before a cross-entropy or a loss of the compiled model computes in float16."""
    remedies, losses = dict(_softmaxes_in_float16(model)), keras.tree.flatten(model.loss)
    loss_names = (str(getattr(loss, "__name__", None) or getattr(loss, "name", loss)).lower() for loss in losses)
    if any("crossentropy" in name or name == "bce" for name in loss_names):
        remedies |= dict(_sigmoid_outputs_in_float16(model))
    for loss in losses:
        if isinstance(loss, keras.losses.Loss) and loss.dtype == FLOAT16.name:
            remedies[f"the loss {loss.name!r}"] = f"{type(loss).__name__}(..., dtype='float32')"
    if remedies:
        warn_once(model, _IN_FLOAT16.format(names=", ".join(remedies), remedies=", ".join(remedies.values())))


def _softmaxes_in_float16(layer: keras.Layer) -> Iterator[tuple[str, str]]:
    """Yields the softmaxes that the user can change, each with the code to replace it.

    The sublayers are the user's unless the layer's class, or a base class, is of an installed package, as attention is.
    """
    for cls in type(layer).__mro__:
        file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
        is_installed = is_keras_class(cls) or re.search(r"[\\/](site|dist)-packages[\\/]", file)
        if is_installed and issubclass(cls, keras.Layer):
            if cls is keras.Layer or (is_keras_class(cls) and issubclass(cls, keras.Model)):
                break
            return
    softmaxes = (keras.activations.softmax, keras.activations.log_softmax, keras.ops.softmax, tf.nn.softmax)
    for child in direct_sublayers(layer):
        is_softmax = isinstance(child, keras.layers.Softmax) or getattr(child, "activation", None) in softmaxes
        if is_softmax and child.trainable and child.compute_dtype == FLOAT16.name:
            is_only_softmax = isinstance(child, keras.layers.Softmax | keras.layers.Activation)
            remedy = "kmp.layers.Softmax()" if is_only_softmax else f"{type(child).__name__}(..., dtype='float32')"
            yield f"the softmax of layer {child.name!r}", remedy
        yield from _softmaxes_in_float16(child)


def _sigmoid_outputs_in_float16(model: keras.Model) -> Iterator[tuple[str, str]]:
    """Yields the sigmoids that produce outputs, each with its replacement. Others may saturate, as in an LSTM."""
    sigmoids = (keras.activations.sigmoid, keras.ops.sigmoid, tf.sigmoid)
    # Keras does not know the output layers of a subclassed model.
    for layer in output_layers(model) if keras_internals.graph_tensors(model, "outputs") else ():
        if isinstance(layer, keras.Model):
            yield from _sigmoid_outputs_in_float16(layer)
        elif getattr(layer, "activation", None) in sigmoids and layer.compute_dtype == FLOAT16.name:
            yield f"the sigmoid of output layer {layer.name!r}", f"{type(layer).__name__}(..., dtype='float32')"


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


def warn_before_training(model: keras.Model, was_compiled: bool) -> None:
    """Warns if a built model trains without float16, or in float16 without kmp's loss scale.

    Its own optimizers, if any, must exist already. `was_compiled`: under `enable`.
    """
    dtypes, optimizers = compute_dtypes(model), all_optimizers_of(model)
    guard = guarding.guard_of(model)
    if dtypes == {FLOAT32.name} and not (guard and guard.has_fallback):
        warn_once(model, _NOT_FLOAT16)
    unscaled = [optimizer for optimizer in optimizers if not isinstance(optimizer, LossScaleOptimizer)]
    if FLOAT16.name not in dtypes or not unscaled:
        return
    own = [type(optimizer).__name__ for optimizer in unscaled if optimizer is not model.optimizer]
    if own and type(model).train_step is not keras.Model.train_step:
        warn_once(model, _OWN_OPTIMIZERS.format(class_names=", ".join(own)))
    elif len(unscaled) < len(optimizers):
        return
    elif isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        warn_once(model, _STOCK_SCALER)
    else:
        compiled = "with auto_scale_loss=False" if was_compiled else "before kmp.enable()"
        warn_once(model, _UNSCALED.format(compiled=compiled))
