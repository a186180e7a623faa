"""Applies the patches of the inventory while there is a reason to, and removes them."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

from kmp.backend.inventory import PATCHES, Patch, Reason
from kmp.backend.private_names import resolve, warn_of_missing
from kmp.backend.undo import Undos

_MISSING = object()


class Replacement:
    """Replaces an attribute of a class or module by what `make` returns for the original.

    Nothing is changed before `apply`.

    Attributes:
        is_applied: Whether `apply` has been completed.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._owner, self._name = owner, name
        self._original = self.current()
        self._replacement = make(None if self._original is _MISSING else self._original)
        self.is_applied = False

    def current(self) -> Any:
        """Returns what the owner has now."""
        return vars(self._owner).get(self._name, _MISSING)

    def apply(self) -> None:
        """Sets the replacement."""
        setattr(self._owner, self._name, self._replacement)
        self.is_applied = True

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


class Patches:
    """Applies each patch of a table while any of its reasons holds.

    A patch whose owner or name is missing in the installed version is left out, with one warning.
    A patch that another library has wrapped is left in place when it should be removed, and is used
    again later if it is still there.

    Args:
        table: The patches. When several are applied, the first one of the table comes first.
    """

    def __init__(self, table: Sequence[Patch]) -> None:
        self._by_reason = {each: [p for p in table if each in p.when] for each in Reason}
        self._holders: dict[Reason, list[object]] = {reason: [] for reason in Reason}
        # Registered before they are applied: an interrupt between leaves none that nobody removes.
        self._replacements: dict[Patch, Replacement] = {}
        self._left: dict[Patch, tuple[Replacement, Any]] = {}
        self._in_use: WeakSet[Any] = WeakSet()
        self._lock = threading.RLock()

    def hold(self, reason: Reason, holder: object) -> None:
        """Gives a reason, until each holder has released it. An object holds it once."""
        with Undos() as undos, undos.first_attempt():
            undos.lock(self._lock)
            self._holders[reason] = [*self._others(reason, holder), holder]
            self._update(reason)

    def release(self, reason: Reason, holder: object) -> None:
        """Takes the reason of a holder back; does nothing if it has none."""
        with Undos() as undos, undos.first_attempt():
            undos.lock(self._lock)
            self._holders[reason] = self._others(reason, holder)
            self._update(reason)

    @contextlib.contextmanager
    def holding(self, reason: Reason) -> Iterator[None]:
        """Gives a reason in the context."""
        holder = object()
        with Undos() as undos, undos.first_attempt():
            undos.add(functools.partial(self.release, reason, holder))
            self.hold(reason, holder)
            yield

    def use(self, instance: Any) -> None:
        """Applies the patches of `Reason.IN_USE` while an object lives.

        They are removed by the first `release_unused` after it.
        """
        with Undos() as undos, undos.first_attempt():
            undos.lock(self._lock)
            self._in_use.add(instance)
            if not self.is_held(Reason.IN_USE):
                self._holders[Reason.IN_USE] = [self._in_use]
                self._update(Reason.IN_USE)

    def release_unused(self) -> None:
        """Removes the patches of `Reason.IN_USE` if no object that needs them is alive."""
        with Undos() as undos, undos.first_attempt():
            undos.lock(self._lock)
            if not self._in_use:
                self._holders[Reason.IN_USE] = []
                self._update(Reason.IN_USE)

    def is_held(self, reason: Reason) -> bool:
        """Whether any holder gives this reason."""
        return bool(self._holders[reason])

    def applied(self) -> list[Patch]:
        """Returns the patches that are applied now."""
        return [patch for patch, each in self._replacements.items() if each.is_applied]

    def _others(self, reason: Reason, holder: object) -> list[object]:
        return [each for each in self._holders[reason] if each is not holder]

    def _update(self, reason: Reason) -> None:
        """Applies and removes the patches that have this reason.

        If it is interrupted, the next update for the reason does the rest.
        """
        patches = self._by_reason[reason]
        if self.is_held(reason):
            for patch in patches:
                if patch not in self._replacements:
                    self._register(patch)
                replacement = self._replacements.get(patch)
                if replacement is not None and not replacement.is_applied:
                    replacement.apply()
            return
        for patch in reversed(patches):
            replacement = self._replacements.get(patch)
            if replacement is None or any(map(self.is_held, patch.when)):
                continue
            if not replacement.remove():
                self._left[patch] = replacement, replacement.current()
            del self._replacements[patch]

    def _register(self, patch: Patch) -> None:
        """Makes the replacement, or takes the one that was left.

        Warns instead if a name is missing.
        """
        replacement, left = self._left.pop(patch, (None, None))
        if replacement is not None and replacement.current() is left:
            self._replacements[patch] = replacement
            return
        try:
            owner = _defining_class(resolve(patch.owner), patch)
        except (ImportError, AttributeError):
            warn_of_missing(f"{patch.owner}.{patch.name}", patch.promise)
            return
        # A replacement made with `functools.wraps` has the module of the original: autograph does
        # not convert functions of Keras and TensorFlow, and so not these either.
        self._replacements[patch] = Replacement(owner, patch.name, resolve(patch.make))


def _defining_class(owner: Any, patch: Patch) -> Any:
    """Returns the owner, or the base class of it that defines the name.

    A replacement on another class would count as a user's override: Keras' `compile_from_config`
    does not compile a loaded model whose class overrides `compile`.
    """
    if patch.is_new:
        return owner
    for each in getattr(owner, "__mro__", [owner]):
        if patch.name in vars(each):
            return each
    raise AttributeError(patch.name)


patches = Patches(PATCHES)
