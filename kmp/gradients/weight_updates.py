"""Measures how a training step changed the weights, from outside the compiled step."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import tensorflow as tf
from keras import ops

from kmp.gradients.tensor_groups import TensorGroup, measure_in_groups
from kmp.gradients.unscaling import Variables
from kmp.records import GradientSample
from kmp.utils import FLOAT16

_MAX_PAIRS = 2**22  # weights in a group: measuring takes several times their memory


class UpdateWatch:
    """Copies weights before a step and measures on the device how the step changed them.

    This runs outside the compiled step. Inside, every step would copy the weights, or the optimizer would be traced
    twice.
    """

    def __init__(self) -> None:
        self._before: dict[str, tf.Tensor] = {}
        self._variables: Mapping[str, Any] = {}

    @property
    def is_armed(self) -> bool:
        """Whether weights have been copied but not measured yet."""
        return bool(self._before)

    def arm(self, variables: Mapping[str, Any]) -> None:
        """Copies variables, given by path, before a step."""
        self._variables = variables
        self._before = {path: tf.identity(ops.convert_to_tensor(variable)) for path, variable in variables.items()}

    def disarm(self) -> None:
        """Drops the copies."""
        self._before = {}

    def measure(self, sample: GradientSample) -> GradientSample:
        """Returns the sample with the updates since `arm` added, and drops the copies.

        A sample with a variable that was not copied is returned unchanged.
        """
        before, self._before = self._before, {}
        if not sample.names or not set(sample.names) <= before.keys():
            return sample
        old, new = ([weights[name] for name in sample.names] for weights in (before, self._variables))
        return replace(sample, **{name: values.numpy() for name, values in update_statistics(old, new).items()})


def with_weight_norms(sample: GradientSample, variables: Mapping[str, Any]) -> GradientSample:
    """Returns the sample with the norms of the weights after the step; unchanged if a variable is missing."""
    if not sample.names or not set(sample.names) <= variables.keys():
        return sample
    weights = [variables[name] for name in sample.names]
    return replace(sample, weight_norm=update_statistics(weights, weights)["weight_norm"].numpy())


def update_statistics(before: Variables, after: Variables) -> dict[str, tf.Tensor]:
    """Measures how an optimizer step changed each variable.

    Args:
        before: At least one tensor: a copy of each variable before the step, of any shape and float dtype. All are
            converted to float32, so changes below its precision or its smallest normal number are not counted.
        after: The same variables after the step.

    Returns:
        `weight_norm`, `update_norm`, `updates` and `lost_updates`, as in `kmp.records.GradientSample`.
    """
    lists = [[ops.convert_to_tensor(weights) for weights in variables] for variables in (before, after)]
    statistics = measure_in_groups(_measure, *lists, max_elements=_MAX_PAIRS)
    return dict(zip(("weight_norm", "update_norm", "updates", "lost_updates"), statistics, strict=True))


def _measure(before: TensorGroup, after: TensorGroup) -> tuple[tf.Tensor, ...]:
    old, new = before.values, after.values
    # The difference of two equal Infs is NaN.
    unchanged = tf.equal(new, old) | (tf.math.is_nan(new) & tf.math.is_nan(old))
    update = tf.where(unchanged, 0.0, new - old)
    changed = tf.not_equal(update, 0.0)
    is_small = tf.abs(update) < 2.0 ** -(FLOAT16.fraction_bits + 1) * tf.abs(old)
    norms = (tf.sqrt(before.square_sum(values)) for values in (old, update))
    return *norms, before.count_true(changed), before.count_true(tf.logical_and(changed, is_small))
