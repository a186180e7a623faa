"""What XLA compiles of the training step of a model, and why not all of it."""

from weakref import WeakKeyDictionary

import keras
import tensorflow as tf

from kmp.backend import distribution, xla
from kmp.backend.keras_internals import compile_arguments, sublayers
from kmp.backend.private_names import attribute
from kmp.backend.tensorflow_internals import is_deterministic

# The argument `jit_compile` of `compile`. Keras keeps what it makes of "auto".
_requested: WeakKeyDictionary[keras.Model, bool | str] = WeakKeyDictionary()


def note_requested(model: keras.Model, jit_compile: bool | str) -> None:
    """Keeps the argument `jit_compile` of `compile`, also in files of the model.

    Keras saves what it makes of `"auto"`: `False` on a machine without a GPU.
    """
    _requested[model] = jit_compile
    compile_arguments(model)["jit_compile"] = jit_compile


def passed_to_keras(model: keras.Model, jit_compile: bool | str) -> bool | str:
    """Returns the argument `jit_compile` for the `compile` of Keras.

    Under a strategy Keras would compile the update with the rest in one function, which XLA cannot
    with several replicas, and not in each case with one.
    """
    return False if jit_compile is True and _has_replicas(model) else jit_compile


def request(model: keras.Model, jit_compile: bool) -> None:
    """Changes what a compiled model was compiled with, for its next train function."""
    _requested[model] = jit_compile
    model.jit_compile = passed_to_keras(model, jit_compile)


def compiles_passes(model: keras.Model) -> bool:
    """Whether kmp compiles the forward and backward pass of the step that is traced now.

    Each replica of a strategy does, where Keras compiles nothing.
    """
    if tf.executing_eagerly() or xla.is_tracing() or not _has_replicas(model):
        return False
    requested = _requested.get(model, "auto")
    return bool(xla.has_gpu() and not jit_obstacle(model) if requested == "auto" else requested)


def _has_replicas(model: keras.Model) -> bool:
    """Whether each replica of a strategy has its own copy of the model's variables."""
    strategy = _strategy_of(model)
    return strategy is not None and distribution.mirrors_variables(strategy)


def _strategy_of(model: keras.Model) -> tf.distribute.Strategy | None:
    """Returns the strategy that a model was built under, if any.

    The public `distribute_strategy` is the current strategy if there was none.
    """
    return attribute(model, "keras:Model._distribute_strategy")


def jit_compilation(model: keras.Model) -> str:
    """Returns a sentence: whether Keras compiles a model with XLA, and why not if not."""
    obstacle = jit_obstacle(model)
    if obstacle:
        return f'jit_compile="auto" does not compile this model with XLA: {obstacle}.'
    if model.compiled and model.run_eagerly:
        return "The model is compiled with run_eagerly=True: XLA does not compile it."
    requested = _requested.get(model, model.jit_compile) if model.compiled else "auto"
    part = "this model" if _strategy_of(model) is None else "each replica's pass of this model"
    if requested == "auto":
        return f'On a GPU, jit_compile="auto", the default of `compile`, compiles {part} with XLA.'
    if requested:
        return f"With jit_compile=True, XLA compiles {part}."
    # Without a GPU, Keras makes `False` of "auto".
    is_known = model in _requested or tf.config.list_physical_devices("GPU")
    sentence = "The model is compiled with jit_compile=False: XLA does not compile it."
    return sentence if is_known else ""


def jit_obstacle(model: keras.Model) -> str:
    """Returns why `jit_compile="auto"` does not compile a model on a GPU; empty if it does.

    The rules are those of `keras.Model._resolve_auto_jit_compile` in Keras 3.15. That method
    returns no reason, and it returns `False` without a GPU and under each strategy.
    """
    classes = set()
    for layer in sublayers(model):
        # Without a GPU, Keras does not know that the layer uses cuDNN.
        is_recurrent = isinstance(layer, keras.layers.LSTM | keras.layers.GRU)
        uses_cudnn = is_recurrent and layer.use_cudnn is not False
        if uses_cudnn or not layer.supports_jit:
            classes.add(type(layer).__name__)
    if classes:
        verb = "does" if len(classes) == 1 else "do"
        return f"{', '.join(sorted(classes))} {verb} not support it"
    strategy = _strategy_of(model)
    if strategy is not None and not _has_replicas(model):
        return f"it was built under {type(strategy).__name__}"
    if is_deterministic():
        return "operations are deterministic (tf.config.experimental.enable_op_determinism)"
    return ""
