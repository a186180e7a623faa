"""Batch normalization with float32 statistics that ignores non-finite batches."""

from typing import Any

import keras
from keras import ops

from kmp.layers.fused_normalization import batch_normalization
from kmp.utils import validation
from kmp.utils.float_formats import DTYPES_16_BIT


@keras.saving.register_keras_serializable("kmp")
class BatchNormalization(keras.layers.BatchNormalization):
    """Batch normalization with float32 statistics that a non-finite batch does not update.

    Under every policy, the batch's mean and variance are computed in float32 and the moving
    statistics are stored in float32; the output has the policy's compute dtype. If a batch would
    make any moving statistic Inf or NaN, none of them is updated. Keras' own layer does update
    them, and `predict` then returns NaN permanently.

    Args:
        axis: Integer, the feature axis.
        momentum: Float from 0 to 1, the weight of the old value in the moving statistics.
        epsilon: Float above 0, added to the variance.
        **kwargs: Other arguments of `keras.layers.BatchNormalization`.

    Raises:
        TypeError: If `axis`, `momentum` or `epsilon` has the wrong type.
        ValueError: If `momentum` or `epsilon` is out of range.

    Example:
    >>> import keras, kmp
    >>> layer = kmp.layers.BatchNormalization(dtype="mixed_float16")
    >>> _ = layer(keras.ops.array([[1.0], [float("inf")]]), training=True)
    >>> float(layer.moving_mean[0]), layer.moving_mean.dtype
    (0.0, 'float32')
    """

    def __init__(
        self, axis: int = -1, momentum: float = 0.99, epsilon: float = 1e-3, **kwargs: Any
    ) -> None:
        axis = validation.integer("axis", axis)
        momentum = validation.number(
            "momentum", momentum, "a number from 0 to 1", lambda v: 0.0 <= v <= 1.0
        )
        epsilon = validation.number(
            "epsilon", epsilon, "a finite number above 0", lambda v: v > 0.0
        )
        policy = keras.dtype_policies.get(kwargs.get("dtype") or keras.config.dtype_policy())
        if policy.variable_dtype in DTYPES_16_BIT:
            policy = keras.DTypePolicy(f"mixed_{policy.compute_dtype}")
        super().__init__(axis, momentum, epsilon, **kwargs | {"dtype": policy})

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        if not (training and self.trainable):
            return batch_normalization(self, inputs, training=training, mask=mask)
        statistics = self.non_trainable_variables
        before = [ops.copy(variable) for variable in statistics]
        outputs = batch_normalization(self, inputs, training=training, mask=mask)
        # A predicated write needs no decision of the host, unlike a branch.
        is_finite = ops.all(ops.isfinite(ops.stack([variable.value for variable in statistics])))
        for variable, value in zip(statistics, before, strict=True):
            variable.assign(ops.where(is_finite, variable, value))
        return outputs
