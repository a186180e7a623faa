"""Finds out whether the gradients that `apply` receives are multiplied by a loss scale.

In a graph, the operations that a gradient descends from show it. They are marked where kmp multiplies by the loss scale
and where `unscale` divides by it. Eager tensors have no history: for them, the calls of the optimizer's methods decide.
"""

import enum
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from kmp.backend import distribution, keras_internals
from kmp.gradients import tensor_statistics
from kmp.optimizer import gradient_ancestry
from kmp.optimizer.gradient_ancestry import Origin
from kmp.optimizer.loss_monitor import LossMonitor
from kmp.utils import user_messages


class Scaling(enum.Enum):
    """What gradients are multiplied by."""

    SCALED = enum.auto()  # by the loss scale
    UNSCALED = enum.auto()  # by nothing any more: `unscale` divided them by the loss scale
    NEVER_SCALED = enum.auto()  # by nothing: their loss was not multiplied by the loss scale
    UNKNOWN = enum.auto()  # not determined; they are divided by the loss scale


_NEVER_SCALED = (
    "The gradients are those of a loss that was not multiplied by the loss scale. They are applied as they are: the "
    "model trains without a loss scale, and small gradients underflow. Differentiate the scaled loss: "
    "scaled_loss = optimizer.scale_loss(loss), inside the tape."
)
_DIVIDED_ANYWAY = (
    "`apply` received gradients before any loss went through `scale_loss`. It divides them by the loss scale anyway. "
    "Differentiate the scaled loss: scaled_loss = optimizer.scale_loss(loss), inside the tape. If they are scaled "
    "already, pass unscaled=False."
)
_MAY_BE_UNSCALED = (
    "`apply` divides the gradients by the loss scale, but they may descend from results of `unscale`. Pass "
    "unscaled=True if they are divided already, or else unscaled=False."
)
_AMBIGUOUS = (
    "`apply` received gradients that are neither those that `unscale` received since the last step nor those that it "
    "returned. Pass unscaled=True if they are divided by the loss scale, or else unscaled=False."
)
_MIXED = "`apply` received some gradients that `unscale` returned and others. Pass all through `unscale`, or none."

_calls_of_scale_loss = [0]  # of all optimizers


