"""The methods of `keras.Model` that kmp patches while it is enabled: `compile`, `make_train_function`, added losses."""

import functools
import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import keras

from kmp.backend import Replacement, compute_dtypes, defining_class, trainer_fixes
from kmp.optimizer import LossScaleOptimizer
from kmp.policy import grappler_rewrite, misuse_warnings, skipped_step_rollback
from kmp.policy.active_settings import FLOAT16_POLICIES, active, is_float16_enabled
from kmp.policy.model_optimizers import optimizers_of
from kmp.policy.optimizer_wrapping import scaled
from kmp.utils import FLOAT16

_patches: list[Replacement] = []
_compiled_under: WeakKeyDictionary[keras.Model, str] = WeakKeyDictionary()


def update_patches() -> None:
    """Puts the hooks into Keras that what is in force needs, or takes them out."""
    if bool(_patches) == bool(active or grappler_rewrite.dtype()):
        return
    if _patches:
        trainer_fixes.remove_fixes()
        while _patches:
            _patches.pop().remove()
        return
    trainer_fixes.fix_if_needed()
    # A `compile` put on `keras.Model` itself would look like a user's own to `compile_from_config`, which then does not
    # compile a loaded model.
    for name in (name for name in _PATCHES if hasattr(keras.Model, name)):
        _patches.append(Replacement(defining_class(keras.Model, name), name, _PATCHES[name]))


def _compile_patch(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compile(self: keras.Model, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        if grappler_rewrite.dtype():
            grappler_rewrite.prepare(call.arguments, scaled)
        if active:
            _prepare(self, call.arguments)
        original(*call.args, **call.kwargs)
        if isinstance(self.optimizer, LossScaleOptimizer):
            skipped_step_rollback.install(self)
        if active:
            _compiled_under[self] = active[-1].policy
        if is_float16_enabled():
            misuse_warnings.warn_of_compiled(self)

    return compile


def _prepare(model: keras.Model, arguments: dict[str, Any]) -> None:
    """Sees to it that the model can train as its arguments of `compile` say, with a scaled loss where it needs one."""
    misuse_warnings.refuse_what_replicas_cannot(model, arguments)
    trainer_fixes.fix_if_needed(model)
    if arguments["auto_scale_loss"]:
        if FLOAT16.name in (compute_dtypes(model) or {model.compute_dtype}):
            arguments["optimizer"] = scaled(arguments["optimizer"])
        arguments["auto_scale_loss"] = False  # Keras would go by the model's own policy, whatever its layers do


def _make_train_function_patch(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def make_train_function(self: keras.Model, force: bool = False) -> None:
        if active and optimizers_of(self) and skipped_step_rollback.install(self):
            self.make_train_function(force=True)  # the guard's own, which comes here again
            return
        original(self, force)
        compiled_under = _compiled_under.get(self)
        if is_float16_enabled() and compiled_under in (None, *FLOAT16_POLICIES):
            was_compiled = compiled_under is not None
            misuse_warnings.when_built(self, lambda: misuse_warnings.warn_of_training(self, was_compiled))

    return make_train_function


_PATCHES = {
    "compile": _compile_patch,
    "make_train_function": _make_train_function_patch,
    trainer_fixes.ADD_LOSSES: trainer_fixes.adding_losses_in_float32,
}
