"""TensorFlow's private functions that kmp uses. TensorFlow 2.21 has no public name for what they return or do."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context, record
from tensorflow.python.framework import config, op_callbacks
from tensorflow.python.util import _pywrap_util_port

from kmp.backend.patching import Replacement


def is_deterministic() -> bool:
    """Whether `tf.config.experimental.enable_op_determinism` was called."""
    return config.is_op_determinism_enabled()


def is_onednn_enabled() -> bool:
    """Whether TensorFlow computes with oneDNN on the CPU."""
    return bool(_pywrap_util_port.IsMklEnabled())


@contextlib.contextmanager
def watching_operations(observe: Callable[[str, Sequence[tf.Tensor], Sequence[tf.Tensor]], None]) -> Iterator[None]:
    """Calls a function after each operation that this thread runs eagerly, like `enable_check_numerics` in TensorFlow.

    Args:
        observe: Gets the type of the operation, its inputs and its outputs. It must not run operations itself, but may
            read tensors with `numpy`.
    """

    def callback(
        operation: str | bytes, inputs: Any, attributes: Any, outputs: Any, op_name: Any = None, graph: Any = None
    ) -> None:
        del attributes, op_name
        if graph is None:
            observe(operation.decode() if isinstance(operation, bytes) else operation, inputs, outputs)

    op_callbacks.add_op_callback(callback)
    try:
        yield
    finally:
        op_callbacks.remove_op_callback(callback)


@contextlib.contextmanager
def eager_seeds_restored() -> Iterator[None]:
    """Restores the generator from which eager operations such as `tf.random.normal` draw seeds, if there is a seed."""
    generator = getattr(context.context(), "_rng", None)
    state = generator.getstate() if generator else None
    try:
        yield
    finally:
        if generator:
            generator.setstate(state)


def without_tapes() -> contextlib.AbstractContextManager[None]:
    """Stops the recording of all tapes in the context. The public method of a tape stops that tape only."""
    return record.stop_recording()


@contextlib.contextmanager
def after_each_gradient(before: Callable[[], Any], after: Callable[[Any], None]) -> Iterator[None]:
    """Calls `after` with what `before` returned, around each `tf.GradientTape.gradient` of this thread in the context.

    Of two such contexts that overlap in two threads, one would stay: the caller holds a lock.
    """
    owner = threading.get_ident()

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def gradient(self: tf.GradientTape, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != owner:
                return original(self, *args, **kwargs)
            state = before()
            try:
                return original(self, *args, **kwargs)
            finally:
                after(state)

        return gradient

    replacement = Replacement(tf.GradientTape, "gradient", make)
    try:
        yield
    finally:
        replacement.remove()
