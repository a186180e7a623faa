"""Switching mixed precision on and off: Keras' global policy, and the settings of `compile` and `wrap`."""

from types import TracebackType
from typing import Unpack

import keras

from kmp.backend import log_once
from kmp.policy import grappler_rewrite
from kmp.policy.active_settings import ActiveSettings, active
from kmp.policy.keras_patches import update_patches
from kmp.scaling import LossScaleSettings, make_rule
from kmp.utils import validation

POLICIES = ("mixed_float16", "mixed_bfloat16", "float32", "float16")


class Handle(ActiveSettings):
    """What `enable` returns: what is in force, and the way back; also a context manager.

    Its attributes are `policy`, `settings` and `jit_compile`, the arguments of `enable`.
    """

    def disable(self) -> None:
        """Restores the policy and settings that were in force before this handle; does nothing the second time."""
        if self in active:
            _restore(self)

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.disable()

    def __repr__(self) -> str:
        shown = self.settings | ({"jit_compile": True} if self.jit_compile else {})
        settings = "".join(f", {name}={value!r}" for name, value in shown.items())
        return f"<kmp.enable({self.policy!r}{settings}) {self._state()}>"

    def _state(self) -> str:
        if self not in active[-1:]:
            return "replaced" if self in active else "off"
        policy = keras.config.dtype_policy().name
        return "in force" if policy == self.policy else f"in force, but Keras' policy is {policy!r} here"


def enable(
    policy: str = "mixed_float16", *, jit_compile: bool = False, **loss_scale_settings: Unpack[LossScaleSettings]
) -> Handle:
    """Sets the global dtype policy, and has `model.compile` wrap optimizers of float16 models with loss scaling.

    Layers built from here on use the policy. `compile` wraps the optimizer in `kmp.LossScaleOptimizer` when any layer
    of the model computes in float16, unless it is called with `auto_scale_loss=False`. bfloat16 has float32's exponents
    and needs no loss scale, nor does float32.

    A model that trains with kmp's optimizer is guarded: a skipped step leaves no trace in its layers and metrics.
    `compile` raises an error for what would fail in the first step under a strategy, and mends `fit` on several
    workers, and with losses that layers add in 16 bits. Mistakes that Keras trains on with in silence are warned of,
    once a model.

    Calling it again replaces policy and settings. Keras has a policy for each thread, and
    `keras.backend.clear_session()` resets it: call it again there. What the hardware means for the policy is logged
    once, under `"kmp"`.

    Args:
        policy: `"mixed_float16"` (the default: float32 weights, float16 computation), `"mixed_bfloat16"`, `"float32"`,
            or `"float16"` (weights in float16 too).
        jit_compile: Whether the optimizer's step is compiled with XLA also where the model is not, as in
            `kmp.LossScaleOptimizer`.
        **loss_scale_settings: `initial_scale`, `growth_interval`, `growth_factor`, `backoff_factor`, `hysteresis`,
            `min_scale`, `max_scale`, `loss_scale`: as in `kmp.LossScaleOptimizer`.

    Returns:
        A `Handle`, usable as a context manager: at its end, also after an exception, what was there before is back.

    Raises:
        TypeError: If an argument is of the wrong type or unknown.
        ValueError: If a value is outside its range. Nothing has changed then.

    Example:
    >>> with enable("mixed_float16", initial_scale=1024.0):
    ...     model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> type(model.optimizer).__name__, model.optimizer.initial_scale
    ('LossScaleOptimizer', 1024.0)
    """
    validation.one_of("policy", policy, POLICIES)
    validation.boolean("jit_compile", jit_compile)
    make_rule(**loss_scale_settings)
    log_once(policy)
    handle = Handle(policy, loss_scale_settings, jit_compile)
    active.append(handle)
    update_patches()
    keras.config.set_dtype_policy(policy)
    return handle


def disable() -> None:
    """Restores what was there before the first `enable`: the policy, and Keras' own functions.

    Models that are compiled already keep their optimizer. Does nothing where kmp is not enabled.

    Example:
    >>> handle = enable()
    >>> disable()
    >>> keras.config.dtype_policy().name
    'float32'
    """
    if active:
        _restore(active[0])


def _restore(first: ActiveSettings) -> None:
    keras.config.set_dtype_policy(first.previous_policy)
    del active[active.index(first) :]
    update_patches()


def graph_rewrite(enabled: bool = True, dtype: str | None = None) -> None:
    """Has TensorFlow rewrite the graphs of float32 models to 16 bits, operation by operation: no layer changes.

    For models that cannot be built anew; the others are better served by `enable` or `convert`, which work under XLA.
    What tf.keras 2 had as `enable_mixed_precision_graph_rewrite`, and TensorFlow as the environment variable
    `TF_ENABLE_AUTO_MIXED_PRECISION`. Models compiled from here on get a loss scale around their optimizer for float16,
    unless with `auto_scale_loss=False`, and `jit_compile="auto"` becomes false: XLA compiles what is not rewritten yet.

    Args:
        enabled: Whether to rewrite graphs; a second call replaces the first, and `False` sets TensorFlow's option to
            what it was. Compiled models keep their optimizer.
        dtype: `"float16"`, whose pass needs a GPU; `"bfloat16"`, whose pass is for CPUs; or `None` for what the machine
            has a pass for, with a warning where that is bfloat16.

    Raises:
        TypeError: If `enabled` is not a bool.
        ValueError: If `dtype` is another; in `compile`, if `jit_compile` is true.

    Example:
    >>> import tensorflow as tf
    >>> graph_rewrite(True, dtype="bfloat16")
    >>> tf.config.optimizer.get_experimental_options()["auto_mixed_precision_onednn_bfloat16"]
    True
    >>> graph_rewrite(False)
    """
    validation.boolean("enabled", enabled)
    if dtype is not None:
        validation.one_of("dtype", dtype, tuple(grappler_rewrite.PASSES))
    if enabled:
        grappler_rewrite.switch(dtype)
    else:
        grappler_rewrite.switch_off()
    update_patches()
