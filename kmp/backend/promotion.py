"""Promotes operands: where a 16-bit tensor meets a float32 one, TensorFlow computes in float32.

TensorFlow raises there, `torch.amp` and Keras' operations promote. The replacements act where
TensorFlow refuses operands; only the slow path of eager operations compares dtypes before. Only
float16 or bfloat16 with float32 is promoted: other dtypes, and assignments to variables, keep
TensorFlow's errors.

- In a graph, `_apply_op_helper` adds each operation.
- In eager mode, an operation runs in C++, and TensorFlow's slow path in Python
  (`args_to_matching_eager`) knows which of its inputs need one dtype. `_NotOkStatusException`
  reports the refusal; where TensorFlow gets a `_FallbackException`, it takes the slow path.
- Functions that compare dtypes in Python, such as `/`, ask `dispatch` after a TypeError or
  ValueError.
"""

import contextlib
import functools
import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import keras
import optree
import tensorflow as tf
from tensorflow.python.eager import core

from kmp.backend.inventory import Reason
from kmp.backend.patching import patches
from kmp.backend.private_names import find
from kmp.utils.context_values import context_value
from kmp.utils.float_formats import DTYPES_16_BIT

logger = logging.getLogger("kmp")
_LOW = frozenset(map(tf.as_dtype, DTYPES_16_BIT))
# How TensorFlow says that eager operands differ, and that a function needs float32.
_OPERANDS_DIFFER = "tensor but is a"
_NEEDS_FLOAT32 = "requested dtype float32 for Tensor"
_CALLERS = tuple(f"{Path(str(module.__file__)).parent}/" for module in (keras, tf))
_LIBRARIES = (
    *_CALLERS,
    f"{Path(str(optree.__file__)).parent}/",  # maps Keras' functions over structures
    f"{Path(str(functools.__file__)).parent}/",
    f"{Path(__file__).parent.parent}/",
    *("<frozen ", "<__array_function__"),
)
_TENSORS = (tf.Tensor, tf.Variable, keras.Variable)


class Place(NamedTuple):
    """A line of the user's code in which operands were promoted.

    Attributes:
        file: Its path; empty if no frame is the user's.
        line: The number of the line.
        operation: What was called, as TensorFlow names it, such as `AddV2` or `add_v2`.
        dtype: That of the 16-bit operands.
    """

    file: str
    line: int
    operation: str
    dtype: str

    def __str__(self) -> str:
        where = f"{self.file}, line {self.line}" if self.file else "a line that is not known"
        return f"{where} ({self.operation} of {self.dtype} and float32)"


_logged: set[tuple[str, int]] = set()  # file and line
_recorded: list[dict[tuple[str, int], Place]] = []  # of the contexts that are open


@contextlib.contextmanager
def promotions_recorded() -> Iterator[dict[tuple[str, int], Place]]:
    """Yields the lines in which operands are promoted in the context, by file and line."""
    places: dict[tuple[str, int], Place] = {}
    _recorded.append(places)
    try:
        yield places
    finally:
        _recorded[:] = [each for each in _recorded if each is not places]


# Whether this thread is in the call of a layer that was created for 16 bits by kmp.
_in_call: ContextVar[bool] = ContextVar("_in_call", default=False)
_WHILE_HELD = (Reason.ENABLED, Reason.STEP, Reason.REPLAY, Reason.CONVERSION)


def promoting() -> contextlib.AbstractContextManager[None]:
    """Promotes operands in the context, for this thread, after `disable` too."""
    return context_value(_in_call, True)


def not_ok_status_patch(original: Callable[..., Any] | None) -> Callable[..., Any]:
    """Patches the error of an eager operation: one of dtypes makes TensorFlow try its slow path."""

    def __new__(cls: type[Exception], message: Any = "", *args: Any) -> Exception:  # noqa: N807
        if isinstance(message, core._FallbackException):  # Python 3.11 asks twice
            return message
        if _OPERANDS_DIFFER in str(message):
            return core._FallbackException(message)
        return Exception.__new__(cls, message, *args)

    return __new__


def matching_arguments_patch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patches the slow path of eager operations, which gives these inputs one dtype."""

    @functools.wraps(original)
    def args_to_matching_eager(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if len({getattr(each, "dtype", None) for each in inputs}) > 1:
            low = _low_dtype([each for each in inputs if isinstance(each, _TENSORS)])
            if low is not None:
                caller = sys._getframe(1).f_code.co_name
                _note(caller.removesuffix("_eager_fallback").strip("_"), low)
                inputs = list(map(_promote, inputs))
        return original(inputs, *args, **kwargs)

    return args_to_matching_eager


def add_operation_patch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patches the function that adds an operation to a graph."""

    @functools.wraps(original)
    def apply_op(operation: str, name: str | None = None, **inputs: Any) -> Any:
        try:
            return original(operation, name=name, **inputs)
        except (TypeError, ValueError) as error:
            arguments = {"name": name, **inputs}
            result = _promoted_call(error, operation, original, (operation,), arguments)
            if result is NotImplemented:
                raise
            return result

    return apply_op


