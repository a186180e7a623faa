"""The division of a sparse gradient by a table, in an optimizer's update."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from kmp.backend.private_names import find
from kmp.backend.thread_overrides import own_method


@contextlib.contextmanager
def divisions_of_present_rows() -> Iterator[None]:
    """Makes the division of a sparse gradient read only the rows that the gradient has.

    Keras searches the whole divisor for 0 and NaN and branches, because a quotient is NaN there
    without a gradient too. Divisors of its optimizers are roots of sums of squares and an epsilon,
    and a skipped step keeps NaN out of them. In Adagrad's step with eight tables, the search reads
    all their rows, and the host waits for the device eight times. It acts in this thread only.
    """
    module = find("keras.src.backend.tensorflow.numpy")
    with own_method(module, "divide", _of_rows) if module else contextlib.nullcontext():
        yield


def _of_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def divide(x1: Any, x2: Any) -> Any:
        if not isinstance(x1, tf.IndexedSlices) or not _has_rows(x2, x1.values.shape.rank):
            return original(x1, x2)
        rows = original(x1.values, tf.gather(x2, x1.indices))
        return tf.IndexedSlices(rows, x1.indices, x1.dense_shape)

    return divide


def _has_rows(divisor: Any, rank: int) -> bool:
    """Whether a divisor has a row for each one of the table, which has this rank.

    A number, or a row for all rows of the table, is not enough. The number of rows of the table is
    not known here: a divisor of the same rank that can be broadcast has as many rows, or one.
    """
    if not tf.is_tensor(divisor) or divisor.shape.rank != rank:
        return False
    return divisor.shape[0] not in (None, 1)
