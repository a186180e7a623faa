"""Changes that are undone at the end of a context, also if Ctrl-C ends it in the middle."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")
# What a function with the decorator `contextlib.contextmanager` returns.
Context = contextlib._GeneratorContextManager


class ThreadLock:
    """A lock that a thread may take and release again and again.

    Ctrl-C in the middle of `with threading.Lock()` may leave that locked. Here `release` is added
    to `Undos` before `acquire` is called, and may run twice.
    """

    def __init__(self) -> None:
        self._owner: dict[str, int] = {}

    def acquire(self) -> None:
        """Waits until no other thread has the lock, and takes it."""
        own = threading.get_ident()
        while self._owner.setdefault("thread", own) != own:
            time.sleep(1e-4)

    def release(self) -> None:
        """Releases the lock if this thread has it."""
        if self._owner.get("thread") == threading.get_ident():
            self._owner.clear()


class Undos:
    """What to undo at the end of a context, the last change first.

    Enter it twice: a `KeyboardInterrupt` may come in the middle of the first exit. The second one
    undoes what is left.

    Example:
    >>> setting = {"value": 1}
    >>> with Undos() as undos, undos:
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

    def lock(self, lock: ThreadLock) -> None:
        """Takes a lock until the end of the context."""
        self.add(lock.release)
        lock.acquire()

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
