"""TensorFlow's own rewrite of graphs to 16 bits: its switch, and what `compile` has to see to while it is on."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kmp.utils import BFLOAT16, FLOAT16, user_messages

# Passes of grappler, the first for GPUs, the second for CPUs.
PASSES = {FLOAT16.name: "auto_mixed_precision", BFLOAT16.name: "auto_mixed_precision_onednn_bfloat16"}

_NO_GPU = (
    "TensorFlow sees no GPU, and its pass for float16 does nothing without one: the graph is rewritten to bfloat16."
)
_NOTHING = "TensorFlow's pass for float16 does nothing here: it sees no GPU. Leave out `dtype`."
_EAGER = "With `run_eagerly=True` there is no graph to rewrite: the model trains in float32."

_on: dict[str, bool] = {}  # what each pass was set to before it was switched on


def dtype() -> str | None:
    """Returns what graphs are rewritten to, `None` while they are not."""
    return next((name for name, option in PASSES.items() if option in _on), None)


def switch(asked: str | None) -> None:
    """Switches the rewrite on.

    Args:
        asked: `"float16"`, `"bfloat16"`, or `None` for what the machine has a pass for.
    """
    has_gpu = bool(tf.config.list_physical_devices("GPU"))
    if not has_gpu and asked != BFLOAT16.name:
        user_messages.warn(_NOTHING if asked else _NO_GPU)
    chosen = asked or (FLOAT16.name if has_gpu else BFLOAT16.name)
    switch_off()
    option = PASSES[chosen]
    _on[option] = bool(tf.config.optimizer.get_experimental_options().get(option))
    tf.config.optimizer.set_experimental_options({option: True})


def switch_off() -> None:
    """Sets the passes to what they were."""
    tf.config.optimizer.set_experimental_options(dict(_on))
    _on.clear()


def prepare(arguments: dict[str, Any], scaled: Callable[[Any], keras.optimizers.Optimizer | None]) -> None:
    """Changes arguments of `compile` to what the rewrite can work with.

    Args:
        arguments: Those of `keras.Model.compile`, by name.
        scaled: Puts the loss scale around an optimizer.

    Raises:
        ValueError: If `jit_compile` is true.
    """
    if arguments["jit_compile"] is True:
        raise ValueError(
            "kmp.graph_rewrite cannot work under XLA, which compiles the graph before it is rewritten. Leave out "
            "`jit_compile=True`, or call kmp.graph_rewrite(False) and take kmp.convert(model)."
        )
    arguments["jit_compile"] = False
    if arguments["run_eagerly"]:
        user_messages.warn(_EAGER)
    if dtype() == FLOAT16.name and arguments["auto_scale_loss"]:
        arguments["optimizer"] = scaled(arguments["optimizer"])
        arguments["auto_scale_loss"] = False
