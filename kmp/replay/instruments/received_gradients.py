"""What the optimizers of a training step receive in a pass."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmp.backend import keras_internals
from kmp.backend.thread_overrides import own_method
from kmp.backend.undo import Undos
from kmp.gradients.unscaling import multiply_gradients
from kmp.optimizer import LossScaleOptimizer
from kmp.utils.float_formats import FLOAT32

Method = Callable[..., Any]


class StepIsDone(BaseException):
    """Ends a training step of Keras.

    One of the user's own runs to its end, which may undo what it did before.
    """


class ReceivedGradients:
    """Keeps the losses and gradients that optimizers get, in place of a loss scale and updates.

    Args:
        optimizers: The optimizers of the training step.
        factor: What to multiply the loss by.
        read_scale: What the training step reads as `loss_scale` of an optimizer.
        watched: The optimizer whose losses count, and are passed backward; `None` for all.
        ends_step: Whether to raise `StepIsDone` when all optimizers that scale the loss have their
            gradients.

    Attributes:
        is_done: Whether they have.
        has_read_scale: Whether the training step has read a loss scale.
        is_backward: Whether a loss was scaled since the last `apply`: another network may follow.
        losses: The losses before the factor.
        gradients: The gradients by the `id` of the variable, multiplied by the factor.
    """

    def __init__(
        self,
        optimizers: Sequence[keras.optimizers.Optimizer],
        factor: float,
        *,
        read_scale: float,
        ends_step: bool,
        watched: LossScaleOptimizer | None = None,
    ) -> None:
        self.factor, self.read_scale = factor, read_scale
        self.has_read_scale = False
        self.is_done = False
        self.is_backward = False
        self.losses: list[float] = []
        self.gradients: dict[int, Any] = {}
        self._optimizers, self.watched = optimizers, watched
        self._ends_step = ends_step
        scaling = (each for each in optimizers if isinstance(each, LossScaleOptimizer))
        self._waiting = set(map(id, scaling))

    @contextlib.contextmanager
    def in_place_of_updates(self) -> Iterator[None]:
        """Replaces the methods of the optimizers in the context."""
        with Undos() as undos, undos.first_attempt():
            for optimizer in self._optimizers:
                undos.enter(_Receiver(self, optimizer).in_place())
                if isinstance(optimizer, LossScaleOptimizer):
                    undos.enter(_Receiver(self, optimizer.inner_optimizer).in_place())
            yield

    def add(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[Any],
        variables: Sequence[keras.Variable],
    ) -> None:
        """Adds the gradients that an optimizer gets, multiplied by the factor."""
        self.is_backward = False
        for variable, gradient in zip(variables, gradients, strict=True):
            self.gradients[id(variable)] = gradient
        self._waiting.discard(id(optimizer))
        self.is_done = not self._waiting
        if self.is_done and self._ends_step:
            raise StepIsDone


def _instead(method: Method, original: Method) -> Method:
    """Returns a method that does not call the original one."""
    del original
    return method


class _Receiver:
    """The methods of one optimizer in a pass."""

    def __init__(self, received: ReceivedGradients, optimizer: keras.optimizers.Optimizer) -> None:
        self._received = received
        self._optimizer = optimizer
        self._is_scaling = isinstance(optimizer, LossScaleOptimizer)
        self._are_unscaled = not self._is_scaling  # the gradients that `apply` gets

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        names = ["apply"]
        if self._is_scaling:
            names += ["scale_loss", "unscale", "_bounded_scale"]
        with Undos() as undos, undos.first_attempt():
            for name in names:
                method = getattr(self, name)
                undos.enter(own_method(self._optimizer, name, functools.partial(_instead, method)))
            yield

    def scale_loss(self, loss: Any) -> Any:
        self._are_unscaled = False
        self._received.is_backward = True
        loss = tf.convert_to_tensor(loss)
        loss = tf.cast(loss, keras.backend.result_type(loss.dtype.name, FLOAT32.name))
        if self._received.watched not in (None, self._optimizer):
            return loss * tf.zeros_like(loss)
        self._received.losses.append(float(np.mean(loss.numpy())))
        return loss * tf.cast(self._received.factor, loss.dtype)

    def _bounded_scale(self, highest: float) -> tf.Tensor:
        self._received.has_read_scale = True
        return tf.constant(min(self._received.read_scale, highest), tf.float32)

    def unscale(self, grads: Sequence[Any]) -> list[Any]:
        self._are_unscaled = True
        return multiply_gradients(list(grads), 1.0 / self._received.factor)

    def apply(
        self,
        grads: Sequence[Any],
        trainable_variables: Sequence[keras.Variable] | None = None,
        *,
        unscaled: bool | None = None,
    ) -> None:
        if self._received.is_done:
            return
        if not self._is_scaling:
            are_unscaled = True
        else:
            are_unscaled = self._are_unscaled if unscaled is None else unscaled
            self._are_unscaled = False
        if are_unscaled:
            grads = multiply_gradients(list(grads), self._received.factor)
        variables = trainable_variables
        if variables is None:
            variables = keras_internals.variables_to_train(self._optimizer)
        self._received.add(self._optimizer, grads, variables)
