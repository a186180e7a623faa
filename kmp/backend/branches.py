"""Branches that write variables, where the graph supports them."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras import ops

from kmp.backend import xla


def call_if(condition: Any, function: Callable[[], None]) -> None:
    """Calls a function in a branch, or without one where branches must not write variables.

    XLA copies every variable that a branch writes, and under a strategy, a variable that is aggregated over replicas
    cannot be written in one. Without a branch, a function must write the old values where `condition` is false.

    Args:
        condition: Scalar bool tensor.
        function: Writes variables.
    """
    if xla.is_tracing() or tf.distribute.has_strategy():
        function()
    else:
        ops.cond(condition, function, lambda: None)
