"""Layers that force float32 where float16 loses: they serialize, and stay float32 after save and load."""

from typing import Any

import keras
from keras import ops

from kmp.backend import SavedState, register
from kmp.utils import HALF, validation


@register
class BatchNormalization(keras.layers.BatchNormalization):
    """Batch normalization whose statistics are float32 and never learn from a batch with a non-finite value.

    The batch's mean and variance are taken in float32, and the moving ones kept in it, under every policy; the output
    has the policy's compute dtype. A batch that would make a moving statistic inf or nan leaves all of them as they
    were: stock Keras keeps it, and `predict` is nan for good.

    Args:
        axis: Integer, the axis of the features.
        momentum: Float from 0 to 1, the share of the old moving statistics that stays.
        epsilon: Float above 0, added to the variance.
        **kwargs: As in `keras.layers.BatchNormalization`.

    Raises:
        TypeError: If one of the three is not a number of its kind.
        ValueError: If one of them is outside its range.

    Example:
    >>> layer = BatchNormalization(dtype="mixed_float16")
    >>> _ = layer(ops.array([[1.0], [float("inf")]]), training=True)
    >>> float(layer.moving_mean[0]), layer.moving_mean.dtype
    (0.0, 'float32')
    """

    def __init__(self, axis: int = -1, momentum: float = 0.99, epsilon: float = 1e-3, **kwargs: Any) -> None:
        axis = validation.integer("axis", axis)
        momentum = validation.number("momentum", momentum, "a number from 0 to 1", lambda v: 0.0 <= v <= 1.0)
        epsilon = validation.number("epsilon", epsilon, "a finite number above 0", lambda v: v > 0.0)
        policy = _with_float32_variables(kwargs.get("dtype"))
        super().__init__(axis, momentum, epsilon, **kwargs | {"dtype": policy})

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        if not (training and self.trainable):
            return super().call(inputs, training=training, mask=mask)
        before = SavedState(lambda: self.non_trainable_variables)
        outputs = super().call(inputs, training=training, mask=mask)
        finite = [ops.all(ops.isfinite(variable)) for variable in self.non_trainable_variables]
        before.restore(ops.logical_not(ops.all(ops.stack(finite))))
        return outputs


def _with_float32_variables(dtype: Any) -> keras.DTypePolicy:
    policy = keras.dtype_policies.get(dtype) if dtype is not None else keras.config.dtype_policy()
    if policy.variable_dtype in HALF:
        return keras.DTypePolicy(f"mixed_{policy.compute_dtype}")
    return policy
