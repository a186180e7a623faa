"""Enables and disables mixed precision: the policy with the settings, and the graph rewrite."""

from typing import Unpack

import keras
import tensorflow as tf

from kmp.backend import tensorflow_internals
from kmp.backend.inventory import Reason
from kmp.backend.patching import patches
from kmp.enabling import misuse_warnings
from kmp.enabling.active_settings import (
    POLICIES,
    ActiveSettings,
    active,
    current_settings,
    lock,
    rewrite_dtypes,
)
from kmp.enabling.gpu_support import resolve
from kmp.scaling.settings import LossScaleSettings, loss_scale_rule
from kmp.utils import user_messages, validation
from kmp.utils.float_formats import BFLOAT16, FLOAT16

# The options of grappler, TensorFlow's graph optimizer, for the graph rewrite.
_PASSES = {
    FLOAT16.name: "auto_mixed_precision",
    BFLOAT16.name: "auto_mixed_precision_onednn_bfloat16",
}


class Handle(ActiveSettings):
    """One call of `enable`, which `disable` or the end of a `with` block undoes.

    Its attributes `policy`, `settings` and `jit_compile` are the arguments of `enable`.

    Example:
    >>> import keras, kmp
    >>> with kmp.enable("mixed_bfloat16") as handle:
    ...     keras.layers.Dense(1).compute_dtype
    'bfloat16'
    >>> handle
    <kmp.enable('mixed_bfloat16') off>
    """

    def disable(self) -> None:
        """Restores the policy and settings from before this call of `enable`.

        Does nothing if it is disabled already. Later calls in the same thread are undone too.
        """
        with lock:
            if self in active:
                since = active.index(self)
                active[since:] = [later for later in active[since:] if later.thread != self.thread]
                _update()

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *_: object) -> None:
        self.disable()

    def __repr__(self) -> str:
        arguments = self.settings | (
            {} if self.jit_compile == "auto" else {"jit_compile": self.jit_compile}
        )
        listed = "".join(f", {name}={value!r}" for name, value in arguments.items())
        state = (
            "in force" if self is current_settings() else "replaced" if self in active else "off"
        )
        return f"<kmp.enable({self.policy!r}{listed}) {state}>"


def enable(
    policy: str = "mixed_float16",
    *,
    jit_compile: bool | str = "auto",
    **loss_scale_settings: Unpack[LossScaleSettings],
) -> Handle:
    """Sets the global dtype policy, and makes `compile` wrap the optimizer for loss scaling.

    Layers created after this call use the policy. `compile` wraps the optimizer in
    `kmp.LossScaleOptimizer`, so that callbacks can watch the training;
    `compile(auto_scale_loss=False)` does not. If any layer of the model computes in float16, the
    loss is scaled. bfloat16 and float32 need no loss scale, because bfloat16 has the exponent range
    of float32: the scale is then fixed at 1, nothing is multiplied or divided, and finite steps
    change the weights as the plain optimizer does.

    If a model with kmp's optimizer skips a step, the state of its layers is restored. Batches with
    a non-finite loss are excluded from its metrics. `fit` is fixed for several workers, and for
    losses that layers add in 16 bits. Mistakes that Keras does not report, such as a softmax in
    float16, cause one warning each until `disable`.

    Keras casts the float arguments of a layer to its compute dtype. float16 has every integer only
    up to 2048, bfloat16 up to 256, float32 up to 2^24. Keras' look-up layers, such as an
    `Embedding` inside a custom layer, use the tensor from before the cast. They warn about indices
    that were computed in 16 bits, such as `ids + 1`.

    The policy applies to all threads, and after `keras.backend.clear_session()`, until `disable`. A
    policy that is set on a layer, or later in a thread, with `keras.config.set_dtype_policy` or
    `enable`, takes precedence there. Calling `enable` again replaces the policy and the settings.
    The logger `"kmp"` reports once for each 16-bit dtype if `"auto"` would choose another dtype on
    this machine.

    Args:
        policy: `"mixed_float16"` (default; float32 variables, float16 computation),
            `"mixed_bfloat16"`, `"float32"`, or `"float16"` (float16 variables and computation); or
            a `keras.DTypePolicy` with such a name. `"auto"` chooses by the GPUs: `"mixed_bfloat16"`
            if all compute bfloat16 in hardware, else `"mixed_float16"` if all have Tensor Cores,
            else `"float32"`; one logged line says which and why. `kmp.audit(model, batch)` shows
            before a training what each format loses of a model, and a report shows it afterwards.
        jit_compile: Whether to compile the optimizer's step with XLA if the model is not compiled
            with XLA: `True`, `False` or `"auto"` (default, on a GPU), as in
            `kmp.LossScaleOptimizer`. With `False`, XLA does not compile normalizations,
            activations and softmaxes on a GPU either.
        **loss_scale_settings: `initial_scale`, `growth_interval`, `growth_factor`,
            `backoff_factor`, `hysteresis`, `min_scale`, `max_scale`, `loss_scale`: as in
            `kmp.LossScaleOptimizer`, for models with a layer that computes in float16.

    Returns:
        A `Handle`. As a context manager it restores the previous policy and settings on exit, also
        after an exception. Calls of `enable` in other threads stay active.

    Raises:
        TypeError: If an argument is unknown or of the wrong type.
        ValueError: If a value is out of range. Nothing is changed in this case.
        RuntimeError: If this version of Keras is not supported.

    Example:
    >>> import keras, kmp
    >>> with kmp.enable("mixed_float16", initial_scale=1024.0):
    ...     model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> type(model.optimizer).__name__, model.optimizer.initial_scale
    ('LossScaleOptimizer', 1024.0)
    """
    policy = validation.one_of("policy", policy, (*POLICIES, "auto"))
    jit_compile = validation.boolean_or_auto("jit_compile", jit_compile)
    loss_scale_rule(**loss_scale_settings)
    handle = Handle(resolve(policy), loss_scale_settings, jit_compile)
    with lock:
        active.append(handle)
        try:
            _update()
        except BaseException:  # nothing may stay enabled without its patches, also after Ctrl-C
            handle.disable()
            raise
    return handle