def dispatch_patch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patches what TensorFlow asks for another result after a TypeError or ValueError."""

    @functools.wraps(original)
    def dispatch(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        result = original(function, args, kwargs)
        error = sys.exc_info()[1]
        not_supported = tf.__internal__.dispatch.OpDispatcher.NOT_SUPPORTED
        if error is None or result is not not_supported:
            return result
        promoted = _promoted_call(error, function.__name__, function, args, kwargs)
        return result if promoted is NotImplemented else promoted

    return dispatch


def _promoted_call(
    error: BaseException, operation: str, function: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Calls a function that has raised once more, with 16-bit tensors cast to float32.

    Returns `NotImplemented` if there is nothing to promote. Raises what the function then raises,
    such as that shapes differ, or the first error if an argument may not be promoted.
    """
    try:
        leaves = tf.nest.flatten((args, kwargs), expand_composites=True)
    except Exception:  # slices whose indices are a list
        return NotImplemented
    needs_float32 = _NEEDS_FLOAT32 in str(error) or any(each is tf.float32 for each in leaves)
    low = _low_dtype([each for each in leaves if tf.is_tensor(each)], needs_float32)
    # A function among the arguments takes the tensors that the user passes, and may have run.
    if low is None or any(map(callable, leaves)):
        return NotImplemented
    args, kwargs = tf.nest.map_structure(_promote, (args, kwargs), expand_composites=True)
    try:
        result = function(*args, **kwargs)
    except (TypeError, ValueError, tf.errors.InvalidArgumentError):
        raise
    except Exception:
        raise error from None
    _note(operation, low)
    return result


def _low_dtype(tensors: Sequence[Any], needs_float32: bool = False) -> str | None:
    """Returns the one 16-bit dtype of tensors that meet float32; `None` if none are promoted.

    Args:
        tensors: Tensors and variables.
        needs_float32: Whether they meet float32 without a tensor in it.
    """
    dtypes = {tf.as_dtype(each.dtype) for each in tensors}
    low = dtypes & _LOW
    meets_float32 = needs_float32 or tf.float32 in dtypes
    if len(low) != 1 or not meets_float32 or tf.resource in dtypes:
        return None
    # After `disable`, only the calls of kmp's layers promote.
    is_active = _in_call.get() or any(map(patches.is_held, _WHILE_HELD))
    return next(iter(low)).name if is_active else None


def _promote(value: Any) -> Any:
    if not tf.is_tensor(value):
        return value
    tensor = tf.convert_to_tensor(value)  # of a variable too, so that nothing assigns to it
    return tf.cast(tensor, tf.float32) if tensor.dtype in _LOW else tensor


def _note(operation: str, dtype: str) -> None:
    """Logs the line of the user's code that is promoted, once for each."""
    extract = find("tensorflow.python.util.tf_stack:extract_stack")
    file, line = line_of_user(extract() if extract else [])
    place = Place(file, line, operation, dtype)
    key = (file, line) if file else (operation, 0)
    for places in tuple(_recorded):
        places.setdefault(key, place)
    # A replay in another format computes what the training does not.
    if key in _logged or patches.is_held(Reason.REPLAY):
        return
    _logged.add(key)
    logger.warning(
        "%s computes in float32, where TensorFlow would raise an error. To compute in %s, cast the"
        " float32 operand: tf.cast(..., %r).",
        place,
        dtype,
        dtype,
    )


def stack_inside(stack: Sequence[Any]) -> list[Any]:
    """Returns the frames of a stack that Keras or TensorFlow called, as they call a step."""
    return list(itertools.dropwhile(lambda frame: not frame.filename.startswith(_CALLERS), stack))


def line_of_user(stack: Sequence[Any]) -> tuple[str, int]:
    """Returns file and line of the innermost frame outside of libraries, installed ones too.

    The file is empty if there is none. TensorFlow's stack has the lines of the source for code that
    autograph has converted.
    """
    found = ("", 0)
    for frame in reversed(stack):
        # Autograph does not know the source of a function that a replica calls.
        is_generated = "__autograph_generated_file" in frame.filename
        if is_generated or frame.filename.startswith(_LIBRARIES):
            continue
        if "site-packages" not in frame.filename:
            return frame.filename, frame.lineno
        found = found if found[0] else (frame.filename, frame.lineno)
    return found
