"""Sets a `ContextVar` for the code in a `with` block, in this thread."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

Value = TypeVar("Value")


@contextlib.contextmanager
def context_value(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Sets a variable in the context, and restores it.

    Example:
    >>> from contextvars import ContextVar
    >>> from kmp.utils.context_values import context_value
    >>> depth = ContextVar("depth", default=0)
    >>> with context_value(depth, 1):
    ...     depth.get()
    1
    >>> depth.get()
    0
    """
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)
