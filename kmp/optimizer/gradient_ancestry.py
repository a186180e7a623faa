"""What the gradients of a graph descend from: a loss scale, results of `unscale`, weights, or something not known."""

import enum
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from kmp.backend import tensorflow_internals


class Origin(enum.Flag):
    """What a gradient descends from."""

    SCALE = enum.auto()  # a loss scale
    UNSCALE = enum.auto()  # a result of `unscale`
    WEIGHT = enum.auto()  # a trainable variable
    UNKNOWN = enum.auto()  # a value from elsewhere that may be a scale or a gradient


_SCALE, _UNSCALE = "kmp_loss_scale", "kmp_unscaled"  # names of the marking operations
_MARK = re.compile(rf"(?:.*/)?({_SCALE}|{_UNSCALE})(?:_\d+)?")
_ORIGIN_OF_MARK = {_SCALE: Origin.SCALE, _UNSCALE: Origin.UNSCALE}
_PYTHON_FUNCTIONS = ("EagerPyFunc", "PyFunc", "PyFuncStateless")


def mark_scale(scale: Any) -> Any:
    """Returns the loss scale, marked in a graph."""
    return scale if tf.executing_eagerly() else tf.identity(scale, name=_SCALE)


def mark_unscaled(values: Any) -> Any:
    """Returns the values of an unscaled gradient, marked in a graph."""
    return values if tf.executing_eagerly() else tf.identity(values, name=_UNSCALE)


def origins_of(gradients: Sequence[tf.Tensor], origin_of_handle: Mapping[int, Origin]) -> Origin:
    """Returns what gradients of a graph descend from; only `Origin.SCALE` if they descend from a loss scale.

    The search stops at results of `unscale`: these no longer have the scale that their argument has.

    Args:
        gradients: The gradients.
        origin_of_handle: The origin that a resource stands for, by the `id` of its handle.
    """
    return _Search(gradients, origin_of_handle).run()


class _Search:
    """A breadth-first search through the operations that gradients descend from, also in called functions."""

    def __init__(self, gradients: Sequence[tf.Tensor], origin_of_handle: Mapping[int, Origin]) -> None:
        self._queue = deque(gradients)
        self._shapes = [gradient.shape for gradient in gradients]
        self._origin_of_handle = origin_of_handle
        self._seen: set[int] = set()
        self._captured: dict[tf.Graph, dict[int, Any]] = {}
        self._arguments: defaultdict[int, list[Any]] = defaultdict(list)  # of called functions, by `id`
        self._found = Origin(0)

    def run(self) -> Origin:
        while self._queue:
            tensor = self._queue.popleft()
            if id(tensor) not in self._seen:
                self._seen.add(id(tensor))
                self._visit(tensor)
            if Origin.SCALE in self._found:
                return Origin.SCALE
        return self._found

    def _visit(self, tensor: Any) -> None:
        origin = self._origin_of_handle.get(id(tensor)) or _mark_of(tensor)
        if origin:
            self._found |= origin
        elif not tf.is_symbolic_tensor(tensor):
            self._found |= self._unknown(tensor)
        elif tensor.op.type == "Placeholder":
            self._visit_argument(tensor)
        else:
            self._visit_operation(tensor)

    def _visit_argument(self, tensor: tf.Tensor) -> None:
        if tensor.graph not in self._captured:
            self._captured[tensor.graph] = tensorflow_internals.captured_tensors(tensor.graph)
        outer = self._captured[tensor.graph].get(id(tensor))
        sources = [*self._arguments[id(tensor)], *([] if outer is None else [outer])]
        self._queue += sources
        if not sources:
            self._found |= self._unknown(tensor)

    def _visit_operation(self, tensor: tf.Tensor) -> None:
        called = tensorflow_internals.called_functions(tensor.op)
        if called is None or tensor.op.type in _PYTHON_FUNCTIONS:  # what they compute cannot be seen
            self._found |= Origin.UNKNOWN
        self._queue += tensor.op.inputs if not called else []
        for function in called or []:
            self._queue.append(function.outputs[tensor.value_index])
            for parameter, values in zip(function.parameters, function.arguments, strict=False):
                self._arguments[id(parameter)] += values
                if id(parameter) in self._seen:
                    self._queue += values

    def _unknown(self, tensor: Any) -> Origin:
        """Returns `Origin.UNKNOWN` for a value that may be a scale or a gradient."""
        shapes = tensorflow_internals.shapes_held_by(tensor)
        may_be = any(shape.rank in (None, 0) or shape in self._shapes for shape in shapes)
        return Origin.UNKNOWN if may_be else Origin(0)


def _mark_of(tensor: Any) -> Origin:
    is_identity = tf.is_symbolic_tensor(tensor) and tensor.op.type == "Identity"
    match = _MARK.fullmatch(tensor.op.name) if is_identity else None
    return _ORIGIN_OF_MARK[match[1]] if match else Origin(0)


def union(origins: Iterable[Origin]) -> Origin:
    """Returns all of several origins."""
    result = Origin(0)
    for origin in origins:
        result |= origin
    return result
