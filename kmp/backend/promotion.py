"""Promotes operands: where a 16-bit tensor meets a float32 one, TensorFlow computes in float32.

TensorFlow raises there, `torch.amp` and Keras' operations promote. Each replacement acts after
TensorFlow has refused the operands, so an operation that does not fail pays nothing. Only float16
or bfloat16 with float32 is promoted: other dtypes, and assignments to variables, keep TensorFlow's
errors.

- In a graph, `_apply_op_helper` adds each operation.
- In eager mode, an operation runs in C++, and TensorFlow's slow path in Python
  (`args_to_matching_eager`) knows which of its inputs need one dtype. `_NotOkStatusException`
  reports the refusal; where TensorFlow gets a `_FallbackException`, it takes the slow path.
- Functions that compare dtypes in Python, such as `/`, ask `dispatch` after a TypeError or
  ValueError.
"""

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from tensorflow.python.eager import core

from kmp.backend.inventory import Reason
from kmp.backend.patching import patches
from kmp.backend.private_names import find
from kmp.utils.float_formats import DTYPES_16_BIT

logger = logging.getLogger("kmp")
_LOW = frozenset(map(tf.as_dtype, DTYPES_16_BIT))
# How TensorFlow says that eager operands differ, and that a function needs float32.
_OPERANDS_DIFFER = "tensor but is a"
_NEEDS_FLOAT32 = "requested dtype float32 for Tensor"
_LIBRARIES = tuple(
    f"{Path(path).parent}/"
    for path in (keras.__file__, tf.__file__, Path(__file__).parent, functools.__file__)
)


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


def promote_in_calls(model: keras.Model) -> None:
    """Promotes operands in the calls of a model that computes in 16 bits without `enable`."""
    call = model.call

    @functools.wraps(call)
    def promoting_call(*args: Any, **kwargs: Any) -> Any:
        with patches.holding(Reason.STEP):
            return call(*args, **kwargs)

    vars(model)["call"] = promoting_call  # not tracked by Keras' `__setattr__`


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
            caller = sys._getframe(1).f_code.co_name
            operation = caller.removesuffix("_eager_fallback").strip("_")
            inputs = _promoted(list(inputs), operation) or inputs
        return original(inputs, *args, **kwargs)

    return args_to_matching_eager


def add_operation_patch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patches the function that adds an operation to a graph."""

    @functools.wraps(original)
    def apply_op(operation: str, name: str | None = None, **inputs: Any) -> Any:
        try:
            return original(operation, name=name, **inputs)
        except (TypeError, ValueError) as error:
            promoted = _promoted(inputs, operation)
            if promoted is None:
                raise
            return _instead_of(error, original, operation, name=name, **promoted)

    return apply_op


def dispatch_patch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patches what TensorFlow asks for another result after a TypeError or ValueError."""

    @functools.wraps(original)
    def dispatch(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        result = original(function, args, kwargs)
        error = sys.exc_info()[1]
        if error is None or result is not tf.__internal__.dispatch.OpDispatcher.NOT_SUPPORTED:
            return result
        promoted = _promoted((args, kwargs), function.__name__, _NEEDS_FLOAT32 in str(error))
        if promoted is None:
            return result
        return _instead_of(error, function, *promoted[0], **promoted[1])

    return dispatch


def _instead_of(
    error: BaseException, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Calls a function with promoted operands; raises the first error if that fails too."""
    try:
        return function(*args, **kwargs)
    except Exception:
        raise error from None


def _promoted(operands: Any, operation: str, needs_float32: bool = False) -> Any:
    """Returns a structure of operands with 16-bit tensors cast to float32; `None` if none differ.

    Args:
        operands: Tensors and other arguments, in any structure.
        operation: What is called with them.
        needs_float32: Whether the operation needs float32, without an operand that says so.
    """
    leaves = tf.nest.flatten(operands, expand_composites=True)
    # A function among the arguments takes the tensors that the user passes, and may have run.
    if any(callable(leaf) for leaf in leaves):
        return None
    dtypes = {tf.as_dtype(leaf.dtype) for leaf in leaves if tf.is_tensor(leaf)}
    low = dtypes & _LOW
    meets_float32 = (
        needs_float32 or tf.float32 in dtypes or any(each is tf.float32 for each in leaves)
    )
    if len(low) != 1 or not meets_float32 or tf.resource in dtypes:
        return None
    _note(operation, next(iter(low)).name)

    def promote(leaf: Any) -> Any:
        if not tf.is_tensor(leaf):
            return leaf
        tensor = tf.convert_to_tensor(leaf)  # of a variable too, so that nothing assigns to it
        return tf.cast(tensor, tf.float32) if tensor.dtype in _LOW else tensor

    return tf.nest.map_structure(promote, operands, expand_composites=True)


def _note(operation: str, dtype: str) -> None:
    """Logs the line of the user's code that is promoted, once for each."""
    file, line = _line_of_user()
    place = Place(file, line, operation, dtype)
    for places in tuple(_recorded):
        places.setdefault((file, line), place)
    if (file, line) in _logged:
        return
    _logged.add((file, line))
    logger.warning(
        "%s computes in float32, where TensorFlow would raise an error. To compute in %s, cast the"
        " float32 operand: tf.cast(..., %r).",
        place,
        dtype,
        dtype,
    )


def _line_of_user() -> tuple[str, int]:
    """Returns file and line of the innermost frame outside of the libraries.

    TensorFlow's stack has the lines of the source for code that autograph has converted.
    """
    extract = find("tensorflow.python.util.tf_stack:extract_stack")
    for frame in reversed(extract() if extract else []):
        if not frame.filename.startswith(_LIBRARIES) and not frame.filename.startswith("<"):
            return frame.filename, frame.lineno
    return "", 0
