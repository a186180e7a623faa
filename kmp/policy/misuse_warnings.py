"""Warnings about mistakes that Keras does not report; each message says how to fix the mistake."""

from collections.abc import Iterator

import keras
import tensorflow as tf

from kmp import guarding
from kmp.backend import compute_dtypes, keras_internals, output_layers
from kmp.optimizer import LossScaleOptimizer
from kmp.utils import FLOAT16, FLOAT32, user_messages

issued_messages: set[str] = (
    set()
)  # by message rather than by model: a model that is loaded again does not warn again


def warn_once(layer: keras.Layer, mistake: str) -> None:
    """Issues a warning once: `mistake` continues the sentence after the layer's class and name."""
    message = f"{type(layer).__name__} {layer.name!r} {mistake}"
    if message not in issued_messages:
        issued_messages.add(message)
        user_messages.warn(message)


_IN_FLOAT16 = (
    "computes in float16: {names}. float16 rounds probabilities near 0 and 1 to 0 and 1, where the"
    " gradient is zero. Write {remedies} instead. kmp.layers.Softmax() computes in float32 under"
    " every policy."
)
_SOFTMAX = (
    keras.activations.softmax,
    keras.activations.log_softmax,
    keras.ops.softmax,
    tf.nn.softmax,
)
_SIGMOID = (keras.activations.sigmoid, keras.ops.sigmoid, tf.sigmoid)


def warn_after_compile(model: keras.Model) -> None:
    """Warns if an output softmax, an output sigmoid before a cross-entropy, or a loss of the model is in float16."""
    losses = keras.tree.flatten(model.loss)
    loss_names = (
        str(getattr(loss, "__name__", None) or getattr(loss, "name", loss)).lower()
        for loss in losses
    )
    is_cross_entropy = any("crossentropy" in name or name == "bce" for name in loss_names)
    remedies = dict(_activations_in_float16(model, is_cross_entropy))
    for loss in losses:
        if isinstance(loss, keras.losses.Loss) and loss.dtype == FLOAT16.name:
            remedies[f"the loss {loss.name!r}"] = f"{type(loss).__name__}(..., dtype='float32')"
    if remedies:
        warn_once(
            model,
            _IN_FLOAT16.format(names=", ".join(remedies), remedies=", ".join(remedies.values())),
        )


def _activations_in_float16(
    layer: keras.Layer, is_cross_entropy: bool
) -> Iterator[tuple[str, str]]:
    """Yields the softmaxes and sigmoids that produce outputs of a model or layer, each with its replacement.

    Others may saturate, as in attention and in an LSTM. Without a graph, the last sublayer counts
    as the output.
    """
    for child in output_layers(layer):
        activation = getattr(child, "activation", None)
        is_softmax_layer = isinstance(child, keras.layers.Softmax)
        is_softmax = is_softmax_layer or activation in _SOFTMAX
        # The last sublayer may be a gate.
        is_sigmoid = activation in _SIGMOID and bool(
            keras_internals.graph_tensors(layer, "outputs")
        )
        if not (is_softmax or is_sigmoid):
            yield from _activations_in_float16(child, is_cross_entropy)
        elif child.compute_dtype == FLOAT16.name and (is_softmax or is_cross_entropy):
            replaces = is_softmax and (
                is_softmax_layer or isinstance(child, keras.layers.Activation)
            )
            remedy = (
                "kmp.layers.Softmax()"
                if replaces
                else f"{type(child).__name__}(..., dtype='float32')"
            )
            yield (
                f"the {'softmax' if is_softmax else 'sigmoid'} of output layer {child.name!r}",
                remedy,
            )


_NOT_FLOAT16 = (
    "trains under kmp.enable() but has no layer that computes in float16. Its layers were created"
    " before kmp.enable() or under another policy set with keras.config.set_dtype_policy, or they"
    " were loaded or created with dtype='float32'. The model trains in float32 without a loss"
    " scale. Call kmp.enable() before the first layer is created, or use kmp.convert(model)."
)
_UNSCALED = (
    "computes in float16 and trains without kmp's loss scale, with {optimizers}. Without any loss"
    " scale, gradients of magnitude 2^-25 or less underflow to zero. Call compile under"
    " kmp.enable(), without auto_scale_loss=False. In a train_step with its own optimizers, wrap"
    " each with kmp.wrap(optimizer), and call its scale_loss, then its apply."
)


def warn_before_training(model: keras.Model) -> None:
    """Warns if a built model trains without float16, or in float16 without kmp's loss scale.

    Its own optimizers, if any, must exist already.
    """
    dtypes, optimizers = compute_dtypes(model), guarding.all_optimizers_of(model)
    step = guarding.guarded_step_of(model)
    if dtypes == {FLOAT32.name} and not (step and step.has_fallback):
        warn_once(model, _NOT_FLOAT16)
    unscaled = [
        optimizer for optimizer in optimizers if not isinstance(optimizer, LossScaleOptimizer)
    ]
    if unscaled and len(unscaled) < len(
        optimizers
    ):  # beside one that scales, which a step of Keras uses alone
        has_own_step = not guarding.has_keras_step(model)
        unscaled = [
            optimizer for optimizer in unscaled if has_own_step and optimizer is not model.optimizer
        ]
    if FLOAT16.name in dtypes and unscaled:
        classes = [
            f"{type(each).__module__.partition('.')[0]}.{type(each).__name__}" for each in unscaled
        ]
        warn_once(model, _UNSCALED.format(optimizers=", ".join(classes)))
