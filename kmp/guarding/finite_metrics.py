"""Excludes batches with a non-finite loss from a model's metrics."""

import math
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from kmp.backend import distribution
from kmp.backend.xla import call_if
from kmp.guarding.assignments import SavedValue
from kmp.guarding.guarded_state import assign_where
from kmp.guarding.step_result import any_of


class FiniteMetrics:
    """Restores the metrics of a model after a batch whose loss is not finite.

    In stock Keras one such batch makes `loss` NaN for the rest of the epoch. A mean over no batch
    is NaN, not 0: after the first batches, if none of them was finite, the metrics keep the NaN
    until one is.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        with model.distribute_strategy.scope():
            # Flags, 1.0 or 0.0: float32 has kernels on every device, and can be summed over
            # replicas.
            self._nonfinite_in_execution = distribution.variable(
                "nonfinite_in_execution", "float32"
            )
            self._only_nonfinite_batches = distribution.variable(
                "only_nonfinite_batches", "float32"
            )

    def begin_execution(self) -> None:
        """Begins a call of the train function, which runs one step or several."""
        if self._model.steps_per_execution > 1:
            self._nonfinite_in_execution.assign(0.0)

    def begin_step(self, batch: list[tf.Tensor], compiles_step: bool) -> dict[int, Any]:
        """Returns the values of the metrics, without those of batches that were not finite.

        Args:
            batch: The tensors of the batch: at the end of data of unknown length, Keras starts a
                step that gets none, and which must not reset the metrics.
            compiles_step: Whether the step of the optimizers is compiled.
        """
        with tf.control_dependencies(batch):
            should_reset = ops.copy(self._only_nonfinite_batches) > 0

            def reset() -> None:
                zeros = [SavedValue(each, ops.zeros_like(each)) for each in self._variables()]
                assign_where(should_reset, zeros)
                self._only_nonfinite_batches.assign(0.0)

            call_if(should_reset, reset, self._compiles(compiles_step))
        return {id(variable): ops.copy(variable) for variable in self._variables()}

    def end_step(self, before: dict[int, Any], is_nonfinite: Any, compiles_step: bool) -> None:
        """Restores the metrics if the loss of the batch was non-finite.

        Args:
            before: What `begin_step` returned.
            is_nonfinite: Scalar bool.
            compiles_step: As for `begin_step`, now that the optimizers are built.
        """

        def restore() -> None:
            # Metrics that are still zero are not restored: a mean over no batch is NaN, not 0.
            nonzero = [ops.any(ops.not_equal(value, 0)) for value in before.values()]
            has_finite = ops.logical_and(is_nonfinite, any_of(nonzero)) if nonzero else is_nonfinite
            saved = [
                SavedValue(each, before.get(id(each), ops.zeros_like(each)))
                for each in self._variables()
            ]
            assign_where(has_finite, saved)
            is_first = ops.logical_and(is_nonfinite, ops.logical_not(has_finite))
            self._only_nonfinite_batches.assign(ops.cast(is_first, "float32"))

        call_if(is_nonfinite, restore, self._compiles(compiles_step))

    def with_loss_of_execution(self, logs: Any, is_nonfinite: Any) -> Any:
        """Returns the logs with a NaN loss if any step of this execution had a non-finite loss.

        Keras returns the logs of its last step.
        """
        has_steps = self._model.steps_per_execution > 1
        if not has_steps or not isinstance(logs, dict) or "loss" not in logs:
            return logs
        flag = ops.cast(is_nonfinite, "float32")
        in_execution = ops.maximum(self._nonfinite_in_execution, flag)
        self._nonfinite_in_execution.assign(in_execution)
        return {**logs, "loss": ops.where(in_execution > 0, math.nan, logs["loss"])}

    def _variables(self) -> list[keras.Variable]:
        return [variable for metric in self._model.metrics for variable in metric.variables]

    def _compiles(self, compiles_step: bool) -> bool:
        """Whether the metrics can be restored in compiled code: TensorFlow keeps int32 on hosts."""
        variables = self._variables()
        on_device = all(each.dtype != "int32" for each in variables)
        return compiles_step and on_device and all(map(distribution.is_local, variables))
