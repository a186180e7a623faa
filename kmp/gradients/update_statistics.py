"""What a step did to the weights, measured around it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from kmp.gradients import tensor_statistics
from kmp.records import GradientSample


class UpdateWatch:
    """Copies weights before a step, and measures on the device what the step added to them.

    Around the compiled step and not in it: there a copy would have to be taken in every step, or the optimizer traced
    twice.
    """

    def __init__(self) -> None:
        self._before: dict[str, tf.Tensor] = {}
        self._variables: Mapping[str, Any] = {}

    @property
    def is_armed(self) -> bool:
        """Whether weights were copied and not measured yet."""
        return bool(self._before)

    def arm(self, variables: Mapping[str, Any]) -> None:
        """Copies the variables, by path, before a step."""
        self._variables = variables
        self._before = {path: _copy(variable) for path, variable in variables.items()}

    def disarm(self) -> None:
        """Forgets the copies."""
        self._before = {}

    def measure(self, sample: GradientSample) -> GradientSample:
        """Returns the sample of the step that has happened since, with its updates; the copies are dropped."""
        names = [name for name in sample.names if name in self._before]
        if len(names) < len(sample.names) or not names:
            self.disarm()
            return sample
        after = [_copy(self._variables[name]) for name in names]
        found = tensor_statistics.of_updates([self._before[name] for name in names], after)
        self.disarm()
        return replace(
            sample,
            weight_norm=np.sqrt(found.weight_square_sum.numpy()),
            update_norm=np.sqrt(found.update_square_sum.numpy()),
            updates=found.changed.numpy().astype(np.int64),
            lost_updates=found.lost.numpy().astype(np.int64),
        )


def _copy(variable: Any) -> tf.Tensor:
    value = getattr(variable, "value", variable)
    return tf.identity(value() if callable(value) else value)
