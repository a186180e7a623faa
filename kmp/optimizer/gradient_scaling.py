"""Finds out whether the gradients that `apply` receives are multiplied by a loss scale.

In a graph, the operations that a gradient descends from show it. They are marked where kmp multiplies by the loss scale
and where `unscale` divides by it. Eager tensors have no such history: there the calls since the last step decide.
"""

import enum
import re
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from kmp.backend import distribution, tensorflow_internals
from kmp.gradients import tensor_statistics
from kmp.optimizer.loss_monitor import LossMonitor
from kmp.utils import user_messages


class Scaling(enum.Enum):
    """What gradients are multiplied by."""

    SCALED = "the loss scale"
    UNSCALED = "one: `unscale` divided them by the loss scale"
    NEVER_SCALED = "one: their loss was not multiplied by the loss scale"
    UNKNOWN = "not determined"


class _Origin(enum.Flag):
    """What a gradient of a graph descends from."""

    SCALE = enum.auto()  # a loss scale
    UNSCALE = enum.auto()  # a result of `unscale`
    WEIGHT = enum.auto()  # a trainable variable


_SCALE, _UNSCALE = "kmp_loss_scale", "kmp_unscaled"  # names of the marking operations
_MARK = re.compile(rf"(?:.*/)?({_SCALE}|{_UNSCALE})(?:_\d+)?")
_ORIGIN_OF_MARK = {_SCALE: _Origin.SCALE, _UNSCALE: _Origin.UNSCALE}

_NEVER_SCALED = (
    "`apply` received gradients of a loss that was not multiplied by the loss scale. They are applied as they are: the "
    "model trains without a loss scale, and small gradients underflow. Differentiate the scaled loss: "
    "scaled_loss = optimizer.scale_loss(loss), inside the tape."
)
_DIVIDED_ANYWAY = (
    "`apply` received gradients before any loss went through `scale_loss`. It divides them by the loss scale anyway. "
    "Differentiate the scaled loss: scaled_loss = optimizer.scale_loss(loss), inside the tape. If they are scaled "
    "already, pass unscaled=False."
)
_AMBIGUOUS = (
    "`apply` received gradients that are neither those that `unscale` received since the last step nor those that it "
    "returned. Pass unscaled=True if they are divided by the loss scale, or else unscaled=False."
)


