"""Watching the operations that TensorFlow runs eagerly."""

import contextlib
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