class GradientScaling:
    """Decides for one optimizer how the gradients of a step are scaled. Issues each warning once.

    Args:
        loss_monitor: The monitor of the optimizer's losses.
        can_be_missing: Whether gradients may be taken as never scaled. Not with a fixed loss scale: a loop can multiply
            by that number without the optimizer.
    """

    _instances: ClassVar["weakref.WeakSet[GradientScaling]"] = weakref.WeakSet()

    def __init__(self, loss_monitor: LossMonitor, can_be_missing: bool) -> None:
        self._loss_monitor, self._can_be_missing = loss_monitor, can_be_missing
        self._may_be_scaled = False  # by hand or by another optimizer, as far as the graph does not show it
        self._issued: set[str] = set()
        self._handles: list[int] = []
        self._received: weakref.WeakValueDictionary[int, tf.Tensor] = weakref.WeakValueDictionary()  # by `unscale`
        self._returned: weakref.WeakValueDictionary[int, tf.Tensor] = weakref.WeakValueDictionary()
        self._is_unscaled_pending = self._has_traced_unscale = False
        self._graphs_without_scale: weakref.WeakSet[tf.Graph] = weakref.WeakSet()
        self._known_calls = _calls_of_scale_loss[0]
        self._instances.add(self)

    def build(self, scale_variable: Any) -> None:
        """Sets the variable that holds the loss scale."""
        self._handles = distribution.handles_of([scale_variable])

    def record_scale_loss(self) -> None:
        """Records that a loss is scaled: gradients from now on are those of a new loss."""
        _calls_of_scale_loss[0] += 1
        self._known_calls = _calls_of_scale_loss[0]
        self._is_unscaled_pending = False

    def record_scale_read(self) -> None:
        """Records that user code reads the loss scale eagerly, through the property that calls this.

        It may multiply a loss by the scale. Does nothing if Keras reads the property.
        """
        self._may_be_scaled |= tf.executing_eagerly() and not keras_internals.is_read_by_keras()

    def record_unscaled(self, received: Iterable[Any], returned: Iterable[Any]) -> None:
        """Records the gradients that `unscale` received and returned."""
        if not tf.executing_eagerly():
            self._has_traced_unscale = True
            return
        self._received.update({id(tensor): tensor for tensor in _tensors(received)})
        self._returned.update({id(tensor): tensor for tensor in _tensors(returned)})
        self._is_unscaled_pending = True

    def before_unscale(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Scaling:
        """Returns how gradients are scaled that `unscale` receives; warns if the loss scale is missing."""
        tensors = _tensors(gradients)
        return self._checked(self._of(tensors, variables), tensors)

    def in_apply(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Scaling:
        """Returns how gradients are scaled that `apply` receives; warns if the loss scale is missing.

        Args:
            gradients: Tensors, `tf.IndexedSlices` or `None`.
            variables: The variables that the optimizer was built on.

        Raises:
            ValueError: If only some of them were unscaled, or if they are eager tensors and any may have been.
        """
        tensors = _tensors(gradients)
        if tf.executing_eagerly():
            self._check_known(tensors)
        scaling = self._checked(self._of(tensors, variables), tensors)
        self._is_unscaled_pending = False
        is_expected = scaling is not Scaling.UNKNOWN or self._loss_monitor.has_recorded
        if not is_expected and _DIVIDED_ANYWAY not in self._issued and not _are_zero(tensors):
            self._warn_once(_DIVIDED_ANYWAY)
        return scaling

    def _of(self, tensors: Sequence[tf.Tensor], variables: Sequence[Any]) -> Scaling:
        # While a function is traced, the calls so far say nothing about those before the steps that it will run.
        return self._of_eager(tensors) if tf.executing_eagerly() else self._of_symbolic(tensors, variables)

    def _of_symbolic(self, tensors: Sequence[tf.Tensor], variables: Sequence[Any]) -> Scaling:
        handles, graph = self._origin_of_handle(variables), tf.compat.v1.get_default_graph()
        groups = [[tensor] for tensor in tensors] if self._has_traced_unscale else [tensors]
        found = [origins for group in groups if (origins := gradient_ancestry.origins_of(group, handles))]
        are_unscaled = [origins & ~Origin.WEIGHT == Origin.UNSCALE for origins in found]
        origins = gradient_ancestry.union(found)
        if Origin.SCALE in origins:
            if any(are_unscaled):
                raise ValueError(_MIXED)
            return Scaling.SCALED if self._loss_monitor.has_recorded else Scaling.UNKNOWN
        if found and all(are_unscaled):
            return Scaling.UNSCALED
        if Origin.UNSCALE in origins:
            self._warn_once(_MAY_BE_UNSCALED)
        is_missing = origins == Origin.WEIGHT or (not origins and graph in self._graphs_without_scale)
        # TensorFlow copies a scale that was read eagerly into the graph as a constant, which shows no origin.
        if not (is_missing and self._can_be_missing) or self._may_be_scaled:
            return Scaling.UNKNOWN
        self._graphs_without_scale.add(graph)
        return Scaling.NEVER_SCALED

    def _of_eager(self, tensors: Sequence[tf.Tensor]) -> Scaling:
        are_unscaled = [self._returned.get(id(tensor)) is tensor for tensor in tensors]
        if any(are_unscaled):
            if not all(are_unscaled):
                raise ValueError(_MIXED)
            return Scaling.UNSCALED
        if self._loss_monitor.has_recorded:
            return Scaling.SCALED
        # Another optimizer may have scaled the loss, if it scaled any since this one was created.
        self._may_be_scaled |= _calls_of_scale_loss[0] != self._known_calls
        is_missing = self._can_be_missing and not self._may_be_scaled
        return Scaling.NEVER_SCALED if is_missing else Scaling.UNKNOWN

    def _check_known(self, tensors: Sequence[tf.Tensor]) -> None:
        """Raises an error for eager gradients that may descend from results of `unscale` in this step."""
        known = (self._received, self._returned)
        if any(tensors_by_id.get(id(tensor)) is tensor for tensors_by_id in known for tensor in tensors):
            return
        if self._is_unscaled_pending:
            raise ValueError(_AMBIGUOUS)
        if self._has_traced_unscale:
            self._warn_once(_MAY_BE_UNSCALED)

    def _checked(self, scaling: Scaling, tensors: Sequence[tf.Tensor]) -> Scaling:
        if scaling is Scaling.NEVER_SCALED and _NEVER_SCALED not in self._issued:
            if _are_zero(tensors):  # as those with which a loop builds the optimizer
                return Scaling.UNKNOWN
            self._warn_once(_NEVER_SCALED)
        return scaling

    def _origin_of_handle(self, variables: Sequence[Any]) -> dict[int, Origin]:
        scales = [handle for instance in list(self._instances) for handle in instance._handles]
        return dict.fromkeys(distribution.handles_of(variables), Origin.WEIGHT) | dict.fromkeys(scales, Origin.SCALE)

    def _warn_once(self, message: str) -> None:
        if message not in self._issued:
            self._issued.add(message)
            user_messages.warn(message)


def _tensors(gradients: Iterable[Any]) -> list[tf.Tensor]:
    values = (tensor_statistics.values_of(gradient) for gradient in gradients if gradient is not None)
    return [value for value in values if isinstance(value, tf.Tensor)]


def _are_zero(tensors: Sequence[tf.Tensor]) -> bool:
    values = [tf.get_static_value(tensor) for tensor in tensors]
    return all(value is not None and not value.any() for value in values)
