"""What no public function of TensorFlow does with eager operations: watch them, and pause and watch tapes."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

Observer = Callable[[str, Sequence[tf.Tensor], Sequence[tf.Tensor]], None]


@contextlib.contextmanager
def watching_operations(observe: Observer) -> Iterator[None]:
    """Calls a function after each operation that this thread runs eagerly in the context.

    `tf.debugging.enable_check_numerics` works like this. No public function registers such a callback.

    Args:
        observe: Gets the type of the operation, its inputs and its outputs. It must not run operations itself, but may
            read tensors with `numpy`.
    """
    from tensorflow.python.framework import op_callbacks

    def callback(
        operation: str | bytes,
        inputs: Sequence[Any],
        attributes: Any,
        outputs: Sequence[Any],
        op_name: Any = None,
        graph: Any = None,
    ) -> None:
        del attributes, op_name
        if graph is None:
            observe(operation.decode() if isinstance(operation, bytes) else operation, inputs, outputs)

    op_callbacks.add_op_callback(callback)
    try:
        yield
    finally:
        op_callbacks.remove_op_callback(callback)


def without_tapes() -> contextlib.AbstractContextManager[None]:
    """Stops the recording of all tapes in the context. The public method of a tape stops that tape only."""
    from tensorflow.python.eager import record

    return record.stop_recording()


@contextlib.contextmanager
def after_each_gradient(before: Callable[[], Any], after: Callable[[Any], None]) -> Iterator[None]:
    """Calls `after` with what `before` returned, around each `tf.GradientTape.gradient` in the context."""
    original = tf.GradientTape.gradient

    @functools.wraps(original)
    def gradient(self: tf.GradientTape, *args: Any, **kwargs: Any) -> Any:
        state = before()
        try:
            return original(self, *args, **kwargs)
        finally:
            after(state)

    tf.GradientTape.gradient = gradient
    try:
        yield
    finally:
        tf.GradientTape.gradient = original
