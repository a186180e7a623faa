"""Switching mixed precision on and off: the one place that touches Keras' global state or hooks into `compile`."""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any, Unpack

import keras

from kmp import _arguments, _guard, _hardware, scaling
from kmp._formats import FLOAT16
from kmp.layers import sublayers
from kmp.optimizer import LossScaleOptimizer
from kmp.scaling import LossScaleSettings

POLICIES = ("mixed_float16", "mixed_bfloat16", "float32", "float16")

_active: list["Handle"] = []


class Handle:
    """What `enable` returns: what is in force, and the way back; also a context manager.

    Args:
        policy: The name of the global policy that was set.
        settings: The loss-scale arguments that `compile` and `wrap` use.
    """

    def __init__(self, policy: str, settings: LossScaleSettings) -> None:
        self.policy = policy
        self.settings = settings
        self._previous = keras.config.dtype_policy()

    def disable(self) -> None:
        """Restores the policy and settings that were in force before this handle; does nothing the second time."""
        if self not in _active:
            return
        keras.config.set_dtype_policy(self._previous)
        del _active[_active.index(self) :]
        if not _active:
            _hook.remove()

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.disable()

    def __repr__(self) -> str:
        settings = "".join(f", {name}={value!r}" for name, value in self.settings.items())
        return f"<kmp.enable({self.policy!r}{settings}) {'in force' if self in _active else 'off'}>"


def enable(policy: str = "mixed_float16", **loss_scale_settings: Unpack[LossScaleSettings]) -> Handle:
    """Sets the global dtype policy, and has `model.compile` wrap optimizers of float16 models with loss scaling.

    Layers built from here on use the policy. `compile` wraps the optimizer in `kmp.LossScaleOptimizer` when any layer
    of the model computes in float16, unless it is called with `auto_scale_loss=False`. bfloat16 has float32's exponents
    and needs no loss scale, nor does float32.

    Calling it again replaces policy and settings. What the hardware means for the policy is logged once, under `"kmp"`.

    Args:
        policy: `"mixed_float16"` (the default: float32 weights, float16 computation), `"mixed_bfloat16"`, `"float32"`,
            or `"float16"` (weights in float16 too).
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
    scaling.make_rule(**loss_scale_settings)
    _hardware.say_once(policy)
    handle = Handle(policy, loss_scale_settings)
    _active.append(handle)
    _hook.install()
    keras.config.set_dtype_policy(policy)
    return handle


def disable() -> None:
    """Restores what was there before the first `enable`: the policy and Keras' own `compile`.

    Models that are compiled already keep their optimizer. Does nothing where kmp is not enabled.
    """
    if _active:
        _active[0].disable()


def wrap(
    optimizer: keras.optimizers.Optimizer | str, **loss_scale_settings: Unpack[LossScaleSettings]
) -> LossScaleOptimizer:
    """Wraps an optimizer that `compile` does not see: one of several that a model holds, or one of a custom loop.

    Args:
        optimizer: A `keras.optimizers.Optimizer`, or the name of one; one that kmp wrapped already is returned as it
            is.
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
    if isinstance(optimizer, LossScaleOptimizer) and not loss_scale_settings:
        return optimizer
    optimizer = _arguments.optimizer("optimizer", optimizer)
    return LossScaleOptimizer(optimizer, **scaling.override(_settings(), loss_scale_settings))


class _CompileHook:
    """Replaces `compile` on the class that defines it.

    A `compile` put on `keras.Model` would look like a user's own to `compile_from_config`, which then does not compile
    a loaded model; one put where Keras' own stands does not.
    """

    def __init__(self) -> None:
        self._owner: Any = None
        self._original: Any = None
        self._hooked: Any = None

    def install(self) -> None:
        if self._owner is None:
            self._owner = next(cls for cls in keras.Model.__mro__ if "compile" in vars(cls))
            self._original = vars(self._owner)["compile"]
            self._owner.compile = self._hooked = _hooked(self._original)

    def remove(self) -> None:
        # What another library put around it stays; the hook inside does nothing while kmp is off.
        if self._owner is not None and vars(self._owner)["compile"] is self._hooked:
            self._owner.compile = self._original
        self._owner = None


_hook = _CompileHook()


def _hooked(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compile(self: keras.Model, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(self, *args, **kwargs)
        is_chosen = "optimizer" in call.arguments
        call.apply_defaults()
        if _active and call.arguments["auto_scale_loss"] and computes_in_float16(self):
            if not is_chosen:
                _say_if_unused(self, inspect.currentframe())
            call.arguments["optimizer"] = _scaled(call.arguments["optimizer"])
            call.arguments["auto_scale_loss"] = False
        original(*call.args, **call.kwargs)
        if isinstance(self.optimizer, LossScaleOptimizer):
            _guard.install(self)

    return compile


def computes_in_float16(model: keras.Model) -> bool:
    """Whether any layer of `model`, itself included, computes in float16."""
    return any(layer.compute_dtype == FLOAT16.name for layer in sublayers(model))


def _scaled(optimizer: Any) -> Any:
    found = keras.optimizers.get(optimizer)
    if found is None or isinstance(found, LossScaleOptimizer):
        return found
    if isinstance(found, keras.optimizers.LossScaleOptimizer):
        warnings.warn(
            "The model is compiled with Keras' own LossScaleOptimizer, which kmp leaves alone: it can be neither seen "
            "nor configured. Pass its inner optimizer to `compile` instead.",
            stacklevel=3,
        )
        return found
    return wrap(found)


def _say_if_unused(model: keras.Model, frame: FrameType | None) -> None:
    """Warns where a model such as a GAN compiles without an optimizer because it trains with optimizers of its own."""
    kind = type(model)
    if kind.compile is keras.Model.compile or kind.train_step is keras.Model.train_step:
        return
    # The usual form sets them after super().compile(), so they are known by now as arguments of the caller alone.
    caller = frame.f_back if frame else None
    own = [*_optimizers_in(vars(model)), *_optimizers_in(caller.f_locals if caller else {})]
    if own and all(isinstance(optimizer, LossScaleOptimizer) for optimizer in own):
        return
    warnings.warn(
        f"{kind.__name__}.compile calls super().compile() without an optimizer, so kmp wraps one that the model's own "
        "train_step does not use. Wrap each of those it does use with kmp.wrap(optimizer), and call its scale_loss and "
        "apply.",
        stacklevel=4,
    )


def _optimizers_in(names: Mapping[str, Any]) -> Iterator[keras.optimizers.Optimizer]:
    for value in names.values():
        nested = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        yield from (item for item in nested if isinstance(item, keras.optimizers.Optimizer))


def _settings() -> LossScaleSettings:
    return _active[-1].settings if _active else {}