class GradientScaling:
    """Decides for one optimizer how the gradients of a step are scaled, and warns once if its loss is not scaled.

    Args:
        loss_monitor: The monitor of the optimizer's losses.
    """

    _instances: ClassVar["weakref.WeakSet[GradientScaling]"] = weakref.WeakSet()

    def __init__(self, loss_monitor: LossMonitor) -> None:
        self.was_scale_read = False  # by the user, who may multiply by it
        self._loss_monitor = loss_monitor
        self._has_warned = False
        self._has_applied_unscaled_loss = False  # eagerly
        self._scale_variable: Any = None
        self._before_unscale: list[weakref.ref[Any]] = []
        self._after_unscale: list[weakref.ref[Any]] = []
        self._instances.add(self)

    @property
    def has_scaled_loss(self) -> bool:
        """Whether `scale_loss` was called or traced."""
        return self._loss_monitor.has_recorded

    def build(self, scale_variable: Any) -> None:
        """Sets the variable that holds the loss scale."""
        self._scale_variable = scale_variable

    def record_unscaled(self, before: Iterable[Any], after: Iterable[Any]) -> None:
        """Records the gradients that `unscale` received and returned; needed only for eager tensors."""
        self._before_unscale += _eager_references(before)
        self._after_unscale += _eager_references(after)

    def check_known(self, gradients: Sequence[Any]) -> None:
        """Checks that eager gradients, if any were unscaled in this step, are those from before or after that.

        Raises:
            ValueError: If they are others, which may or may not be divided by the loss scale.
        """
        known = (*self._before_unscale, *self._after_unscale)
        if known and tf.executing_eagerly() and not _have_common(known, _tensors(gradients)):
            raise ValueError(_AMBIGUOUS)

    def of(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Scaling:
        """Returns how gradients are scaled, and warns if the loss scale is missing.

        Args:
            gradients: Tensors, `tf.IndexedSlices` or `None`.
            variables: The variables that the optimizer was built on.
        """
        tensors = _tensors(gradients)
        # While a function is traced, the calls so far say nothing about those before the steps that it will run.
        scaling = self._of_eager(tensors) if tf.executing_eagerly() else self._of_symbolic(tensors, variables)
        is_missing = scaling is Scaling.NEVER_SCALED
        if not self._has_warned and (is_missing or not self.has_scaled_loss):
            if _are_zero(tensors):
                return Scaling.UNKNOWN
            self._has_warned = True
            self._has_applied_unscaled_loss = is_missing and tf.executing_eagerly()
            user_messages.warn(_NEVER_SCALED if is_missing else _DIVIDED_ANYWAY)
        return scaling

    def end_step(self) -> None:
        """Forgets the gradients that were unscaled for this step."""
        self._before_unscale.clear()
        self._after_unscale.clear()

    def _of_symbolic(self, tensors: Sequence[tf.Tensor], variables: Sequence[Any]) -> Scaling:
        origins = dict.fromkeys(_handles(variables), _Origin.WEIGHT)
        for other in self._instances:
            if other._scale_variable is not None:
                origins |= dict.fromkeys(_handles([other._scale_variable]), _Origin.SCALE)
        found = _origins(tensors, origins)
        if _Origin.SCALE in found:
            return Scaling.SCALED
        if _Origin.UNSCALE in found:
            return Scaling.UNSCALED
        return Scaling.NEVER_SCALED if _Origin.WEIGHT in found else Scaling.UNKNOWN

    def _of_eager(self, tensors: Sequence[tf.Tensor]) -> Scaling:
        if _have_common(self._after_unscale, tensors):
            return Scaling.UNSCALED
        if self.has_scaled_loss:
            return Scaling.SCALED
        may_be_scaled = self.was_scale_read or any(other.has_scaled_loss for other in self._instances)
        # Saving a model reads the scale too: that does not change how the loop scales.
        return Scaling.UNKNOWN if may_be_scaled and not self._has_applied_unscaled_loss else Scaling.NEVER_SCALED


def mark_scale(scale: Any) -> Any:
    """Returns the loss scale, marked in a graph."""
    return scale if tf.executing_eagerly() else tf.identity(scale, name=_SCALE)


def mark_unscaled(values: Any) -> Any:
    """Returns the values of an unscaled gradient, marked in a graph."""
    return values if tf.executing_eagerly() else tf.identity(values, name=_UNSCALE)


def _origins(tensors: Iterable[tf.Tensor], origin_of_handle: dict[int, _Origin]) -> _Origin:
    """Returns what tensors of a graph descend from; only `_Origin.SCALE` if they descend from a loss scale.

    What `unscale` returned is followed no further: it no longer has the scale that its argument has.

    Args:
        tensors: The tensors.
        origin_of_handle: The origin that a resource stands for, by the `id` of its handle.
    """
    found, queue, seen = _Origin(0), deque(tensors), set()
    captured: dict[tf.Graph, dict[int, Any]] = {}
    while queue:
        tensor = queue.popleft()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        origin = origin_of_handle.get(id(tensor), _Origin(0)) | _marks(tensor)
        if _Origin.SCALE in origin:
            return _Origin.SCALE
        found |= origin
        if origin or not tf.is_symbolic_tensor(tensor):
            continue
        if tensor.graph not in captured:
            captured[tensor.graph] = tensorflow_internals.captured_tensors(tensor.graph)
        outer = captured[tensor.graph].get(id(tensor))
        queue += tensor.op.inputs if outer is None else [outer]
    return found


def _marks(tensor: Any) -> _Origin:
    """Returns the mark of the operation that produced a tensor, or the marks inside the function that it calls."""
    if not tf.is_symbolic_tensor(tensor):
        return _Origin(0)
    found = _Origin(0)
    for op in (tensor.op, *tensorflow_internals.operations_of_called_functions(tensor.op)):
        match = _MARK.fullmatch(op.name) if op.type == "Identity" else None
        found |= _ORIGIN_OF_MARK[match[1]] if match else _Origin(0)
    return found


def _handles(variables: Iterable[Any]) -> list[int]:
    return [id(component.handle) for variable in variables for component in distribution.local_components(variable)]


def _tensors(gradients: Iterable[Any]) -> list[tf.Tensor]:
    values = (tensor_statistics.values_of(gradient) for gradient in gradients if gradient is not None)
    return [value for value in values if isinstance(value, tf.Tensor)]


def _eager_references(gradients: Iterable[Any]) -> list["weakref.ref[Any]"]:
    return [weakref.ref(tensor) for tensor in _tensors(gradients) if not tf.is_symbolic_tensor(tensor)]


def _have_common(references: Iterable["weakref.ref[Any]"], tensors: Iterable[tf.Tensor]) -> bool:
    referenced = {id(tensor) for reference in references if (tensor := reference()) is not None}
    return any(id(tensor) in referenced for tensor in tensors)


def _are_zero(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether all gradients are known to be zero, as those with which a training loop builds the optimizer."""
    values = [tf.get_static_value(tensor) for tensor in tensors]
    return all(value is not None and not value.any() for value in values)
