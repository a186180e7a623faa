"""What a function that is traced for XLA, a strategy or a stateless call has to do differently."""

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from keras import ops

from kmp.backend.private_names import find

_SIZE = 64  # of an axis, such as that of rows, whose size is not known
_LARGEST_MASK = 2**14  # elements; each larger tensor has a kernel of its own anyway


def is_tracing() -> bool:
    """Whether the current graph is traced for XLA. TensorFlow 2.21 has no public name for it."""
    is_of_xla = find("tensorflow.python.ops.control_flow_util:GraphOrParentsInXlaContext")
    return is_of_xla is not None and is_of_xla(tf.compat.v1.get_default_graph())


def check_compilable(function: Any, device: str) -> None:
    """Raises an error if XLA cannot convert a concrete function, without compiling or running it.

    The conversion finds operations without a kernel, and values and shapes that must be constants.
    It takes a tenth of the time that the compilation takes. Functions that capture tensors of a
    graph are not checked.

    Args:
        function: The concrete function.
        device: The name of the device that is to run it.

    Raises:
        ValueError: If XLA cannot convert it, or if the rank of an argument is not known.
    """
    convert = find(
        "tensorflow.python.eager.polymorphic_function.compiler_ir:from_concrete_function"
    )
    captured = function.captured_inputs
    arguments = function.inputs[: len(function.inputs) - len(captured)]
    if convert is None or any(map(tf.is_symbolic_tensor, captured)):
        return
    specs = []
    for argument in arguments:
        if argument.shape.rank is None:
            raise ValueError("the rank of a tensor of the batch is not known")
        sizes = [_SIZE if size is None else size for size in argument.shape]
        specs.append(tf.TensorSpec(sizes, argument.dtype))
    try:
        with tf.init_scope(), tf.device(device):
            convert(function, specs)(stage="hlo_serialized")
    except (ValueError, tf.errors.OpError) as error:  # a `ValueError` in TensorFlow 2.21
        raise ValueError(str(error).removeprefix("Failed getting HLO text: ").strip("'")) from error


class _Traces(threading.local):
    """Whether this thread traces what a GPU would run."""

    are_for_gpu = False


_traces = _Traces()


@contextlib.contextmanager
def traced_for_gpu() -> Iterator[None]:
    """Traces in the context what a GPU would run, also where there is none: to count it."""
    before = _traces.are_for_gpu
    _traces.are_for_gpu = True
    try:
        yield
    finally:
        _traces.are_for_gpu = before


def has_gpu() -> bool:
    """Whether TensorFlow computes on a GPU, or traces what a GPU would run.

    A branch on a value of the device makes the host wait there.
    """
    return _traces.are_for_gpu or bool(tf.config.get_visible_devices("GPU"))


def fuses_reductions() -> bool:
    """Whether XLA makes one kernel of a reduction and of what needs its result.

    It does so with Triton, on GPUs of compute capability 8.0 (Ampere) and later.
    """
    gpus = tf.config.get_visible_devices("GPU")
    details = map(tf.config.experimental.get_device_details, gpus)
    return all(each.get("compute_capability", (8, 0)) >= (8, 0) for each in details)


def masks_of(condition: tf.Tensor) -> Callable[[Sequence[int | None]], tf.Tensor]:
    """Returns a function of a shape, which returns what selects between tensors of that shape.

    That is the scalar bool `condition` or, under XLA for small tensors, a mask of their shape. XLA
    for GPUs fuses loops over tensors of one shape into one kernel if they share an operand which is
    not a scalar. So the mask makes one kernel of all selections between tensors of one shape, where
    ResNet-50 has more than 200.
    """

    @functools.cache
    def mask(shape: tuple[int, ...], graph: tf.Graph) -> tf.Tensor:
        del graph  # a tensor that is created in a branch exists only there
        return opaque(tf.fill(shape, condition))

    def select_by(shape: Sequence[int | None]) -> tf.Tensor:
        sizes = tuple(size for size in shape if size is not None)
        has_mask = 0 < len(sizes) == len(shape) and math.prod(sizes) <= _LARGEST_MASK
        if not is_tracing() or not has_mask:
            return condition
        return mask(sizes, tf.compat.v1.get_default_graph())

    return select_by


def opaque(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor that XLA computes by itself.

    It does not fuse, fold or share the computation with others. TensorFlow 2.21 has no public name
    for this barrier, and no gradient of it.
    """
    if not is_tracing():
        return tensor
    barrier = find("tensorflow.compiler.tf2xla.python.xla:optimization_barrier")
    return tensor if barrier is None else barrier(tensor)[0]


def _barrier_gradient(op: tf.Operation, *gradients: tf.Tensor) -> Sequence[tf.Tensor]:
    return gradients


with contextlib.suppress(KeyError):  # a later TensorFlow may have a gradient of it
    tf.RegisterGradient("XlaOptimizationBarrier")(_barrier_gradient)


def call_if(condition: Any, function: Callable[[], None], compiles: bool = False) -> None:
    """Calls a function in a branch, or without one where branches must not write variables.

    XLA copies every variable that a branch writes; under a strategy, a variable that is aggregated
    over replicas cannot be written in one; and a `keras.StatelessScope` keeps the written tensors
    for use outside the branch. Without a branch, the function must write the old values where the
    scalar bool tensor `condition` is false.

    Args:
        condition: Scalar bool tensor.
        function: The function.
        compiles: Whether a graph calls it compiled and without a branch, for which a GPU would wait
            for the host. It may then write no int32 variables, which TensorFlow keeps on the host,
            and none that replicas assign together.
    """
    # Keras 3.15 has no public name for it. Without the name, a scope may be open.
    in_stateless_scope = find("keras.src.backend.common.stateless_scope:in_stateless_scope")
    may_be_stateless = in_stateless_scope is None or in_stateless_scope()
    if is_tracing() or may_be_stateless:
        function()
    elif compiles and not tf.executing_eagerly():
        tf.function(function, jit_compile=True, autograph=False)()
    elif tf.distribute.has_strategy():
        function()
    else:
        ops.cond(condition, outlined(function), lambda: None)


def outlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that a graph calls as one operation, for a branch that is rarely taken.

    TensorFlow visits each operation of a branch in every step, even in a branch that is not taken.
    If the branch calls a function, it visits only the call.
    """

    def call(*args: Any) -> Any:
        if tf.executing_eagerly() or is_tracing() or tf.distribute.has_strategy():
            return function(*args)
        # The attribute is private: in TensorFlow 2.21, nothing else prevents that Grappler inlines
        # the function.
        attributes = {"_noinline": True}
        called = tf.function(function, autograph=False, experimental_attributes=attributes)
        return called(*args)

    return call
