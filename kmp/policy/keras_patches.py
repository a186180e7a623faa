"""What kmp patches in Keras while it is enabled.

It patches `compile`, `make_train_function` and `losses` of `keras.Model`, `__init__` of `keras.Layer` (see
`kmp.layers.third_party`), the state that stores the global dtype policy (see `kmp.backend.process_policy`), and for
several workers two more functions of the trainer (see `kmp.backend.trainer_fixes`). `guarded_training` wraps
`train_step` of single models.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import keras

from kmp import layers
from kmp.backend import Replacement, compute_dtypes, defining_class, replace_policy_state, trainer_fixes
from kmp.optimizer import LossScaleOptimizer
from kmp.policy import grappler_rewrite, guarded_training, misuse_warnings
from kmp.policy.active_settings import FLOAT16_POLICIES, active, current_settings, is_float16_enabled
from kmp.policy.model_optimizers import optimizers_of
from kmp.policy.optimizer_wrapping import wrap_for_compile
from kmp.utils import FLOAT16

_patches: list[Replacement | layers.ThirdPartyPatch] = []
_multi_worker_patches: list[Replacement] = []
_policy_at_compile: WeakKeyDictionary[keras.Model, str] = WeakKeyDictionary()


def update_patches() -> None:
    """Applies the patches if `enable` or the graph rewrite is active, and removes them otherwise."""
    if bool(_patches) == bool(active or grappler_rewrite.dtype()):
        return
    if _patches:
        for patches in (_multi_worker_patches, _patches):
            while patches:
                patches.pop().remove()
        misuse_warnings.forget_issued_messages()
        return
    _patches.extend(replace_policy_state(current_settings))
    _patch_for_several_workers()
    # Patch the class that defines each method, not `keras.Model`: `compile_from_config` takes a `compile` defined there
    # for a user's override and then does not compile a loaded model.
    for name, make in _PATCHES.items():
        _patches.append(Replacement(defining_class(keras.Model, name), name, make))
    _patches.append(layers.ThirdPartyPatch(is_global=True))


def _patch_for_several_workers(model: keras.Model | None = None) -> None:
    if not _multi_worker_patches and trainer_fixes.needs_multi_worker_fixes(model):
        _multi_worker_patches.extend(trainer_fixes.apply_multi_worker_fixes())


def _compile_patch(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compile(self: keras.Model, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        if grappler_rewrite.dtype():
            grappler_rewrite.prepare(call.arguments, wrap_for_compile)
        if active:
            _prepare(self, call.arguments)
        original(*call.args, **call.kwargs)
        if isinstance(self.optimizer, LossScaleOptimizer):
            guarded_training.install(self)
        settings = current_settings()
        if settings:
            _policy_at_compile[self] = settings.policy
        if is_float16_enabled():
            misuse_warnings.warn_after_compile(self)

    return compile


def _prepare(model: keras.Model, arguments: dict[str, Any]) -> None:
    """Checks the arguments of `compile`, and wraps the optimizer in place if the model needs a loss scale."""
    misuse_warnings.check_distribution_arguments(model, arguments)
    _patch_for_several_workers(model)
    if arguments["auto_scale_loss"]:
        if FLOAT16.name in (compute_dtypes(model) or {model.compute_dtype}):
            arguments["optimizer"] = wrap_for_compile(arguments["optimizer"])
        arguments["auto_scale_loss"] = False  # Keras checks only the model's own policy, not those of its layers


def _make_train_function_patch(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def make_train_function(self: keras.Model, force: bool = False) -> None:
        if active and optimizers_of(self) and guarded_training.install(self):
            self.make_train_function(force=True)  # the guard's method, which calls this one again
            return
        with misuse_warnings.first_step_checked(self):
            original(self, force)
        policy_at_compile = _policy_at_compile.get(self)
        if is_float16_enabled() and policy_at_compile in (None, *FLOAT16_POLICIES):
            was_compiled = policy_at_compile is not None
            misuse_warnings.call_when_built(self, lambda: misuse_warnings.warn_before_training(self, was_compiled))

    return make_train_function


_PATCHES: dict[str, Callable[[Any], Any]] = {
    "compile": _compile_patch,
    "make_train_function": _make_train_function_patch,
    "losses": trainer_fixes.losses_in_float32,
}
