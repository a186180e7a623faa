"""TensorFlow's private functions that kmp uses.

TensorFlow 2.21 has no public name for what they return or do. What a context here changes, it
changes for its own thread; the exception is TF32, which is a setting of the process.
"""

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

from kmp.backend.private_names import attribute, find
from kmp.backend.undo import Undos
from kmp.utils.context_values import context_value


def is_deterministic() -> bool:
    """Whether `tf.config.experimental.enable_op_determinism` was called."""
    is_enabled = find("tensorflow.python.framework.config:is_op_determinism_enabled")
    return is_enabled is not None and is_enabled()


def is_onednn_enabled() -> bool:
    """Whether TensorFlow computes with oneDNN on the CPU, as far as known."""
    is_enabled = find("tensorflow.python.util._pywrap_util_port:IsMklEnabled")
    return is_enabled is None or bool(is_enabled())


_runs_eagerly: ContextVar[bool] = ContextVar("_runs_eagerly", default=False)


def functions_run_eagerly() -> contextlib.AbstractContextManager[None]:
    """Runs each `tf.function` that this thread calls in the context as a part of its caller.

    Other threads run theirs as before, unlike with `tf.config.run_functions_eagerly`. Functions
    that `tf.vectorized_map`, `tf.map_fn` and single operations of Keras create for themselves need
    a graph and are traced.
    """
    return context_value(_runs_eagerly, True)


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
        if not _runs_eagerly.get():
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


def functions_added(definition: Any) -> contextlib.ExitStack:
    """Makes the functions of a `GraphDef` known to TensorFlow, until what is returned is closed."""
    added = contextlib.ExitStack()
    context_of = find("tensorflow.python.eager.context:context")
    if context_of is None:
        return added
    context = context_of()
    for function in definition.library.function:
        name = function.signature.name
        if not context.has_function(name):
            context.add_function_def(function)
            added.callback(context.remove_function, name)
    return added


_TRACES = "tensorflow:types.experimental.PolymorphicFunction._function_cache"
_TRACES_BY_CONTEXT = "tensorflow.core.function.polymorphism.function_cache:FunctionCache._primary"


def traces_of(function: Any) -> list[Any]:
    """Returns the concrete functions of a `tf.function`, one for each trace that it has."""
    # `_list_all_concrete_functions` may trace the function.
    cache = attribute(function, _TRACES)
    return [] if cache is None else list(cache.values())


def forget_traces(functions: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Has `tf.function`s traced again when they are called next.

    Returns what `restore_traces` gets to have them run as before.
    """
    before = []
    for function in functions:
        cache = attribute(function, _TRACES)
        if cache is not None:
            kept = attribute(cache, _TRACES_BY_CONTEXT, {})
            before.append((cache, [(trace, context) for (context, _), trace in kept.items()]))
            cache.clear()
    return before


def restore_traces(before: Iterable[tuple[Any, Any]]) -> None:
    """Has `tf.function`s run as before `forget_traces`."""
    for cache, traces in before:
        cache.clear()
        for trace, context in traces:
            cache.add(trace, context)
