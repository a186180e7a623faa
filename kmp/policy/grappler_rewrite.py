"""TensorFlow's automatic mixed-precision graph rewrite: turns it on and off, and adapts the arguments of `compile`."""

import tensorflow as tf

from kmp.backend import tensorflow_internals
from kmp.utils import BFLOAT16, FLOAT16, user_messages

# Options of grappler, TensorFlow's graph optimizer. The first pass needs a GPU, the second is for CPUs.
PASSES = {FLOAT16.name: "auto_mixed_precision", BFLOAT16.name: "auto_mixed_precision_onednn_bfloat16"}

_BFLOAT16_FALLBACK = "TensorFlow sees no GPU, and its float16 pass needs one: graphs are rewritten to bfloat16."
_FLOAT16_WITHOUT_GPU = (
    "TensorFlow's float16 pass does nothing without a GPU, and TensorFlow sees none. Leave out `dtype` to use bfloat16."
)
_BFLOAT16_WITHOUT_ONEDNN = (
    "TensorFlow's bfloat16 pass does nothing without oneDNN, which is off here. Set the environment variable "
    "TF_ENABLE_ONEDNN_OPTS=1 before TensorFlow is imported."
)

_previous_values: dict[str, bool] = {}  # of the options that are turned on


def dtype() -> str | None:
    """Returns the 16-bit dtype that graphs are rewritten to, or `None` while the rewrite is off."""
    return next((name for name, option in PASSES.items() if option in _previous_values), None)


def turn_on(requested_dtype: str | None) -> None:
    """Turns the rewrite on.

    Args:
        requested_dtype: `"float16"`, `"bfloat16"`, or `None` for float16 with a GPU and bfloat16 without one.
    """
    has_gpu = bool(tf.config.list_physical_devices("GPU"))
    if not has_gpu and requested_dtype != BFLOAT16.name:
        user_messages.warn(_FLOAT16_WITHOUT_GPU if requested_dtype else _BFLOAT16_FALLBACK)
    rewrite_dtype = requested_dtype or (FLOAT16.name if has_gpu else BFLOAT16.name)
    if rewrite_dtype == BFLOAT16.name and not tensorflow_internals.is_onednn_enabled():
        user_messages.warn(_BFLOAT16_WITHOUT_ONEDNN)
    turn_off()
    option = PASSES[rewrite_dtype]
    _previous_values[option] = bool(tf.config.optimizer.get_experimental_options().get(option))
    tf.config.optimizer.set_experimental_options({option: True})


def turn_off() -> None:
    """Restores the previous values of TensorFlow's options."""
    tf.config.optimizer.set_experimental_options(dict(_previous_values))
    _previous_values.clear()


def jit_compile(requested: str | bool, run_eagerly: bool) -> bool:
    """Returns the `jit_compile` argument with which `compile` has to compile a model for the rewrite.

    Args:
        requested: The argument that `compile` received.
        run_eagerly: Another argument of `compile`; a warning says that there is no graph then.

    Raises:
        ValueError: If `requested` is true.
    """
    if requested is True:
        raise ValueError(
            "kmp.graph_rewrite cannot work under XLA, which compiles the graph before it is rewritten. Leave out "
            "`jit_compile=True`, or call kmp.graph_rewrite(False) and use kmp.convert(model)."
        )
    if run_eagerly:
        user_messages.warn("With `run_eagerly=True` there is no graph to rewrite: the model trains in float32.")
    return False
