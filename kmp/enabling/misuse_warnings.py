"""Warnings about mistakes that Keras does not report; each message says how to fix the mistake."""

from collections.abc import Iterator

import keras

from kmp.backend import keras_internals
from kmp.backend.keras_functions import function_of_activation
from kmp.backend.keras_internals import compute_dtypes, output_layers
from kmp.enabling.active_settings import current_settings
from kmp.guarding.guarded_step import guarded_step_of, has_keras_step
from kmp.guarding.model_optimizers import all_optimizers_of
from kmp.numerics import keras_function
from kmp.optimizer import LossScaleOptimizer
from kmp.utils import user_messages
from kmp.utils.float_formats import FLOAT16, FLOAT32

# By message rather than by model: a model that is loaded again does not warn again.
issued_messages: set[str] = set()


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


def warn_after_compile(model: keras.Model) -> None:
    """Warns of an output softmax, a sigmoid before a cross-entropy, or a loss, in float16."""
    losses = keras.tree.flatten(model.loss)
    named = [getattr(loss, "__name__", None) or getattr(loss, "name", loss) for loss in losses]
    names = [str(name).lower() for name in named]
    is_cross_entropy = any("crossentropy" in name or name == "bce" for name in names)
    remedies = dict(_activations_in_float16(model, is_cross_entropy))
    for loss in losses:
        if isinstance(loss, keras.losses.Loss) and loss.dtype == FLOAT16.name:
            remedies[f"the loss {loss.name!r}"] = f"{type(loss).__name__}(..., dtype='float32')"
    if remedies:
        activations, texts = ", ".join(remedies), ", ".join(remedies.values())
        warn_once(model, _IN_FLOAT16.format(names=activations, remedies=texts))


def _activations_in_float16(
    layer: keras.Layer, is_cross_entropy: bool
) -> Iterator[tuple[str, str]]:
    """Yields the softmaxes and sigmoids that produce outputs, each with its replacement.

    Others may saturate, as in attention and in an LSTM. Without a graph, the last sublayer counts
    as the output, but its sigmoid may be that of a gate.
    """
    has_graph = bool(keras_internals.graph_tensors(layer, "outputs"))
    for child in output_layers(layer):
        activation = getattr(child, "activation", child)
        function = function_of_activation(activation)
        is_softmax = function is not None and bool(function.in_float32)
        is_sigmoid = function is keras_function("sigmoid") and has_graph
        if function is None or not (is_softmax or is_sigmoid):
            yield from _activations_in_float16(child, is_cross_entropy)
            continue
        is_harmful = is_softmax or is_cross_entropy
        dtype = getattr(activation, "compute_dtype", child.compute_dtype)
        if not is_harmful or dtype != FLOAT16.name:
            continue
        remedy = f"{type(child).__name__}(..., dtype='float32')"
        is_only_activation = isinstance(child, keras.layers.Softmax | keras.layers.Activation)
        if is_softmax and is_only_activation:
            remedy = "kmp.layers.Softmax()"
        yield f"the {function.name} of output layer {child.name!r}", remedy


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
_BUILT_AFTER_COMPILE = (
    "computes in float16 and trains without a loss scale, because none of its layers existed in"
    " `compile`: gradients of magnitude 2^-25 or less underflow to zero. Create the layers in"
    " `__init__`, or call `compile` once more after the first call of the model."
)


def warn_before_training(model: keras.Model) -> None:
    """Warns if a built model trains without float16, or in float16 without kmp's loss scale.

    Its own optimizers, if any, must exist already.
    """
    dtypes, optimizers = compute_dtypes(model), all_optimizers_of(model)
    step = guarded_step_of(model)
    if dtypes == {FLOAT32.name} and not (step and step.has_repaired_layers):
        warn_once(model, _NOT_FLOAT16)
    if FLOAT16.name not in dtypes:
        return
    if any(map(_scales_by_one_unasked, optimizers)):
        warn_once(model, _BUILT_AFTER_COMPILE)
    unscaled = _unscaled(model, optimizers)
    if unscaled:
        modules = [type(each).__module__.partition(".")[0] for each in unscaled]
        classes = [type(each).__name__ for each in unscaled]
        names = map(".".join, zip(modules, classes, strict=True))
        warn_once(model, _UNSCALED.format(optimizers=", ".join(names)))


def _scales_by_one_unasked(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether `compile` has seen no layer in float16, and no settings ask for a scale of 1."""
    if not isinstance(optimizer, LossScaleOptimizer) or optimizer.rule.scales_loss:
        return False
    settings = current_settings()
    is_asked = settings is not None and settings.settings.get("loss_scale") == 1
    return optimizer.follows_model and not is_asked


def _unscaled(
    model: keras.Model, optimizers: list[keras.optimizers.Optimizer]
) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers of a model that train without kmp's loss scale."""
    unscaled = [each for each in optimizers if not isinstance(each, LossScaleOptimizer)]
    if len(unscaled) == len(optimizers):
        return unscaled
    # Another optimizer scales the loss. A step of Keras uses only that of the model.
    if has_keras_step(model):
        return []
    return [each for each in unscaled if each is not model.optimizer]
