"""Measures how a training step changed the weights, from outside the compiled step."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from kmp.gradients.tensor_statistics import update_statistics
from kmp.records import GradientSample


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
        self._before = {path: _copy(variable) for path, variable in variables.items()}

    def disarm(self) -> None:
        """Drops the copies."""
        self._before = {}

    def measure(self, sample: GradientSample) -> GradientSample:
        """Returns the sample with the updates since `arm` added, and drops the copies.

        A sample with a variable that was not copied is returned unchanged.
        """
        names = [name for name in sample.names if name in self._before]
        if len(names) < len(sample.names) or not names:
            self.disarm()
            return sample
        after = [_copy(self._variables[name]) for name in names]
        statistics = update_statistics([self._before[name] for name in names], after)
        self.disarm()
        return replace(
            sample,
            weight_norm=np.sqrt(statistics.weight_square_sum.numpy()),
            update_norm=np.sqrt(statistics.update_square_sum.numpy()),
            updates=statistics.changed.numpy().astype(np.int64),
            lost_updates=statistics.lost.numpy().astype(np.int64),
        )


def with_weight_norms(sample: GradientSample, variables: Mapping[str, Any]) -> GradientSample:
    """Returns the sample with the norms of the weights after the step; unchanged if a variable is missing."""
    if not sample.names or not set(sample.names) <= variables.keys():
        return sample
    weights = [_copy(variables[name]) for name in sample.names]
    statistics = update_statistics(weights, weights)
    return replace(sample, weight_norm=np.sqrt(statistics.weight_square_sum.numpy()))


def _copy(variable: Any) -> tf.Tensor:
    value = getattr(variable, "value", variable)
    return tf.identity(value() if callable(value) else value)
