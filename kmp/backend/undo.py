"""Changes that are undone at the end of a context, also if Ctrl-C ends it in the middle."""

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")
# What a function with the decorator `contextlib.contextmanager` returns.
Context = contextlib._GeneratorContextManager


class Undos:
    """What to undo at the end of a context, the last change first.

    Enter `first_attempt` too: a `KeyboardInterrupt` may come in the middle of its exit, or before
    the first line of it. The exit of the context around it then undoes what is left.

    Example:
    >>> from kmp.backend.undo import Undos
    >>> setting = {"value": 1}
    >>> with Undos() as undos, undos.first_attempt():
    ...     undos.add(lambda: setting.update(value=1))  # before the change
    ...     setting["value"] = 2
    >>> setting
    {'value': 1}
    """

    def __init__(self) -> None:
        self._undos: list[Callable[[], object]] = []

    def add(self, undo: Callable[[], object]) -> None:
        """Adds a function; call this before the change that it undoes.

        Args:
            undo: Restores what was before. It may be called twice, and before the change.
        """
        self._undos.append(undo)

    def enter(self, context: Context[Value]) -> Value:
        """Enters a context until the end of this one.

        Args:
            context: What a function with the decorator `contextlib.contextmanager` returns. It is
                closed: at its end, only its `finally` and `with` blocks run.
        """
        self.add(context.gen.close)
        return context.__enter__()

    def lock(self, lock: threading.RLock) -> None:
        """Takes a lock until the end of the context.

        Ctrl-C at the end of `with lock` may leave it locked.
        """
        self.add(functools.partial(_release, lock))
        lock.acquire()

    def first_attempt(self) -> "Undos":
        """Returns a context that undoes all at its end."""
        return self

    def __enter__(self) -> "Undos":
        return self

    def __exit__(self, *_: object) -> None:
        while self._undos:
            try:
                self._undos[-1]()
            except Exception:
                self._undos.pop()  # the second exit undoes the others
                raise
            self._undos.pop()


def _release(lock: threading.RLock) -> None:
    with contextlib.suppress(RuntimeError):  # this thread has not acquired it, or released it
        lock.release()
