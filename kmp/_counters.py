"""What the loss scaler keeps on the device beside the scale itself."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from kmp import _replicas, _warnings, statistics
from kmp._arguments import SAVED_AS
from kmp._formats import FLOAT16
from kmp.scaling import StepOutcome

_LOSS_IN_FLOAT16 = (
    "The loss was computed in float16, which rounds it to 11 bits and overflows beyond 65504. Compute it in float32: "
    "end the model with kmp.layers.Softmax() or a layer with dtype='float32', or cast its output."
)
_WITHOUT_SCALE_LOSS = (
    "`apply` got gradients before any loss went through `scale_loss`, and divides them by the loss scale all the same. "
    "Differentiate the scaled loss: scaled_loss = optimizer.scale_loss(loss), inside the tape."
)


@keras.saving.register_keras_serializable(package=SAVED_AS)
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
        self.nonfinite_losses_in_a_row = self._counter("nonfinite_losses_in_a_row")
        self.overflows_at_min_scale = self._counter("overflows_at_min_scale")
        self._last_loss = self._counter("last_loss", dtype="float32")
        self._highest_loss = self._counter("highest_loss", dtype="float32")  # in magnitude, of those that were finite
        self._culprit = self._counter("culprit")  # its place among the variables, from 1; 0 before the first overflow
        self.overflows_by_variable: Any = None
        self.culprits_by_variable: Any = None

    def build_for(self, variable_count: int) -> None:
        """Creates the counters that have an entry for each variable."""
        self.overflows_by_variable = self._counter("overflows_by_variable", (variable_count,))
        self.culprits_by_variable = self._counter("culprits_by_variable", (variable_count,))

    def count(
        self,
        step: StepOutcome,
        overflows_in_a_row: Any,
        is_at_min_scale: Any,
        flags: Any,
        order: Sequence[int],
        loss: Any,
    ) -> None:
        """Counts one step.

        Args:
            step: What the scale's rule learnt of it.
            overflows_in_a_row: Scalar int64, from the scale's rule.
            is_at_min_scale: Scalar bool, the rule would back off but the scale is at its lowest.
            flags: Bool tensor of shape `(variables,)`, whose gradient was not finite.
            order: The places of the variables, from the input to the loss.
            loss: Scalar float32, the loss before it was scaled, summed over replicas as their gradients are.
        """
        nonfinite_loss = ops.cast(ops.logical_and(step.overflowed, ops.logical_not(step.loss_was_finite)), "int64")
        in_a_row = (self.nonfinite_losses_in_a_row + nonfinite_loss) * ops.cast(overflows_in_a_row > 0, "int64")
        flags = ops.cast(flags, "int64")
        is_blamed = ops.logical_and(step.overflowed, step.loss_was_finite)  # what is nan from the loss on tells nothing
        culprit = ops.cast(is_blamed, "int64") * _nearest_to_the_loss(flags, order)
        self.steps.assign_add(1)
        self.overflows.assign_add(ops.cast(step.overflowed, "int64"))
        self.overflows_in_a_row.assign(overflows_in_a_row)
        self.nonfinite_losses.assign_add(nonfinite_loss)
        self.nonfinite_losses_in_a_row.assign(in_a_row)
        self.overflows_at_min_scale.assign_add(ops.cast(is_at_min_scale, "int64"))
        self._culprit.assign(ops.where(is_blamed, ops.sum(culprit * _places(flags)), self._culprit))
        self.overflows_by_variable.assign_add(flags)
        self.culprits_by_variable.assign_add(culprit)
        self._last_loss.assign(loss)
        size = ops.where(ops.isfinite(loss), ops.abs(loss), 0.0)
        self._highest_loss.assign(ops.maximum(self._highest_loss, size))

    def read_steps(self) -> int:
        """Copies to the host how many steps were taken, and nothing else."""
        return int(self.steps.numpy())

    def read(self, paths: Sequence[str], has_seen_a_loss: bool) -> dict[str, Any]:
        """Copies the counts to the host.

        Args:
            paths: Those of the variables that the counters were built for.
            has_seen_a_loss: Whether a loss was scaled; otherwise none is told.

        Returns:
            The fields of `kmp.records.Snapshot` that are counted here.
        """
        culprit = int(self._culprit.numpy())
        losses = {"last_loss": float(self._last_loss.numpy()), "highest_loss": float(self._highest_loss.numpy())}
        return (losses if has_seen_a_loss else {}) | {
            "step": self.read_steps(),
            "overflow_count": int(self.overflows.numpy()),
            "overflows_in_a_row": int(self.overflows_in_a_row.numpy()),
            "nonfinite_loss_count": int(self.nonfinite_losses.numpy()),
            "nonfinite_losses_in_a_row": int(self.nonfinite_losses_in_a_row.numpy()),
            "overflows_at_min_scale": int(self.overflows_at_min_scale.numpy()),
            "culprit": paths[culprit - 1] if culprit else None,
            "overflows_by_variable": _read_each(self.overflows_by_variable, paths),
            "culprits_by_variable": _read_each(self.culprits_by_variable, paths),
        }

    def save_own_variables(self, store: Any) -> None:
        """Saves by name, so that a counter of a later version keeps no file from loading."""
        for variable in self.weights:
            store[variable.name] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Loads the counters that a file holds; one that Keras' own class wrote holds none.

        Raises:
            ValueError: If the file counts for another number of variables. Nothing has changed then.
        """
        found = {v.name: np.asarray(store[v.name]) for v in self.weights if v.name in store.keys()}  # noqa: SIM118
        for variable in self.weights:
            value = found.get(variable.name)
            if value is not None and value.shape != tuple(variable.shape):
                raise ValueError(
                    f"The file's loss-scale counter {variable.name!r} has shape {value.shape}, and the optimizer's "
                    f"{tuple(variable.shape)}: it was saved with another model."
                )
        for variable in self.weights:
            if variable.name in found:
                variable.assign(found[variable.name])

    def _counter(self, name: str, shape: tuple[int, ...] = (), dtype: str = "int64") -> keras.Variable:
        options = {"autocast": False, "aggregation": "only_first_replica"}  # all replicas hold the same
        return self.add_weight(shape=shape, dtype=dtype, initializer="zeros", name=name, **options)


