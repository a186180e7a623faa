"""Samples gradients in the training step, and measures outside of it what the step changed."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf
from keras import ops

from kmp.backend import distribution
from kmp.backend.xla import outlined
from kmp.gradients.sampling_clock import NEVER, SamplingClock
from kmp.gradients.tensor_groups import Gradients, Variables, values_of
from kmp.gradients.tensor_statistics import (
    GradientStatistics,
    gradient_statistics,
    merged_sample,
    update_statistics,
)
from kmp.gradients.unscaling import is_overwritten, multiply_gradients
from kmp.records import BIN_COUNT, GradientSample
from kmp.utils.names import unique_names

# What is stored of a sample: its step and loss scale, then the statistics of each variable. All in
# one float64 variable, which has each number exactly: TensorFlow visits each variable of a branch
# in every step, and each takes longer than the branch itself.
_ABOUT = 2
_NUMBERS = BIN_COUNT + len(GradientStatistics._fields) - 1  # of a variable


def paths_of(variables: Variables) -> list[str]:
    """Returns the paths of variables; a repeated path gets a number."""
    return unique_names(getattr(variable, "path", variable.name) for variable in variables)


class GradientSampler:
    """Stores the last gradient sample, and when the training step takes the next one.

    Callbacks set the interval, and the compiled step reads it. Changing the interval or pausing
    does not retrace the step. With several callbacks it is the greatest common divisor of their
    intervals, so that each callback gets the samples it requested.

    Args:
        steps_taken: Returns the number of steps that the optimizer has taken.

    Attributes:
        is_active: Whether steps that are traced now can sample, because sampling was started once.
    """

    def __init__(self, steps_taken: Callable[[], int]) -> None:
        self.is_active = False
        self._strategy = tf.distribute.get_strategy()
        self._intervals: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._clock = SamplingClock(steps_taken)
        self._first_step = 0
        self._paths: list[str] = []
        self._indices: list[int] = []
        self._storage: Any = None

    def build(self, variables: Variables) -> None:
        """Sets the variables to sample, without float8 scales.

        Those are variables that Keras overwrites with their gradient.
        """
        self._paths = paths_of(variables)
        kept = [not is_overwritten(variable) for variable in variables]
        self._indices = [index for index, is_kept in enumerate(kept) if is_kept]
        if self.is_active:
            self._create_storage()

    def start(self, owner: Any, every_n_steps: int, first: int = 0) -> bool:
        """Samples each step divisible by `every_n_steps`, until `stop`.

        The step `first` is sampled too, if it is not 0. A second call for the same owner, which
        must support weak references, replaces its interval.

        Returns:
            Whether functions traced before must be traced again, because they cannot sample. In
            Keras: `model.make_train_function(force=True)`.
        """
        self._intervals[owner] = every_n_steps
        self._first_step = first or self._first_step
        self._clock.set(self._common_interval, self._first_step)
        is_new = not self.is_active
        if is_new and self._paths:  # else `build` creates it
            with self._strategy.scope():  # callbacks call outside of it
                self._create_storage()
        self.is_active = True
        return is_new

    def stop(self, owner: Any) -> None:
        """Stops sampling for `owner`."""
        self._intervals.pop(owner, None)
        if not self._intervals:
            self._first_step = 0
        self._clock.set(self._common_interval, self._first_step)

    def sample(
        self,
        gradients: Gradients,
        scale: Callable[[], Any],
        step: Callable[[], Any],
        unscaled: bool,
    ) -> None:
        """Measures gradients, times the scale, if the current step is due.

        It is part of the training step.

        Args:
            gradients: At least one that is not `None`.
            scale: Returns the loss scale, if it is needed.
            step: Returns the number of the current step, a scalar int64 counted from 1, if it is
                needed.
            unscaled: Whether the gradients are divided by the scale already.
        """
        present = next(gradient for gradient in gradients if gradient is not None)
        is_due = self._clock.is_due(step, values_of(present))

        def record() -> None:
            loss_scale, number = scale(), step()
            if not self._indices:
                return
            sampled = [gradients[index] for index in self._indices]
            if unscaled:
                sampled = multiply_gradients(sampled, loss_scale)
            counts, *columns = gradient_statistics(sampled)
            about = tf.stack([tf.cast(number, tf.float64), tf.cast(loss_scale, tf.float64)])
            parts = [counts, *(column[:, None] for column in columns)]
            of_variables = tf.concat([tf.cast(part, tf.float64) for part in parts], axis=1)
            self._storage.assign(tf.concat([about, tf.reshape(of_variables, [-1])], axis=0))

        ops.cond(is_due, outlined(record), lambda: None)

    def read(self, order: Sequence[int], steps: int) -> GradientSample | None:
        """Returns the last sample of this process' replicas, or `None` if there is none.

        Args:
            order: Indices of all variables, ordered from the input to the loss.
            steps: The number of steps taken. Loading a checkpoint may reset it; a sample of a later
                step is ignored.
        """
        self._clock.follow(steps)
        if self._storage is None:
            return None
        values = distribution.local_values(self._storage)
        step, scale = values[0][:_ABOUT].tolist()
        if not 0 < step <= steps:
            return None
        row_of = {index: row for row, index in enumerate(self._indices)}
        sampled = [index for index in order if index in row_of]
        rows = [row_of[index] for index in sampled]
        replicas = []
        for each in values:
            numbers = each[_ABOUT:].reshape(-1, _NUMBERS)[rows]
            replicas.append(GradientStatistics(numbers[:, :BIN_COUNT], *numbers[:, BIN_COUNT:].T))
        names = tuple(self._paths[index] for index in sampled)
        return merged_sample(int(step), scale, names, replicas)

    def _create_storage(self) -> None:
        size = _ABOUT + len(self._indices) * _NUMBERS
        self._storage = distribution.variable(
            "gradient_sample", "float64", (size,), aggregation="only_first_replica"
        )

    @property
    def _common_interval(self) -> int:
        # An owner with `NEVER` only prepares the step: the greatest common divisor with it would
        # sample more often.
        intervals = [each for each in self._intervals.values() if each < NEVER]
        return math.gcd(*intervals) or NEVER


def copies_of(variables: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """Returns copies of variables, by path.

    Updates are measured outside the compiled step. Inside, every step would copy the weights, or
    the optimizer would be traced twice.
    """
    return {
        path: tf.identity(ops.convert_to_tensor(variable)) for path, variable in variables.items()
    }


def with_updates(
    sample: GradientSample, before: Mapping[str, Any], after: Mapping[str, Any]
) -> GradientSample:
    """Returns the sample with what changed from the weights before a step to those after it.

    The sample is returned as it is if a weight is missing.
    """
    if not sample.names or not set(sample.names) <= before.keys() & after.keys():
        return sample
    old = [before[name] for name in sample.names]
    new = [after[name] for name in sample.names]
    statistics = update_statistics(old, new)._asdict()
    columns: dict[str, Any] = {name: tensor.numpy() for name, tensor in statistics.items()}
    return replace(sample, **columns)
