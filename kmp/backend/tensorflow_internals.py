"""TensorFlow's private functions that kmp uses.

TensorFlow 2.21 has no public name for what they return or do. What a context here changes, it
changes for its own thread; the exception is TF32, which is a setting of the process.
"""

import contextlib
import functools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import keras
import tensorflow as tf

from kmp.backend.inventory import Reason
from kmp.backend.patching import patches
from kmp.backend.private_names import attribute, find
from kmp.backend.undo import Context, Undos
from kmp.utils.float_formats import FORMATS_16_BIT

Value = TypeVar("Value")


def is_deterministic() -> bool:
    """Whether `tf.config.experimental.enable_op_determinism` was called."""
    is_enabled = find("tensorflow.python.framework.config:is_op_determinism_enabled")
    return is_enabled is not None and is_enabled()


def is_onednn_enabled() -> bool:
    """Whether TensorFlow computes with oneDNN on the CPU, as far as known."""
    is_enabled = find("tensorflow.python.util._pywrap_util_port:IsMklEnabled")
    return is_enabled is None or bool(is_enabled())


@contextlib.contextmanager
def watching_operations(
    observe: Callable[[str, Sequence[tf.Tensor], Sequence[tf.Tensor]], None],
) -> Iterator[None]:
    """Calls a function after each operation that this thread runs eagerly in the context.

    `tf.debugging.enable_check_numerics` works like this.

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
            name = operation.decode() if isinstance(operation, bytes) else operation
            observe(name, inputs, outputs)

    add = find("tensorflow.python.framework.op_callbacks:add_op_callback")
    remove = find("tensorflow.python.framework.op_callbacks:remove_op_callback")

    def undo() -> None:
        with contextlib.suppress(KeyError):  # not added, or removed already
            remove(callback)

    if add is None or remove is None:
        yield
        return
    with Undos() as undos, undos.first_attempt():
        undos.add(undo)
        add(callback)
        yield


def without_tapes() -> contextlib.AbstractContextManager[None]:
    """Stops the recording of all tapes in the context.

    The public method of a tape stops that tape only.
    """
    stop_recording = find("tensorflow.python.eager.record:stop_recording")
    return contextlib.nullcontext() if stop_recording is None else stop_recording()


class RandomNumbers:
    """A stream of random numbers: the `position` of the next draw, which may be set back."""

    def __init__(self) -> None:
        self.position = 0
        self.operation_seeds = random.Random(0)


@dataclass
class _ThreadState(threading.local):
    """What the contexts of this module have set in this thread; the last one applies."""

    numbers: list[RandomNumbers] = field(default_factory=list)
    hooks: list["_GradientHook"] = field(default_factory=list)
    eager: list[object] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _GradientHook:
    before: Callable[[], Any]
    after: Callable[[Any], None]


_state = _ThreadState()


@contextlib.contextmanager
def _in_this_thread(values: list[Value], value: Value) -> Iterator[Value]:
    """Adds a value to a list of `_state` in the context, with the patches of a replay."""

    def remove() -> None:
        values[:] = [each for each in values if each is not value]

    with Undos() as undos, undos.first_attempt():
        undos.enter(patches.holding(Reason.REPLAY))
        undos.add(remove)
        values.append(value)
        yield value


def equal_random_numbers() -> Context[RandomNumbers]:
    """Makes this thread draw the same numbers from eager random operations in each such context.

    That holds for `tf.random.normal`, `uniform` and `truncated_normal` in every dtype: numbers of
    16 bits are rounded from float32. Their own operations continue a stream that nobody can set
    back. Other threads draw from their streams as if there were no such context, and so does this
    thread after it: no stream is advanced, and none is set back.
    """
    return _in_this_thread(_state.numbers, RandomNumbers())


def operation_seed_patch(original: Callable[..., int]) -> Callable[..., int]:
    """Patches the generator of seeds for eager operations, which is one for all threads."""

    @functools.wraps(original)
    def _internal_operation_seed(self: Any) -> int:
        if not _state.numbers:
            return original(self)
        return _state.numbers[-1].operation_seeds.randint(0, 2**31 - 1)

    return _internal_operation_seed


def _random_patch(draw: Callable[..., tf.Tensor]) -> Callable[[Any], Any]:
    """Returns a patch of an operation that draws with `draw(shape, ..., seed=seed)` instead."""

    def patch(original: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        @functools.wraps(original)
        def operation(*args: Any, **kwargs: Any) -> tf.Tensor:
            if not _state.numbers or not tf.executing_eagerly():
                return original(*args, **kwargs)
            numbers = _state.numbers[-1]
            numbers.position += 1
            for name in ("seed", "seed2", "name"):
                kwargs.pop(name, None)
            return draw(*args, **kwargs, seed=(numbers.position, 0))

        return operation

    return patch


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
    if not below_one:
        return numbers
    return tf.minimum(numbers, 1.0 - 2.0 ** -(number_format.fraction_bits + 1))


def _draw_integers(shape: Any, minval: Any, maxval: Any, *, seed: Sequence[int]) -> tf.Tensor:
    dtype = tf.convert_to_tensor(minval).dtype
    return tf.random.stateless_uniform(shape, seed, minval, maxval, dtype)


random_standard_normal_patch = _random_patch(
    functools.partial(_draw_floats, tf.random.stateless_normal)
)
random_uniform_patch = _random_patch(
    functools.partial(_draw_floats, tf.random.stateless_uniform, below_one=True)
)
random_uniform_int_patch = _random_patch(_draw_integers)
truncated_normal_patch = _random_patch(
    functools.partial(_draw_floats, tf.random.stateless_truncated_normal)
)


def after_each_gradient(
    before: Callable[[], Any], after: Callable[[Any], None]
) -> Context["_GradientHook"]:
    """Calls a function after each `tf.GradientTape.gradient` of this thread in the context.

    Args:
        before: Called without arguments before the gradient is computed.
        after: Called with what `before` returned, also after an exception.
    """
    return _in_this_thread(_state.hooks, _GradientHook(before, after))


def gradient_patch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patches `tf.GradientTape.gradient` to call the functions of `after_each_gradient`."""

    @functools.wraps(original)
    def gradient(
        self: tf.GradientTape, target: Any, sources: Any, *args: Any, **options: Any
    ) -> Any:
        if not _state.hooks:
            return original(self, target, sources, *args, **options)
        hook = _state.hooks[-1]
        state = hook.before()
        try:
            sources = tf.nest.map_structure(_with_assigned_value, sources)
            return original(self, target, sources, *args, **options)
        finally:
            hook.after(state)

    return gradient


