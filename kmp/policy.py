"""Switching mixed precision on and off: the one place that touches Keras' global state or hooks into `compile`."""

import functools
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, Unpack
from weakref import WeakKeyDictionary

import keras

from kmp import _arguments, _graph_rewrite, _guard, _hardware, _mistakes, _multiworker
from kmp._formats import FLOAT16
from kmp._patch import Replacement, definer
from kmp._state import compute_dtypes
from kmp.optimizer import LossScaleOptimizer
from kmp.scaling import DynamicScale
from kmp.settings import LossScaleSettings, make_rule, override

POLICIES = ("mixed_float16", "mixed_bfloat16", "float32", "float16")

_FLOAT16_POLICIES = ("mixed_float16", "float16")

_active: list["Handle"] = []
_compiled_under: WeakKeyDictionary[keras.Model, str] = WeakKeyDictionary()


class Handle:
    """What `enable` returns: what is in force, and the way back; also a context manager.

    Args:
        policy: The name of the global policy that was set.
        settings: The loss-scale arguments that `compile` and `wrap` use.
        jit_compile: Whether the optimizers that they make compile their own step.
    """

    def __init__(self, policy: str, settings: LossScaleSettings, jit_compile: bool = False) -> None:
        self.policy = policy
        self.settings = settings
        self.jit_compile = jit_compile
        self._previous = keras.config.dtype_policy()

    def disable(self) -> None:
        """Restores the policy and settings that were in force before this handle; does nothing the second time."""
        if self not in _active:
            return
        keras.config.set_dtype_policy(self._previous)
        del _active[_active.index(self) :]
        _set_hooks()

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.disable()

    def __repr__(self) -> str:
        shown = self.settings | ({"jit_compile": True} if self.jit_compile else {})
        settings = "".join(f", {name}={value!r}" for name, value in shown.items())
        return f"<kmp.enable({self.policy!r}{settings}) {self._state()}>"

    def _state(self) -> str:
        if self not in _active[-1:]:
            return "replaced" if self in _active else "off"
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
    _arguments.one_of("policy", policy, POLICIES)
    _arguments.boolean("jit_compile", jit_compile)
    make_rule(**loss_scale_settings)
    _hardware.say_once(policy)
    handle = Handle(policy, loss_scale_settings, jit_compile)
    _active.append(handle)
    _set_hooks()
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
    if _active:
        _active[0].disable()


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
    _arguments.boolean("enabled", enabled)
    if dtype is not None:
        _arguments.one_of("dtype", dtype, tuple(_graph_rewrite.PASSES))
    if enabled:
        _graph_rewrite.switch(dtype)
    else:
        _graph_rewrite.switch_off()
    _set_hooks()


def wrap(
    optimizer: keras.optimizers.Optimizer | str,
    *,
    jit_compile: bool | None = None,
    **loss_scale_settings: Unpack[LossScaleSettings],
) -> LossScaleOptimizer:
    """Wraps an optimizer that `compile` does not see: one of several that a model holds, or one of a custom loop.

    Args:
        optimizer: A `keras.optimizers.Optimizer`, or the name of one; one that kmp wrapped already is returned as it
            is.
        jit_compile: As in `enable`, whose setting `None` stands for.
        **loss_scale_settings: As in `enable`, whose settings they are added to.

    Returns:
        A `kmp.LossScaleOptimizer`. Use it with `scale_loss` and `apply`.

    Raises:
        TypeError: If `optimizer` is no optimizer, or one that scales the loss already.
        ValueError: If it is not the name of one, or a setting is outside its range.

    Example:
    >>> generator_optimizer = wrap(keras.optimizers.Adam(1e-4), growth_interval=500)
    >>> generator_optimizer.rule.growth_interval
    500
    """
    if isinstance(optimizer, LossScaleOptimizer) and not loss_scale_settings and jit_compile is None:
        return optimizer
    optimizer = _arguments.optimizer("optimizer", optimizer)
    if jit_compile is None:
        jit_compile = bool(_active) and _active[-1].jit_compile
    return LossScaleOptimizer(optimizer, **override(_settings(), loss_scale_settings), jit_compile=jit_compile)