def disable() -> None:
    """Restores the policy of each thread from before the first `enable`, and Keras and TensorFlow.

    Models compiled under `enable` keep their optimizer and train as before. The patches that they
    need stay while one of these exists: such a model, a `kmp.LossScaleOptimizer`, or a look-up
    layer that was created under `enable` or loaded from the file of such a model. They act on these
    only. A `disable` after these are gone removes the last patch.

    Example:
    >>> import kmp
    >>> handle = kmp.enable()
    >>> kmp.disable()
    >>> handle
    <kmp.enable('mixed_float16') off>
    """
    with lock:
        active.clear()
        _update()


def _update() -> None:
    """Applies or removes the patches, after a change of what is enabled."""
    if active or rewrite_dtypes:
        patches.hold(Reason.ENABLED, active)
    else:
        patches.release(Reason.ENABLED, active)
        patches.release_unused()
        misuse_warnings.issued_messages.clear()
    _set_policy_without_patch()


_policy_before: list[keras.DTypePolicy] = []  # that of Keras, while a policy is set in its place


def _set_policy_without_patch() -> None:
    """Sets the policy in this thread only, if the state of Keras that has it is not known."""
    names = {patch.name for patch in patches.applied()}
    settings = current_settings()
    try:
        if settings is None:
            while _policy_before:
                keras.config.set_dtype_policy(_policy_before.pop())
        elif not {"get_global_attribute", "set_global_attribute"} <= names:
            if not _policy_before:
                _policy_before.append(keras.config.dtype_policy())
            keras.config.set_dtype_policy(settings.dtype_policy)
    except AttributeError as error:  # Keras itself does not work without what is missing
        raise RuntimeError(
            f"This version of kmp does not support Keras {keras.__version__}: update kmp."
        ) from error


def graph_rewrite(enabled: bool = True, dtype: str = FLOAT16.name) -> None:
    """Makes TensorFlow rewrite the graphs of float32 models to 16 bits.

    It does so operation by operation; layers do not change. Use it for models that cannot be
    rebuilt. For other models prefer `enable` or `convert`, which also work under XLA. It
    corresponds to `enable_mixed_precision_graph_rewrite` of tf.keras 2 and to TensorFlow's
    environment variable `TF_ENABLE_AUTO_MIXED_PRECISION`. In later calls of `compile`,
    `jit_compile="auto"` becomes `False`, because XLA compiles the graph before it is rewritten. For
    float16, `compile` also wraps the optimizer with loss scaling, unless called with
    `auto_scale_loss=False`.

    Args:
        enabled: Whether to rewrite graphs. A second call replaces the first. `False` restores
            TensorFlow's option; compiled models keep their optimizer.
        dtype: `"float16"`, whose pass needs a GPU; or `"bfloat16"`, whose pass is for CPUs and
            needs oneDNN.

    Raises:
        TypeError: If `enabled` is not a bool.
        ValueError: If `dtype` is not one of these; in `compile`, if `jit_compile` is true.

    Example:
    >>> import kmp, tensorflow as tf
    >>> kmp.graph_rewrite(True, dtype="bfloat16")
    >>> tf.config.optimizer.get_experimental_options()["auto_mixed_precision_onednn_bfloat16"]
    True
    >>> kmp.graph_rewrite(False)
    """
    enabled = validation.boolean("enabled", enabled)
    dtype = validation.one_of("dtype", dtype, tuple(_PASSES))
    if enabled and dtype == FLOAT16.name and not tf.config.list_physical_devices("GPU"):
        user_messages.warn(
            "TensorFlow's float16 pass does nothing without a GPU. For a CPU, pass"
            " dtype='bfloat16'."
        )
    if enabled and dtype == BFLOAT16.name and not tensorflow_internals.is_onednn_enabled():
        user_messages.warn(
            "TensorFlow's bfloat16 pass does nothing without oneDNN, which is off here. Set the"
            " environment variable TF_ENABLE_ONEDNN_OPTS=1 before TensorFlow is imported."
        )
    # Off first: the passes exclude each other, and TensorFlow's own values come back.
    with lock:
        tf.config.optimizer.set_experimental_options(
            {_PASSES[name]: value for name, value in rewrite_dtypes.items()}
        )
        rewrite_dtypes.clear()
        if enabled:
            option = _PASSES[dtype]
            rewrite_dtypes[dtype] = bool(tf.config.optimizer.get_experimental_options().get(option))
            tf.config.optimizer.set_experimental_options({option: True})
        _update()