def _with_assigned_value(source: Any) -> Any:
    """Returns the tensor that a pass has assigned to a weight, such as a normalized kernel.

    The assignment of a pass does not reach the variable, so the loss depends on the tensor.
    """
    if isinstance(source, keras.Variable) and not isinstance(source.value, tf.Variable):
        return source.value
    return source


def functions_run_eagerly() -> Context[object]:
    """Runs each `tf.function` that this thread calls in the context eagerly.

    Other threads run theirs as before, unlike with `tf.config.run_functions_eagerly`. Functions
    that `tf.vectorized_map`, `tf.map_fn` and single operations of Keras create for themselves need
    a graph and are traced.
    """
    return _in_this_thread(_state.eager, object())


# Modules whose functions need a graph. Keras compiles operations that TensorFlow's own kernels
# compute wrongly or not at all on a CPU: grouped convolutions, and float16 means from Keras 3.16
# on. Each call of such an operation traces a function of its own, in which no layer is called.
_NEEDING_A_GRAPH = (
    "tensorflow.python.ops.parallel_for",
    "keras.src.backend.tensorflow.nn",
    "keras.src.backend.tensorflow.ops",  # Keras 3.16
)


def run_eagerly_patch(original: property) -> property:
    """Patches what a `tf.function` reads to know whether it runs eagerly."""
    read: Any = original.fget

    @functools.wraps(read)
    def _run_functions_eagerly(self: Any) -> bool:
        if not _state.eager:
            return read(self)
        module = str(getattr(self.python_function, "__module__", ""))
        if not module.startswith(_NEEDING_A_GRAPH):
            return True
        # TensorFlow would log that the function of each call is traced.
        self._omit_frequent_tracing_warning = True
        return False

    return property(_run_functions_eagerly, doc=original.__doc__)


_tf32_lock = threading.RLock()
_tf32_holders: list[object] = []


@contextlib.contextmanager
def without_tensor_float_32() -> Iterator[None]:
    """Disables TF32 in the context, where a GPU has it: in all threads.

    TF32 is a GPU's default for float32 and rounds the operands of products to 11 bits. TensorFlow
    keeps the setting in the process, so float32 products of other threads are exact, and slower,
    in the meantime. Nothing is changed on a machine without such a GPU.
    """
    if not _has_tensor_float_32():
        yield
        return
    holder = object()

    def disable() -> None:
        with Undos() as undos, undos.first_attempt():
            undos.lock(_tf32_lock)
            is_allowed = tf.config.experimental.tensor_float_32_execution_enabled()
            if is_allowed or _tf32_holders:  # else the user has disabled it
                _tf32_holders.append(holder)
                tf.config.experimental.enable_tensor_float_32_execution(False)

    def release() -> None:
        with Undos() as undos, undos.first_attempt():
            undos.lock(_tf32_lock)
            if _tf32_holders == [holder]:
                tf.config.experimental.enable_tensor_float_32_execution(True)
            _tf32_holders[:] = [each for each in _tf32_holders if each is not holder]

    with Undos() as undos, undos.first_attempt():
        undos.add(release)
        disable()
        yield


@functools.cache
def _has_tensor_float_32() -> bool:
    """Whether a GPU that TensorFlow computes on has TF32: compute capability 8.0 or later."""
    for device in tf.config.get_visible_devices("GPU"):
        details = tf.config.experimental.get_device_details(device)
        if details.get("compute_capability", (8, 0)) >= (8, 0):
            return True
    return False


def traces_of(function: Any) -> list[Any]:
    """Returns the concrete functions of a `tf.function`, one for each trace that it has.

    TensorFlow 2.21 has no public name for them.
    """
    # Not with `_list_all_concrete_functions`, which may trace the function.
    cache = attribute(function, "tensorflow:types.experimental.PolymorphicFunction._function_cache")
    return [] if cache is None else list(cache.values())
