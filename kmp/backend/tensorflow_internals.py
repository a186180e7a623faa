"""TensorFlow's private functions that kmp uses. TensorFlow 2.21 has no public name for what they return or do."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context, record
from tensorflow.python.framework import config, op_callbacks
from tensorflow.python.ops import gen_random_ops
from tensorflow.python.util import _pywrap_util_port

from kmp.backend.patching import Replacement
from kmp.utils import FORMATS_16_BIT


def is_deterministic() -> bool:
    """Whether `tf.config.experimental.enable_op_determinism` was called."""
    return config.is_op_determinism_enabled()


def is_onednn_enabled() -> bool:
    """Whether TensorFlow computes with oneDNN on the CPU."""
    return bool(_pywrap_util_port.IsMklEnabled())


@contextlib.contextmanager
def watching_operations(
    observe: Callable[[str, Sequence[tf.Tensor], Sequence[tf.Tensor]], None],
) -> Iterator[None]:
    """Calls a function after each operation that this thread runs eagerly, like `enable_check_numerics` in TensorFlow.

    Args:
        observe: Gets the type of the operation, its inputs and its outputs. It must not run
            operations itself, but may read tensors with `numpy`.
    """

    def callback(
        operation: str | bytes,
        inputs: Any,
        attributes: Any,
        outputs: Any,
        op_name: Any = None,
        graph: Any = None,
    ) -> None:
        del attributes, op_name
        if graph is None:
            observe(
                operation.decode() if isinstance(operation, bytes) else operation, inputs, outputs
            )

    op_callbacks.add_op_callback(callback)
    try:
        yield
    finally:
        op_callbacks.remove_op_callback(callback)


class RandomNumbers:
    """A stream of random numbers: the `position` of the next draw, which may be set back."""

    def __init__(self) -> None:
        self.position = 0


@contextlib.contextmanager
def equal_random_numbers() -> Iterator[RandomNumbers]:
    """Makes eager `tf.random.normal`, `uniform` and `truncated_normal` draw the same numbers in each such context.

    In every dtype: those of 16 bits are rounded from float32. Their own operations continue a
    stream that nobody can set back. What this thread draws after the context is as if there had
    been none: the generator of seeds for such operations, if there is a seed, is restored. As with
    `after_each_gradient`, the caller holds a lock.
    """
    owner, numbers = threading.get_ident(), RandomNumbers()
    generator = getattr(context.context(), "_rng", None)

    def make(
        draw: Callable[..., tf.Tensor], original: Callable[..., tf.Tensor]
    ) -> Callable[..., tf.Tensor]:
        @functools.wraps(original)
        def operation(*args: Any, **kwargs: Any) -> tf.Tensor:
            if threading.get_ident() != owner or not tf.executing_eagerly():
                return original(*args, **kwargs)
            numbers.position += 1
            kept = {
                name: value
                for name, value in kwargs.items()
                if name not in ("seed", "seed2", "name")
            }
            return draw(*args, **kept, seed=(numbers.position, 0))

        return operation

    draws: dict[str, Callable[..., tf.Tensor]] = {
        "random_standard_normal": functools.partial(_draw_floats, tf.random.stateless_normal),
        "random_uniform": functools.partial(
            _draw_floats, tf.random.stateless_uniform, below_one=True
        ),
        "random_uniform_int": _draw_integers,
        "truncated_normal": functools.partial(_draw_floats, tf.random.stateless_truncated_normal),
    }
    with contextlib.ExitStack() as stack:
        if generator:
            stack.callback(generator.setstate, generator.getstate())
        for name, draw in draws.items():
            stack.callback(Replacement(gen_random_ops, name, functools.partial(make, draw)).remove)
        yield numbers


def _draw_floats(
    draw: Callable[..., tf.Tensor],
    shape: Any,
    dtype: Any,
    *,
    seed: Sequence[int],
    below_one: bool = False,
) -> tf.Tensor:
    number_format = FORMATS_16_BIT.get(tf.as_dtype(dtype).name)
    if number_format is None:
        return draw(shape, seed, dtype=dtype)
    numbers = tf.cast(draw(shape, seed, dtype=tf.float32), dtype)
    return (
        tf.minimum(numbers, 1.0 - 2.0 ** -(number_format.fraction_bits + 1))
        if below_one
        else numbers
    )


def _draw_integers(shape: Any, minval: Any, maxval: Any, *, seed: Sequence[int]) -> tf.Tensor:
    return tf.random.stateless_uniform(
        shape, seed, minval, maxval, tf.convert_to_tensor(minval).dtype
    )


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
