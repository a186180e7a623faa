"""Decides in a training step, without waiting, whether the step is sampled."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from kmp.backend import distribution, xla

NEVER = 2**62  # an interval that no step is divisible by


class SamplingClock:
    """Knows which steps are due: one given step, and each that an interval divides.

    The interval and the step are variables, so that a change does not retrace the training step. On
    a GPU, a branch on a value of the device makes the host wait for all that was launched before.
    So the host has a copy of them, and counts the steps itself, for each replica. A step that XLA
    compiles as a whole cannot read variables of the host: it compares the numbers on the device.

    Args:
        steps_taken: Returns the number of steps that the optimizer has taken. It is called outside
            of graphs.
    """

    def __init__(self, steps_taken: Callable[[], int]) -> None:
        self._steps_taken = steps_taken
        self._replicas = tf.distribute.get_strategy().num_replicas_in_sync
        self._on_device = _Schedule()
        self._on_host: _Schedule | None = None
        self._host_steps: list[keras.Variable] = []

    def set(self, interval: int, step: int) -> None:
        """Makes each step that `interval` divides due, starting with the next one.

        The given `step` is due too, if it is not 0.
        """
        # The variables of a strategy are on the devices of replicas.
        if self._on_host is None and not tf.distribute.has_strategy():
            names = [f"sample_steps_{replica}" for replica in range(self._replicas)]
            with tf.device("CPU:0"):
                self._on_host = _Schedule()
                self._host_steps = [_scalar(0, name) for name in names]
        self._on_device.set(interval, step)
        if self._on_host:
            self._on_host.set(interval, step)
            self.follow(self._steps_taken())

    def follow(self, steps_taken: int) -> None:
        """Corrects the host's count, which a checkpoint that is restored does not have."""
        for steps in self._host_steps:
            steps.assign(steps_taken)

    def is_due(self, step: Callable[[], Any], gradient: Any) -> Any:
        """Returns a scalar bool, whether the current step is due.

        Call it once in each step of a replica.

        Args:
            step: Returns its number on the device, a scalar int64 counted from 1.
            gradient: Any tensor of the step that needs its batch: at the end of a dataset of
                unknown length, Keras starts a step that gets none, and which must not count.
        """
        if not self._on_host or xla.is_tracing():
            return self._on_device.is_due(step())
        with tf.device("CPU:0"), tf.control_dependencies([gradient]):
            steps = self._host_steps[distribution.replica_id()]
            return self._on_host.is_due(steps.value.assign_add(1))


class _Schedule:
    def __init__(self) -> None:
        self._interval = _scalar(NEVER, "sample_every")
        self._step = _scalar(0, "sample_first")

    def set(self, interval: int, step: int) -> None:
        self._interval.assign(interval)
        self._step.assign(step)

    def is_due(self, step: Any) -> Any:
        # `read_value` reads on the device that is asked for, unlike a conversion to a tensor.
        interval, first = self._interval.value.read_value(), self._step.value.read_value()
        return ops.logical_or(ops.equal(step % interval, 0), ops.equal(step, first))


def _scalar(value: int, name: str) -> keras.Variable:
    return keras.Variable(value, dtype="int64", trainable=False, name=name)
