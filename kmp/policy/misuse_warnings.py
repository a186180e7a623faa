"""Mistakes that Keras trains on with in silence: one error or warning each, that says what to do."""

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import keras
import tensorflow as tf

from kmp.backend import compute_dtypes, direct_sublayers, is_keras_class, sublayers
from kmp.optimizer import LossScaleOptimizer
from kmp.policy.model_optimizers import all_optimizers_of
from kmp.utils import FLOAT16, FLOAT32, user_messages

_MIRRORED = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
_SOFTMAXES = (keras.activations.softmax, keras.activations.log_softmax, keras.ops.softmax, tf.nn.softmax)
_told: WeakKeyDictionary[keras.Model, set[str]] = WeakKeyDictionary()


def refuse_what_replicas_cannot(model: keras.Model, arguments: dict[str, Any]) -> None:
    """Raises an error for arguments of `compile` that TensorFlow or Keras fail on in the first step under a strategy.

    Raises:
        ValueError: If there are several replicas, and `jit_compile` is true or `steps_per_execution` above 1; or if
            variables are mirrored, and the optimizer updates some in a branch of its own.
    """
    strategy = model.distribute_strategy
    if arguments["run_eagerly"]:
        return
    name, several = type(strategy).__name__, strategy.num_replicas_in_sync > 1
    if several and arguments["jit_compile"] is True:
        raise ValueError(
            f"TensorFlow cannot compile a step of several replicas with XLA ({name}). Leave out `jit_compile=True`."
        )
    if several and arguments["steps_per_execution"] > 1:
        raise ValueError(
            f"TensorFlow fails on `steps_per_execution` above 1 with several replicas ({name}). Leave it out. "
            f"Received: steps_per_execution={arguments['steps_per_execution']!r}"
        )
    optimizer = getattr(arguments["optimizer"], "inner_optimizer", arguments["optimizer"])
    for argument in ("gradient_accumulation_steps", "ema_overwrite_frequency"):
        value = getattr(optimizer, argument, None)
        if value and isinstance(strategy, _MIRRORED):
            raise ValueError(
                f"Keras' optimizers fail on `{argument}` under a mirrored strategy ({name}). Leave it out, or compile "
                f"with `run_eagerly=True`. Received: {argument}={value!r}"
            )


def warn_of_compiled(model: keras.Model) -> None:
    """Warns of softmax layers and losses that a model just compiled computes in float16."""
    in_float16 = [*_softmaxes_in_float16(model), *_losses_in_float16(model.loss)]
    if in_float16:
        _tell(model, "in float16", _IN_FLOAT16.format(names=", ".join(in_float16)))


def warn_of_training(model: keras.Model, was_compiled: bool) -> None:
    """Warns of a built model that trains without float16, or in float16 without kmp's loss scale.

    Args:
        model: The model; what optimizers it holds is known by the time it trains.
        was_compiled: Whether it was compiled under `enable`, and not before.
    """
    dtypes = compute_dtypes(model)
    if dtypes == {FLOAT32.name}:
        _tell(model, "not float16", _NOT_FLOAT16)
    if FLOAT16.name in dtypes:
        _warn_of_optimizers(model, was_compiled)


def when_built(model: keras.Model, check: Callable[[], None]) -> None:
    """Calls `check` now if the model is built, else after the first call of its train function, which builds it."""
    if all(layer.built for layer in sublayers(model)):
        check()
        return
    train_function, pending = model.train_function, [check]

    def run(iterator: Any) -> Any:
        logs = train_function(iterator)
        if pending:
            pending.pop()()
        return logs

    model.train_function = run


def _warn_of_optimizers(model: keras.Model, was_compiled: bool) -> None:
    optimizers = all_optimizers_of(model)
    unscaled = [optimizer for optimizer in optimizers if not isinstance(optimizer, LossScaleOptimizer)]
    own = [optimizer for optimizer in unscaled if optimizer is not model.optimizer]
    if not unscaled:
        return
    if own and type(model).train_step is not keras.Model.train_step:
        _tell(model, "own optimizers", _OWN_OPTIMIZERS.format(kinds=", ".join(type(one).__name__ for one in own)))
    elif len(unscaled) < len(optimizers):
        return
    elif isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        _tell(model, "stock scaler", _STOCK_SCALER)
    else:
        compiled = "with auto_scale_loss=False" if was_compiled else "before kmp.enable()"
        _tell(model, "unscaled", _UNSCALED.format(compiled=compiled))


def _tell(model: keras.Model, mistake: str, message: str) -> None:
    told = _told.setdefault(model, set())
    if mistake not in told:
        told.add(mistake)
        user_messages.warn(f"{type(model).__name__} {model.name!r} {message}")


def _softmaxes_in_float16(layer: keras.Layer) -> Iterable[str]:
    for child in direct_sublayers(layer):
        is_softmax = isinstance(child, keras.layers.Softmax) or getattr(child, "activation", None) in _SOFTMAXES
        if is_softmax and child.trainable and child.compute_dtype == FLOAT16.name:
            yield f"the softmax of layer {child.name!r}"
        is_made_by_keras = is_keras_class(type(child)) and not isinstance(child, keras.Model)
        if not is_made_by_keras:  # what attention and its like are made of is Keras' business
            yield from _softmaxes_in_float16(child)


def _losses_in_float16(losses: Any) -> Iterable[str]:
    for loss in keras.tree.flatten(losses):
        if isinstance(loss, keras.losses.Loss) and loss.dtype == FLOAT16.name:
            yield f"the loss {loss.name!r}"


_IN_FLOAT16 = (
    "computes in float16: {names}. float16 rounds to 11 bits, and exp(x) overflows in it above 11.09. Put "
    "kmp.layers.Softmax() in its place, or give layer or loss dtype='float32'."
)
_NOT_FLOAT16 = (
    "trains under kmp.enable() but has no layer that computes in float16: it was built before, or in another thread, "
    "or after keras.backend.clear_session(), which resets Keras' policy; or loaded or made with dtype='float32'. It "
    "trains in float32, without a loss scale. Call kmp.enable() there, before the first layer is made, or take "
    "kmp.convert(model)."
)
_UNSCALED = (
    "computes in float16 and was compiled {compiled}, so its loss is not scaled: gradients of 2^-25 and less become "
    "zero. Call compile under kmp.enable(), or pass it kmp.LossScaleOptimizer(optimizer)."
)
_STOCK_SCALER = (
    "is compiled with Keras' own LossScaleOptimizer, which kmp leaves alone: it can be neither seen nor configured. "
    "Call compile under kmp.enable(), with its inner optimizer."
)
_OWN_OPTIMIZERS = (
    "computes in float16 and trains with optimizers of its own that do not scale their loss: {kinds}. Wrap each with "
    "kmp.wrap(optimizer), and in train_step call its scale_loss, then apply."
)