_hooks: list[Replacement] = []


def _set_hooks() -> None:
    """Puts the hooks into Keras that what is in force needs, or takes them out."""
    if bool(_hooks) == bool(_active or _graph_rewrite.dtype()):
        return
    if _hooks:
        _multiworker.unmend()
        while _hooks:
            _hooks.pop().remove()
        return
    _multiworker.mend_if_needed()
    # A `compile` put on `keras.Model` itself would look like a user's own to `compile_from_config`, which then does not
    # compile a loaded model.
    for name in (name for name in _HOOKS if hasattr(keras.Model, name)):
        _hooks.append(Replacement(definer(keras.Model, name), name, _HOOKS[name]))


def _hooked(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compile(self: keras.Model, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        if _graph_rewrite.dtype():
            _graph_rewrite.prepare(call.arguments, _scaled)
        if _active:
            _prepare(self, call.arguments)
        original(*call.args, **call.kwargs)
        if isinstance(self.optimizer, LossScaleOptimizer):
            _guard.install(self)
        if _active:
            _compiled_under[self] = _active[-1].policy
        if _is_float16_on():
            _mistakes.warn_of_compiled(self)

    return compile


def _prepare(model: keras.Model, arguments: dict[str, Any]) -> None:
    """Sees to it that the model can train as its arguments of `compile` say, with a scaled loss where it needs one."""
    _mistakes.refuse_what_replicas_cannot(model, arguments)
    _multiworker.mend_if_needed(model)
    if arguments["auto_scale_loss"]:
        if FLOAT16.name in (compute_dtypes(model) or {model.compute_dtype}):
            arguments["optimizer"] = _scaled(arguments["optimizer"])
        arguments["auto_scale_loss"] = False  # Keras would go by the model's own policy, whatever its layers do


def _watched(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def make_train_function(self: keras.Model, force: bool = False) -> None:
        if _active and _guard.optimizers_of(self) and _guard.install(self):
            self.make_train_function(force=True)  # the guard's own, which comes here again
            return
        original(self, force)
        compiled_under = _compiled_under.get(self)
        if _is_float16_on() and compiled_under in (None, *_FLOAT16_POLICIES):
            was_compiled = compiled_under is not None
            _mistakes.when_built(self, lambda: _mistakes.warn_of_training(self, was_compiled))

    return make_train_function


def _widened(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keras adds what layers give to `add_loss`, and activity regularizers, to a float32 loss, and fails on 16 bits."""

    @functools.wraps(original)
    def _aggregate_additional_loss(self: keras.Model, loss: Any) -> Any:
        return original(self, keras.ops.cast(loss, keras.config.floatx()))

    return _aggregate_additional_loss


# The last is private to Keras, so another Keras may lack it: what it does with its argument is decided nowhere public.
_HOOKS = {"compile": _hooked, "make_train_function": _watched, "_aggregate_additional_loss": _widened}


def _is_float16_on() -> bool:
    return bool(_active) and _active[-1].policy in _FLOAT16_POLICIES


def _scaled(optimizer: Any) -> Any:
    found = keras.optimizers.get(optimizer)
    if found is None or isinstance(found, LossScaleOptimizer):
        return found
    if isinstance(found, keras.optimizers.LossScaleOptimizer):
        return found if found.built else _in_place_of(found)
    return wrap(found)


def _in_place_of(stock: keras.optimizers.LossScaleOptimizer) -> LossScaleOptimizer:
    """Returns kmp's optimizer for one of Keras' that has not trained yet, such as one that `load_model` is making."""
    settings: LossScaleSettings = {}
    if stock.initial_scale != DynamicScale.initial_scale:
        settings["initial_scale"] = stock.initial_scale
    if stock.dynamic_growth_steps != DynamicScale.growth_interval:
        settings["growth_interval"] = stock.dynamic_growth_steps
    return wrap(stock.inner_optimizer, **settings)


def _settings() -> LossScaleSettings:
    return _active[-1].settings if _active else {}
