"""Whether Keras compiles a model with XLA."""

import keras
import tensorflow as tf

from kmp.backend.keras_internals import sublayers
from kmp.backend.private_names import attribute
from kmp.backend.tensorflow_internals import is_deterministic


def jit_compilation(model: keras.Model) -> str:
    """Returns a sentence: whether Keras compiles a model with XLA, and why not if not."""
    obstacle = jit_obstacle(model)
    if obstacle:
        return f'jit_compile="auto" does not compile this model with XLA: {obstacle}.'
    if model.compiled and model.run_eagerly:
        return "The model is compiled with run_eagerly=True: XLA does not compile it."
    if model.compiled and model.jit_compile:
        return "The model is compiled with jit_compile=True: XLA compiles it."
    if model.compiled:
        # Without a GPU, "auto" becomes False too, and Keras does not keep which of them was passed.
        has_gpu = bool(tf.config.list_physical_devices("GPU"))
        return (
            "The model is compiled with jit_compile=False: XLA does not compile it."
            if has_gpu
            else ""
        )
    return 'On a GPU, jit_compile="auto", the default of `compile`, compiles this model with XLA.'


def jit_obstacle(model: keras.Model) -> str:
    """Returns why `jit_compile="auto"` does not compile a model on a GPU; empty if it does.

    As `keras.Model._resolve_auto_jit_compile` in Keras 3.15, which returns only whether, and
    `False` without a GPU.
    """
    classes = {type(layer).__name__ for layer in sublayers(model) if not _supports_jit(layer)}
    if classes:
        verb = "does" if len(classes) == 1 else "do"
        return f"{', '.join(sorted(classes))} {verb} not support it"
    # The public `distribute_strategy` is the current strategy if the model was built without one.
    if attribute(model, "keras:Model._distribute_strategy") is not None:
        return "it was built under a tf.distribute strategy"
    if is_deterministic():
        return "operations are deterministic (tf.config.experimental.enable_op_determinism)"
    return ""


def _supports_jit(layer: keras.Layer) -> bool:
    """Whether a layer supports XLA on a GPU.

    Without a GPU, Keras does not know that the layer uses cuDNN.
    """
    is_recurrent = isinstance(layer, keras.layers.LSTM | keras.layers.GRU)
    return layer.supports_jit and not (is_recurrent and layer.use_cudnn is not False)
