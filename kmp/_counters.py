"""What the loss scaler keeps on the device beside the scale itself."""

import math
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np
from keras import ops

from kmp import _replicas, statistics
from kmp.records import BIN_COUNT, ExponentHistogram


@keras.saving.register_keras_serializable(package="kmp")
class Counters(keras.Layer):
    """Counts of steps and overflows, in int64: TensorFlow keeps int32 variables on the CPU.

    A layer, because that is Keras' public holder of saved state: as a child of the optimizer it gets a place of its own
    in a file, so that the optimizer's own list of variables stays the one that Keras' class has.
    """

    def __init__(self) -> None:
        super().__init__(name="loss_scale_counters", dtype="float32", trainable=False)
        self.steps = self._counter("steps")
        self.overflows = self._counter("overflows")
        self.overflows_in_a_row = self._counter("overflows_in_a_row")
        self.nonfinite_losses = self._counter("nonfinite_losses")
        self.overflows_by_variable: Any = None

    def build_for(self, variable_count: int) -> None:
        """Creates the counter that has an entry for each variable."""
        self.overflows_by_variable = self._counter("overflows_by_variable", (variable_count,))

    def count(self, overflowed: Any, loss_was_finite: Any, overflows_in_a_row: Any, flags: Any) -> None:
        """Counts one step.

        Args:
            overflowed: Scalar bool, the step was skipped.
            loss_was_finite: Scalar bool, the unscaled loss was finite.
            overflows_in_a_row: Scalar int64, from the scale's rule.
            flags: Bool tensor of shape `(variables,)`, whose gradient was not finite.
        """
        self.steps.assign_add(1)
        self.overflows.assign_add(ops.cast(overflowed, "int64"))
        self.overflows_in_a_row.assign(overflows_in_a_row)
        self.nonfinite_losses.assign_add(ops.cast(ops.logical_not(loss_was_finite), "int64"))
        self.overflows_by_variable.assign_add(ops.cast(flags, "int64"))

    def save_own_variables(self, store: Any) -> None:
        """Saves by name, so that a counter of a later version keeps no file from loading."""
        for variable in self.weights:
            store[variable.name] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Loads the counters that a file holds; one that Keras' own class wrote holds none."""
        for variable in self.weights:
            found = np.asarray(store[variable.name]) if variable.name in store.keys() else None  # noqa: SIM118
            if found is not None and found.shape == tuple(variable.shape):
                variable.assign(found)

    def _counter(self, name: str, shape: tuple[int, ...] = ()) -> keras.Variable:
        return self.add_weight(
            shape=shape, dtype="int64", initializer="zeros", name=name, autocast=False, aggregation="only_first_replica"
        )


class LossWatch:
    """Whether losses were finite before they were scaled, as each replica saw it in its own forward passes.

    Variables, because `scale_loss` and `apply` may be traced into functions of their own.
    """

    def __init__(self) -> None:
        self.nonfinite_calls = _replicas.variable("nonfinite_loss_calls", "int64")
        self.last_was_nonfinite = _replicas.variable("last_loss_was_nonfinite", "float32")

    def note(self, loss: Any) -> None:
        """Remembers a loss until the next one, or until `forget`."""
        nonfinite = statistics.nonfinite(loss)
        self.nonfinite_calls.assign_add(ops.cast(nonfinite, "int64"))
        self.last_was_nonfinite.assign(nonfinite)

    def forget(self) -> None:
        """Forgets the last loss; the count of calls goes on."""
        self.last_was_nonfinite.assign(0.0)


class Sampler:
    """The last sampled histogram, and when to sample the next: set by callbacks, read by the compiled step.

    The cadence is a variable, so that changing or pausing it needs no new trace. Where several callbacks ask, it is the
    greatest common divisor of theirs, so that each finds the samples it asked for.
    """

    def __init__(self) -> None:
        self._asked: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._cadence = keras.Variable(0, dtype="int64", trainable=False, name="sample_every")
        self._first = keras.Variable(0, dtype="int64", trainable=False, name="sample_first")
        self._step = _replicas.variable("sample_step", "int64", aggregation="only_first_replica")
        self._scale = _replicas.variable("sample_loss_scale", "float32", aggregation="only_first_replica")
        self._counts = _replicas.variable("sample_counts", "int64", (BIN_COUNT,))

    def start(self, owner: Any, every_n_steps: int, first: int) -> None:
        """Samples step `first`, and from then on each step that `every_n_steps` divides."""
        self._asked[owner] = every_n_steps
        self._first.assign(first)
        self._cadence.assign(math.gcd(*self._asked.values()))

    def stop(self, owner: Any) -> None:
        """Forgets what `owner` asked for."""
        self._asked.pop(owner, None)
        self._cadence.assign(math.gcd(*self._asked.values()))

    def sample(self, gradients: list[Any], scale: Any, step: Any) -> None:
        """Counts the exponents of `gradients` if `step` is one to sample; part of the compiled step."""
        on_cadence = step % ops.maximum(self._cadence, 1) == 0
        due = ops.logical_and(self._cadence > 0, ops.logical_or(on_cadence, ops.equal(step, self._first)))
        ops.cond(due, lambda: self._record(gradients, scale, step), lambda: None)

    def read(self) -> ExponentHistogram | None:
        """Returns the last sample, or `None` before the first one."""
        step = int(self._step.numpy())
        return ExponentHistogram(self._counts.numpy(), step, float(self._scale.numpy())) if step else None

    def _record(self, gradients: list[Any], scale: Any, step: Any) -> None:
        self._counts.assign(statistics.exponent_counts(gradients))
        self._step.assign(step)
        self._scale.assign(scale)
