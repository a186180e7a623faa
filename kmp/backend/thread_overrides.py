"""Methods of objects that one thread replaces, while others use their own."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from kmp.backend.undo import Undos

Method = Callable[..., Any]


class _MethodByThread:
    """A method of one object, in place of which a thread may call another function.

    Attributes:
        before: What the object has as attribute without it.
        original: The method.
        by_thread: The replacements of each thread; the last one applies.
    """

    def __init__(self, instance: Any, name: str) -> None:
        self.before = vars(instance).get(name)
        self.original: Method = getattr(instance, name)
        self.by_thread: dict[int, list[tuple[object, Method]]] = {}
        functools.update_wrapper(self, self.original)

    def in_this_thread(self) -> Method:
        """Returns what this thread calls."""
        found = self.by_thread.get(threading.get_ident())
        return found[-1][1] if found else self.original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.in_this_thread()(*args, **kwargs)


_lock = threading.RLock()


@contextlib.contextmanager
def own_method(instance: Any, name: str, make: Callable[[Method], Method]) -> Iterator[None]:
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
    attributes, thread, key = vars(instance), threading.get_ident(), object()

    def add() -> None:
        with Undos() as undos, undos.first_attempt():
            undos.lock(_lock)
            method = attributes.get(name)
            if not isinstance(method, _MethodByThread):
                method = _MethodByThread(instance, name)
            own = make(method.in_this_thread())
            method.by_thread.setdefault(thread, []).append((key, own))
            attributes[name] = method

    def remove() -> None:
        with Undos() as undos, undos.first_attempt():
            undos.lock(_lock)
            method = attributes.get(name)
            if not isinstance(method, _MethodByThread):
                return
            left = [each for each in method.by_thread.pop(thread, []) if each[0] is not key]
            if left:
                method.by_thread[thread] = left
            if method.by_thread:
                return
            if method.before is None:
                del attributes[name]
            else:
                attributes[name] = method.before

    with Undos() as undos, undos.first_attempt():
        undos.add(remove)
        add()
        yield
