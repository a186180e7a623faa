"""Applies the patches of the inventory while there is a reason to, and removes them."""

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from kmp.backend.inventory import PATCHES, Patch, Reason
from kmp.backend.private_names import resolve, warn_of_missing
from kmp.backend.undo import Undos

_MISSING = object()


class Replacement:
    """Replaces an attribute of a class or module by what `make` returns for the original.

    Nothing is changed before `apply`.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._owner, self._name = owner, name
        self._original = self.current()
        self._replacement = make(None if self._original is _MISSING else self._original)

    def current(self) -> Any:
        """Returns what the owner has now."""
        return vars(self._owner).get(self._name, _MISSING)

    def apply(self) -> None:
        """Sets the replacement."""
        setattr(self._owner, self._name, self._replacement)

    def remove(self) -> bool:
        """Restores the original; returns `False` if another library has replaced it since.

        What that library has set may call the replacement, which must then pass the call on.
        """
        current = self.current()
        if current is not self._replacement:
            return current is self._original
        if self._original is _MISSING:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._original)
        return True


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Replacement:
    """Returns a replacement that is applied."""
    replacement = Replacement(owner, name, make)
    replacement.apply()
    return replacement


def replace_policy_state(current: Callable[[], Any]) -> Iterator[Replacement]:
    """Makes a policy the global one for all threads, except those that set another policy later; yields the patches.

    Keras 3.15 stores its global policy by thread, and `keras.backend.clear_session` deletes it:
    layers are float32 again. No public name reaches that state. `current` returns the settings in
    force, or `None`: their `dtype_policy`, and as `state_name` the name under which Keras' state of
    a thread stores a policy that is set there in the meantime.
    """

    def reading(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def get_global_attribute(name: str, *args: Any, **kwargs: Any) -> Any:
            settings = current() if name == "dtype_policy" else None
            if settings is None:
                return original(name, *args, **kwargs)
            return original(settings.state_name) or settings.dtype_policy

        return get_global_attribute

    def writing(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def set_global_attribute(name: str, value: Any) -> None:
            settings = current() if name == "dtype_policy" else None
            original(name if settings is None else settings.state_name, value)

        return set_global_attribute

    try:
        state = importlib.import_module("keras.src.backend.common.global_state")
        yield replaced(state, "get_global_attribute", reading)
        yield replaced(state, "set_global_attribute", writing)
    except (ImportError, KeyError) as error:
        raise RuntimeError(
            f"This version of kmp does not support Keras {keras.__version__}: update kmp."
        ) from error


class Patches:
    """Applies each patch of a table while any of its reasons holds.

    A patch whose owner or name is missing in the installed version is left out, with one warning.
    A patch that another library has wrapped is left in place when it should be removed, and is used
    again later if it is still there.

    Args:
        table: The patches. When several are applied, the first one of the table comes first.
    """

    def __init__(self, table: Sequence[Patch]) -> None:
        self._table = table
        self._holders: dict[Reason, list[object]] = {reason: [] for reason in Reason}
        self._applied: dict[Patch, Replacement] = {}
        self._left: dict[Patch, tuple[Replacement, Any]] = {}
        self._lock = threading.RLock()

    def hold(self, reason: Reason, holder: object) -> None:
        """Gives a reason, until each holder has released it. An object holds it once."""
        with self._lock:
            self._holders[reason] = [*self._others(reason, holder), holder]
            self._update()

    def release(self, reason: Reason, holder: object) -> None:
        """Takes the reason of a holder back; does nothing if it has none."""
        with self._lock:
            self._holders[reason] = self._others(reason, holder)
            self._update()

    @contextlib.contextmanager
    def holding(self, reason: Reason) -> Iterator[None]:
        """Gives a reason in the context."""
        holder = object()
        with Undos() as undos, undos:
            undos.add(functools.partial(self.release, reason, holder))
            self.hold(reason, holder)
            yield

    def is_held(self, reason: Reason) -> bool:
        """Whether any holder gives this reason."""
        return bool(self._holders[reason])

    def applied(self) -> list[Patch]:
        """Returns the patches that are applied now."""
        return list(self._applied)

    def _others(self, reason: Reason, holder: object) -> list[object]:
        return [each for each in self._holders[reason] if each is not holder]

    def _update(self) -> None:
        """Applies and removes patches. If it is interrupted, the next update does the rest."""
        for patch in self._table:
            if patch not in self._applied and any(map(self.is_held, patch.when)):
                self._apply(patch)
        for patch, replacement in reversed(list(self._applied.items())):
            if not any(map(self.is_held, patch.when)):
                if not replacement.remove():
                    self._left[patch] = replacement, replacement.current()
                del self._applied[patch]

    def _apply(self, patch: Patch) -> None:
        replacement, left = self._left.pop(patch, (None, None))
        if replacement is not None and replacement.current() is left:
            self._applied[patch] = replacement
            return
        try:
            owner = _defining_class(resolve(patch.owner), patch)
        except (ImportError, AttributeError):
            warn_of_missing(f"{patch.owner}.{patch.name}", patch.promise)
            return
        replacement = Replacement(owner, patch.name, resolve(patch.make))
        self._applied[patch] = replacement  # before the change: an interrupt leaves nothing
        replacement.apply()


def _defining_class(owner: Any, patch: Patch) -> Any:
    """Returns the owner, or the base class of it that defines the name.

    Keras' `compile_from_config` takes a `compile` of `keras.Model` for a user's override.
    """
    if patch.is_new:
        return owner
    for each in getattr(owner, "__mro__", [owner]):
        if patch.name in vars(each):
            return each
    raise AttributeError(patch.name)


patches = Patches(PATCHES)
