"""Parts of a step in graph mode that XLA compiles for a GPU.

TensorFlow runs each operation of a graph as a kernel of its own. XLA makes one kernel of all that
is elementwise, and of a reduction with what it reads, so that a compiled part reads 16 bits,
computes in float32 and writes 16 bits. The host launches it as one operation.

XLA compiles a part once for each function and shape of its inputs: all layers of one shape share a
program, and the last batch of an epoch needs another one.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

from kmp.backend import xla
from kmp.backend.custom_gradients import custom_gradient
from kmp.backend.private_names import find
from kmp.utils.context_values import context_value
from kmp.utils.float_formats import DTYPES_16_BIT

# Whether this thread traces a step whose parts are compiled.
_in_step: ContextVar[bool] = ContextVar("_in_step", default=False)


@contextlib.contextmanager
def in_step(compiles: bool = True) -> Iterator[None]:
    """Marks what this thread traces in the context as a step, whose graph stays in this process.

    Args:
        compiles: Whether XLA compiles parts of it.
    """
    with context_value(_in_step, compiles):
        yield


def can_compile(inputs: Any, of_any_size: bool = False) -> bool:
    """Whether XLA compiles a part of the graph that computes with a tensor.

    It does so for 16-bit tensors on a GPU, in the steps of `fit`, `evaluate`, `predict` and
    `kmp.guard`. Other graphs may be exported, and would then need XLA. It does not for a size that
    may differ in each batch, apart from the number of rows, because each size is compiled; and
    where XLA compiles all of the graph.

    Args:
        inputs: The tensor.
        of_any_size: Whether the part gets rounded sizes; see `with_rounded_rows`.
    """
    if tf.executing_eagerly() or not xla.has_gpu() or xla.is_tracing():
        return False
    if not isinstance(inputs, tf.Tensor) or inputs.dtype.name not in DTYPES_16_BIT:
        return False
    if not inputs.shape.rank or (None in inputs.shape[1:] and not of_any_size):
        return False
    return _in_step.get()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes XLA compile a function where a graph calls it.

    Args:
        function: A function without side effects. It takes tensors by position, and other values,
            which are hashable, by name.
    """

    @functools.wraps(function)
    def call(*tensors: tf.Tensor, **options: Any) -> Any:
        # A gradient of rows is one of all: an operation of the program would make it so anyway.
        tensors = tuple(map(tf.convert_to_tensor, tensors))
        specs = tuple(tf.TensorSpec(each.shape, each.dtype) for each in tensors)
        # A call of the program itself would warn that each new shape is traced.
        program = _program(function, specs, tuple(options.items()))
        return program.get_concrete_function(*specs)(*tensors)

    return call


# How many programs are kept for graphs that are traced later. A search over widths needs others for
# each width, and a second training of a model the same again: TensorFlow never frees what XLA has
# compiled, so that to compile it twice would cost memory too. A program takes 0.35 MB.
_KEPT_PROGRAMS = 256


@functools.lru_cache(maxsize=_KEPT_PROGRAMS)
def _program(function: Callable[..., Any], specs: tuple[tf.TensorSpec, ...], options: Any) -> Any:
    """Returns the program of a function for tensors of these shapes and dtypes.

    Graphs that call a program keep it too.
    """
    del specs  # which tell the programs apart

    def compute(*tensors: tf.Tensor) -> Any:
        return function(*tensors, **dict(options))

    compute.__name__ = function.__name__  # in the graph
    return tf.function(compute, jit_compile=True, autograph=False)


def with_rounded_rows(function: Callable[[tf.Tensor], tf.Tensor], rows: tf.Tensor) -> tf.Tensor:
    """Calls a function that is compiled for few of the numbers of rows that batches have.

    Copies of rows are added up to one of four numbers between two powers of two, and removed from
    the result. The host computes the number, from the shape: it does not wait for the device.

    Args:
        function: A function of a matrix, that computes each row by itself.
        rows: Tensor of shape `(rows, width)`.
    """
    count = tf.shape(rows)[0]
    with tf.device("CPU:0"):
        powers = tf.constant([2**exponent for exponent in range(31)])
        largest = tf.reduce_max(tf.where(powers <= count, powers, 1))
        step = tf.maximum(largest // 4, 1)
        padding = -count % step
    # Rows of zeros would give NaN without an epsilon. The results of the copies are not used.
    copies = tf.stop_gradient(rows[:padding])
    return function(tf.concat([rows, copies], 0))[:count]


def recomputed(
    function: Callable[..., tf.Tensor], x: tf.Tensor, /, *masks: tf.Tensor, **options: Any
) -> tf.Tensor:
    """Computes a function of a 16-bit tensor in float32, as one compiled kernel in each direction.

    Only the inputs are kept for the backward pass, which computes the function again.

    Args:
        function: The function of a float32 tensor, elementwise or a reduction over one axis.
        x: The 16-bit tensor.
        *masks: Further tensors for the function, which get no gradient.
        **options: Further arguments of the function, which are hashable.
    """
    arguments = tuple(options.items())

    def value(x: tf.Tensor, *masks: tf.Tensor) -> tf.Tensor:
        return _value(x, *masks, function=function, arguments=arguments)

    def gradients(upstream: tf.Tensor, x: tf.Tensor, *masks: tf.Tensor) -> Any:
        gradient = _gradient(x, upstream, *masks, function=function, arguments=arguments)
        return gradient, *(None for _ in masks)

    return with_gradients(value, gradients)(x, *masks)


def with_gradients(
    function: Callable[..., tf.Tensor], gradients: Callable[..., Any]
) -> Callable[..., tf.Tensor]:
    """Returns a compiled function of tensors with gradients that are compiled apart.

    Args:
        function: The function.
        gradients: Returns the gradient of each tensor, given that of the result and the tensors.
    """

    @custom_gradient
    def compute(*tensors: tf.Tensor) -> Any:
        return function(*without_tape(tensors)), lambda upstream: gradients(upstream, *tensors)

    return compute


def without_tape(tensors: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """Returns the arguments for a compiled function that has gradients of its own.

    A tape of a second derivative would make the function return what it computes on the way. A
    `tf.autodiff.ForwardAccumulator` follows the function itself.
    """
    tangents_of = find("tensorflow.python.eager.forwardprop_util:pack_tangents")
    has_tangents = tangents_of is None or bool(tangents_of(list(tensors)).tangents)
    return tensors if has_tangents else [tf.stop_gradient(each) for each in tensors]


@compiled
def _value(
    x: tf.Tensor, *masks: tf.Tensor, function: Callable[..., tf.Tensor], arguments: Any
) -> tf.Tensor:
    return tf.cast(function(tf.cast(x, tf.float32), *masks, **dict(arguments)), x.dtype)


@compiled
def _gradient(
    x: tf.Tensor,
    upstream: tf.Tensor,
    *masks: tf.Tensor,
    function: Callable[..., tf.Tensor],
    arguments: Any,
) -> tf.Tensor:
    exact = tf.cast(x, tf.float32)
    y = function(exact, *masks, **dict(arguments))
    # A tape would find no gradient in the trace of a forward accumulator.
    [gradient] = tf.gradients(y, exact, tf.cast(upstream, tf.float32))
    return tf.cast(gradient, x.dtype)
