"""What kmp patches in Keras.

`_always` is in place from the import of kmp on, because a model that was compiled under `enable`
has to train alike after `disable` and after loading. The patches of casts and look-ups only make
indices exact (`exact_indices`), that of `assign` records what a guarded step assigns (`guarding`),
and that of `keras.Layer.__init__` (`kmp.layers`) is needed by conversions in several threads too.
Nothing else changes for other models and layers. While `enable` or `graph_rewrite` is on, so are
the patches of `compile`, of the state that stores the global dtype policy and of two functions of
the trainer (`kmp.backend`). `guarding` wraps `train_step` of single models.
"""

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import keras

from kmp import layers
from kmp.backend import (
    Replacement,
    compute_dtypes,
    defining_class,
    keras_internals,
    replace_policy_state,
    replaced,
    trainer_fixes,
)
from kmp.optimizer import LossScaleOptimizer
from kmp.policy import exact_indices, guarding, misuse_warnings
from kmp.policy.active_settings import (
    FLOAT16_POLICIES,
    active,
    current_settings,
    is_float16_enabled,
    rewrite_dtypes,
)
from kmp.policy.optimizers import optimizers_of, wrap_for_compile
from kmp.utils import FLOAT16, user_messages

_patches: list[Replacement] = []
_policy_at_compile: WeakKeyDictionary[keras.Model, str] = WeakKeyDictionary()


def update_patches() -> None:
    """Applies the patches that are in place while `enable` or the graph rewrite is, or removes them."""
    if bool(_patches) == bool(active or rewrite_dtypes):
        return
    if _patches:
        while _patches:
            _patches.pop().remove()
        misuse_warnings.issued_messages.clear()
        return
    _patches.extend(
        replace_policy_state(current_settings)
    )  # one by one: after an error, what is patched is removed
    _patches.extend(trainer_fixes.apply_multi_worker_fixes())
    _patches.append(_replace("compile", _compile_patch))


def _replace(name: str, make: Callable[[Any], Any]) -> Replacement:
    # Patch the class that defines a method, not `keras.Model`: `compile_from_config` takes a
    # `compile` defined there for a user's override and then does not compile a loaded model.
    return replaced(defining_class(keras.Model, name), name, make)


def _is_managed(model: keras.Layer) -> bool:
    """Whether kmp is enabled, or was when the model was compiled, or the model has kmp's optimizer."""
    has_optimizer = isinstance(getattr(model, "optimizer", None), LossScaleOptimizer)
    return (
        bool(active)
        or has_optimizer
        or (isinstance(model, keras.Model) and model in _policy_at_compile)
    )


def _compile_patch(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def compile(self: keras.Model, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any) -> None:
        # The names of Keras' `compile`, not of `original`, which another library may have wrapped.
        names = (
            "loss",
            "loss_weights",
            "metrics",
            "weighted_metrics",
            "run_eagerly",
            "steps_per_execution",
        )
        arguments = dict(
            zip((*names, "jit_compile", "auto_scale_loss")[: len(args)], args, strict=True)
        )
        if twice := arguments.keys() & kwargs.keys():
            raise TypeError(f"compile() got multiple values for argument {min(twice)!r}")
        arguments |= kwargs
        scales = arguments.pop("auto_scale_loss", True)
        if rewrite_dtypes:
            if arguments.get("jit_compile") is True:
                raise ValueError(
                    "kmp.graph_rewrite cannot work under XLA, which compiles the graph before it is"
                    " rewritten. Leave out `jit_compile=True`, or call kmp.graph_rewrite(False) and"
                    " use kmp.convert(model)."
                )
            if arguments.get("run_eagerly"):
                user_messages.warn(
                    "With `run_eagerly=True` there is no graph to rewrite: the model trains in"
                    " float32."
                )
            arguments["jit_compile"] = False
        # Keras checks only the model's own policy, not those of its layers.
        dtypes = (compute_dtypes(self) or {self.compute_dtype}) if active else ()
        if scales and (FLOAT16.name in dtypes or FLOAT16.name in rewrite_dtypes):
            optimizer, scales = wrap_for_compile(optimizer), False
        original(self, optimizer=optimizer, auto_scale_loss=scales and not active, **arguments)
        if isinstance(self.optimizer, LossScaleOptimizer):
            guarding.install(self)
        settings = current_settings()
        _policy_at_compile.pop(self, None)
        if settings:
            _policy_at_compile[self] = settings.policy
        if is_float16_enabled():
            misuse_warnings.warn_after_compile(self)

    return compile


def _make_train_function_patch(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def make_train_function(self: keras.Model, force: bool = False) -> None:
        if not _is_managed(self):
            original(self, force)
            return
        # `train_on_batch` calls this in each step: the search for optimizers is for a model that
        # has no guard.
        is_new = (
            guarding.guard_of(self) is None and bool(optimizers_of(self)) and guarding.install(self)
        )
        previous = self.train_function
        original(self, force or is_new)
        if self.train_function is not previous:
            self.train_function = _prepared(self, self.train_function)

    return make_train_function


def _prepared(model: keras.Model, train_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns the train function with what has to happen before its first call, or as soon as the model is built."""
    is_first = True
    is_unchecked = is_float16_enabled() and _policy_at_compile.get(model) in (
        None,
        *FLOAT16_POLICIES,
    )
    if is_unchecked and guarding.is_built(model):
        misuse_warnings.warn_before_training(model)
        is_unchecked = False

    def run(iterator: Any) -> Any:
        nonlocal is_first, is_unchecked
        guard = guarding.guard_of(model)
        if guard:
            guard.begin_execution(iterator, is_first)
        is_first = False
        logs = train_function(iterator)
        if is_unchecked:  # the first call has built the model
            is_unchecked = False
            misuse_warnings.warn_before_training(model)
        return logs

    return run


def _losses_patch(original: property) -> property:
    """Casts losses that layers add in 16 bits: `fit` fails if it adds them to a float32 loss, and so does a loop."""
    read: Any = original.fget

    @functools.wraps(read)
    def losses(self: keras.Layer) -> list[Any]:
        return keras_internals.in_float32(read(self)) if _is_managed(self) else read(self)

    return property(losses, doc=original.__doc__)


def _compute_metrics_patch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Computes metrics in float32: in float16 a squared error overflows, and top-k metrics have no kernel."""

    @functools.wraps(original)
    def compute_metrics(
        self: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any = None
    ) -> Any:
        return original(
            self,
            x,
            y,
            keras_internals.in_float32(y_pred) if _is_managed(self) else y_pred,
            sample_weight,
        )

    return compute_metrics


_always = [
    _replace("compute_metrics", _compute_metrics_patch),
    _replace("losses", _losses_patch),
    _replace("make_train_function", _make_train_function_patch),
    replaced(defining_class(keras.Variable, "assign"), "assign", guarding.assign_patch),
    *exact_indices.apply_patches(),
    *layers.apply_patches(is_enabled=lambda: bool(active)),
]
