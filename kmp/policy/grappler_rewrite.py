"""TensorFlow's automatic mixed-precision graph rewrite."""

import tensorflow as tf

from kmp.backend import tensorflow_internals
from kmp.policy.active_settings import lock, rewrite_dtypes
from kmp.policy.keras_patches import update_patches
from kmp.utils import BFLOAT16, FLOAT16, user_messages, validation

# Options of grappler, TensorFlow's graph optimizer.
PASSES = {FLOAT16.name: "auto_mixed_precision", BFLOAT16.name: "auto_mixed_precision_onednn_bfloat16"}

_previous_values: dict[str, bool] = {}  # of the option that is turned on


def graph_rewrite(enabled: bool = True, dtype: str = FLOAT16.name) -> None:
    """Makes TensorFlow rewrite the graphs of float32 models to 16 bits, operation by operation; layers do not change.

    Use it for models that cannot be rebuilt. For other models prefer `enable` or `convert`, which also work under XLA.
    It corresponds to `enable_mixed_precision_graph_rewrite` of tf.keras 2 and to TensorFlow's environment variable
    `TF_ENABLE_AUTO_MIXED_PRECISION`. In later calls of `compile`, `jit_compile="auto"` becomes `False`, because XLA
    compiles the graph before it is rewritten. For float16, `compile` also wraps the optimizer with loss scaling, unless
    called with `auto_scale_loss=False`.

    Args:
        enabled: Whether to rewrite graphs. A second call replaces the first. `False` restores TensorFlow's option;
            compiled models keep their optimizer.
        dtype: `"float16"`, whose pass needs a GPU; or `"bfloat16"`, whose pass is for CPUs and needs oneDNN.

    Raises:
        TypeError: If `enabled` is not a bool.
        ValueError: If `dtype` is not one of these; in `compile`, if `jit_compile` is true.

    Example:
    >>> import tensorflow as tf
    >>> graph_rewrite(True, dtype="bfloat16")
    >>> tf.config.optimizer.get_experimental_options()["auto_mixed_precision_onednn_bfloat16"]
    True
    >>> graph_rewrite(False)
    """
    enabled = validation.boolean("enabled", enabled)
    option = PASSES[validation.one_of("dtype", dtype, tuple(PASSES))]
    if enabled and dtype == FLOAT16.name and not tf.config.list_physical_devices("GPU"):
        user_messages.warn("TensorFlow's float16 pass does nothing without a GPU. For a CPU, pass dtype='bfloat16'.")
    if enabled and dtype == BFLOAT16.name and not tensorflow_internals.is_onednn_enabled():
        user_messages.warn(
            "TensorFlow's bfloat16 pass does nothing without oneDNN, which is off here. Set the environment variable "
            "TF_ENABLE_ONEDNN_OPTS=1 before TensorFlow is imported."
        )
    # Off first: the passes exclude each other, and TensorFlow's own values come back.
    with lock:
        tf.config.optimizer.set_experimental_options(dict(_previous_values))
        _previous_values.clear()
        rewrite_dtypes.clear()
        if enabled:
            _previous_values[option] = bool(tf.config.optimizer.get_experimental_options().get(option))
            tf.config.optimizer.set_experimental_options({option: True})
            rewrite_dtypes.append(dtype)
        update_patches()
