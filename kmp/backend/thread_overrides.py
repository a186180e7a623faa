"""Attributes and methods of objects that one thread replaces, while others use their own."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from kmp.backend.inventory import Reason
from kmp.backend.patching import patches
from kmp.backend.undo import Context, Undos


class _Override:
    """A value of an attribute of an object in one thread."""

    def __init__(self, instance: Any, name: str, value: Any) -> None:
        self.instance = instance  # kept: while it lives, no other object has its id
        self.key = threading.get_ident(), id(instance), name
        self.value = value

    def add(self) -> None:
        _overrides.setdefault(self.key, []).append(self)

    def remove(self) -> None:
        left = [each for each in _overrides.get(self.key, ()) if each is not self]
        if left:
            _overrides[self.key] = left
        else:
            _overrides.pop(self.key, None)


# By thread, object and name. The last one applies.
_overrides: dict[tuple[int, int, str], list[_Override]] = {}


def _own_value(instance: Any, name: str) -> _Override | None:
    """Returns what this thread has in place of an attribute, if anything."""
    found = _overrides.get((threading.get_ident(), id(instance), name))
    return found[-1] if found else None


def has_own_attributes() -> bool:
    """Whether this thread has another attribute of any object: it passes in another precision."""
    return any(thread == threading.get_ident() for thread, *_ in list(_overrides))


@contextlib.contextmanager
def own_attribute(instance: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an object another attribute in the context, for this thread only.

    Args:
        instance: A layer or a variable of Keras.
        name: `"_dtype_policy"` of a layer, or `"_dtype"` of a variable: the class of the object
            looks these up by thread during a replay.
        value: The value.
    """
    override = _Override(instance, name, value)
    with Undos() as undos, undos.first_attempt():
        undos.enter(patches.holding(Reason.REPLAY))
        undos.add(override.remove)
        override.add()
        yield


class _AttributeByThread:
    """A descriptor for an attribute of instances, of which a thread may have another value."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            raise AttributeError(self._name)
        override = _own_value(instance, self._name)
        if override:
            return override.value
        try:
            return vars(instance)[self._name]
        except KeyError:
            raise AttributeError(self._name) from None

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self._name] = value

    def __delete__(self, instance: Any) -> None:
        del vars(instance)[self._name]


def policy_attribute(original: None) -> _AttributeByThread:
    """Patches `keras.Layer` to look up the dtype policy of a layer by thread."""
    return _AttributeByThread("_dtype_policy")


def variable_dtype_attribute(original: None) -> _AttributeByThread:
    """Patches `keras.Variable` to look up the dtype of a variable by thread."""
    return _AttributeByThread("_dtype")


@contextlib.contextmanager
def dtype_policies_replaced(
    policies: Iterable[tuple[keras.Layer, keras.DTypePolicy]],
) -> Iterator[None]:
    """Sets policies of layers in the context, for this thread only.

    The public setter would change a `DTypePolicyMap`, and quantize.
    """
    with Undos() as undos, undos.first_attempt():
        for layer, policy in policies:
            undos.enter(own_attribute(layer, "_dtype_policy", policy))
        yield


def dtype_outside_of_passes(layer: keras.Layer) -> str:
    """Returns the dtype in which a layer computes, whatever this thread has in its place."""
    policy = vars(layer)["_dtype_policy"]
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        policy = policy[layer.path]
    return str(policy.compute_dtype)


def variable_dtype_replaced(variable: keras.Variable, dtype: str) -> Context[None]:
    """Sets the dtype to which Keras converts what this thread assigns to a variable.

    The dtype has no public setter.
    """
    return own_attribute(variable, "_dtype", dtype)


class _MethodByThread:
    """A method of one object, in place of which a thread may call another function."""

    def __init__(self, instance: Any, name: str) -> None:
        self.before = vars(instance).get(name)
        self.original = getattr(instance, name)
        self.users: list[_Override] = []
        self._instance, self._name = instance, name
        functools.update_wrapper(self, self.original)

    def in_this_thread(self) -> Callable[..., Any]:
        """Returns what this thread calls."""
        override = _own_value(self._instance, self._name)
        return override.value if override else self.original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.in_this_thread()(*args, **kwargs)


_method_lock = threading.RLock()


@contextlib.contextmanager
def own_method(
    instance: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replaces a method of an object in the context, in this thread only.

    Other threads that call the method meanwhile get the object's own. Contexts of several threads
    may overlap, and end in any order. Keras' `__setattr__`, which would track the function, is not
    called.

    Args:
        instance: The object.
        name: The name of the method.
        make: Returns the replacement for the method that it gets. That one, and not the attribute
            of the object, is what a replacement may call.
    """
    override = _Override(instance, name, None)
    with Undos() as undos, undos.first_attempt():
        undos.add(functools.partial(_remove_method, override, name))
        _add_method(override, name, make)
        yield


def _add_method(
    override: _Override, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    attributes = vars(override.instance)
    with Undos() as undos, undos.first_attempt():
        undos.lock(_method_lock)
        method = attributes.get(name)
        if not isinstance(method, _MethodByThread):
            method = _MethodByThread(override.instance, name)
        override.value = make(method.in_this_thread())
        method.users.append(override)
        override.add()
        attributes[name] = method


def _remove_method(override: _Override, name: str) -> None:
    with Undos() as undos, undos.first_attempt():
        undos.lock(_method_lock)
        override.remove()
        attributes = vars(override.instance)
        method = attributes.get(name)
        if not isinstance(method, _MethodByThread):
            return
        method.users = [each for each in method.users if each is not override]
        if method.users:
            return
        if method.before is None:
            del attributes[name]
        else:
            attributes[name] = method.before