def _nearest_to_the_loss(flags: Any, order: Sequence[int]) -> Any:
    """Returns the flags with all but one cleared, the one to blame: an overflow spreads to every variable before it."""
    ranks = np.zeros(len(order), np.int64)
    ranks[list(order)] = np.arange(1, len(order) + 1)
    ranked = flags * ranks
    return flags * ops.cast(ops.equal(ranked, ops.max(ranked)), "int64")


def _places(flags: Any) -> np.ndarray:
    return np.arange(1, flags.shape[0] + 1)


def _read_each(counter: Any, paths: Sequence[str]) -> dict[str, int]:
    counts = [] if counter is None else counter.numpy()
    return {path: int(count) for path, count in zip(paths, counts, strict=False) if count}


class LossWatch:
    """Whether losses were finite before they were scaled, as each replica saw it in its own forward passes.

    Variables, because `scale_loss` and `apply` may be traced into functions of their own.
    """

    def __init__(self) -> None:
        self.nonfinite_calls = _replicas.variable("nonfinite_loss_calls", "int64")
        self.last_was_nonfinite = _replicas.variable("last_loss_was_nonfinite", "float32")
        self.any_was_nonfinite = _replicas.variable("any_loss_was_nonfinite", "float32")
        self.has_seen_one = self._has_warned = False
        self.last_loss = _replicas.variable("last_loss", "float32")

    def note(self, loss: Any) -> None:
        """Remembers a loss of a step, until `forget`; warns if the first one is float16."""
        if keras.backend.standardize_dtype(loss.dtype) == FLOAT16.name and not self.has_seen_one:
            _warnings.warn(_LOSS_IN_FLOAT16)
        self.has_seen_one = True
        nonfinite = statistics.nonfinite(loss)
        self.last_loss.assign(ops.cast(ops.mean(loss), "float32"))
        self.nonfinite_calls.assign_add(ops.cast(nonfinite, "int64"))
        self.last_was_nonfinite.assign(nonfinite)
        self.any_was_nonfinite.assign(ops.maximum(self.any_was_nonfinite, nonfinite))

    def excuse(self, where: Any) -> None:
        """Takes the blame from the loss scale for what this step's gradients will be, if the scalar bool is true."""
        self.any_was_nonfinite.assign(ops.maximum(self.any_was_nonfinite, ops.cast(where, "float32")))

    def seen(self) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns scalar float32: 1.0 if the step's last loss was not finite; the same of any of them; the last loss.

        A loop may scale a loss and drop it, so only the last one can make a step count as skipped; but where a step has
        several losses, any of them can be why its gradients are not finite.
        """
        return ops.copy(self.last_was_nonfinite), ops.copy(self.any_was_nonfinite), ops.copy(self.last_loss)

    def forget(self) -> None:
        """Forgets the losses of a step; the count of calls goes on."""
        for variable in (self.last_was_nonfinite, self.any_was_nonfinite, self.last_loss):
            variable.assign(0.0)

    def warn_if_it_saw_none(self) -> None:
        """Warns, once, that gradients are about to be unscaled which come from no scaled loss."""
        if not self.has_seen_one and not self._has_warned:
            self._has_warned = True
            _warnings.warn(_WITHOUT_SCALE_LOSS)
