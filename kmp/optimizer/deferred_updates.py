"""Updates that wait until the compiled part of a step, in which `apply` was called, has ended.

Replicas synchronize in an update, which compiled code cannot. So `apply` only records its gradients
there, and the update is taken outside.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import NamedTuple

import keras
import tensorflow as tf

from kmp.gradients.tensor_groups import Gradients
from kmp.utils.context_values import context_value


class DeferredUpdate(NamedTuple):
    """An update that `apply` has deferred.

    Attributes:
        gradients: Those that `apply` got, as tensors of the compiled part.
        take: Takes the update, with these gradients as tensors of the graph around that part.
        written: The variables that the update writes.
        read: Those that it only reads.
        position: How many operations the compiled part had when `apply` was called.
    """

    gradients: Gradients
    take: Callable[[Gradients], None]
    written: list[keras.Variable]
    read: list[keras.Variable]
    position: int


class DeferredUpdates:
    """The updates of a compiled part of a step, in the order of the calls of `apply`."""

    def __init__(self) -> None:
        self.updates: list[DeferredUpdate] = []
        self._graph = tf.compat.v1.get_default_graph()

    def add(
        self,
        gradients: Gradients,
        take: Callable[[Gradients], None],
        written: list[keras.Variable],
        read: list[keras.Variable],
    ) -> None:
        """Adds an update.

        Raises:
            ValueError: In a branch or loop of the part, which decides whether to update.
        """
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise ValueError("`apply` is called in a branch, a loop or a function of the graph")
        position = len(self._graph.get_operations())
        self.updates.append(DeferredUpdate(gradients, take, written, read, position))


# That of the compiled part that this thread traces.
_current: ContextVar[DeferredUpdates | None] = ContextVar("_current", default=None)


@contextlib.contextmanager
def updates_deferred() -> Iterator[list[DeferredUpdate]]:
    """Makes each `apply` in the context defer its update, and yields the list that gets them.

    Use it in the function that becomes the compiled part.
    """
    collected = DeferredUpdates()
    with context_value(_current, collected):
        yield collected.updates


def deferring() -> DeferredUpdates | None:
    """Returns what gets the updates where they are deferred; else `None`."""
    return _current.get()
