"""Layers that force float32 where float16 loses: they serialize, and stay float32 after save and load."""

import inspect
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from kmp import _arguments
from kmp._arguments import SAVED_AS
from kmp._formats import HALF
from kmp._state import Kept, sublayers

__all__ = ["BatchNormalization", "Float32", "Softmax"]


@keras.saving.register_keras_serializable(package=SAVED_AS)
class Float32(keras.Layer):
    """Runs a layer or function in float32, whatever the policy: inputs up to float32, computation and output in it.

    For what float16 endangers: exp, log, powers, norms, variances, sums over many elements. Tensors that are not
    floating point pass as they are.

    Args:
        layer: A layer, which is set to float32 together with the layers inside it; or a function of tensors, registered
            with `keras.saving.register_keras_serializable` if the model is to be saved.
        **kwargs: `name`, and whatever else `keras.Layer` takes. A `dtype` other than float32 is an error.

    Call arguments are those of the layer or function; arrays and tensors among them are cast.

    Raises:
        TypeError: If `layer` is not a layer or function.
        ValueError: If `dtype` is not float32, or `layer` has variables in float16 or bfloat16 already.

    Example:
    >>> norm = Float32(lambda x: ops.sqrt(ops.sum(ops.square(x), axis=-1)))
    >>> float(norm(ops.full((1, 4096), 8.0, dtype="float16"))[0])  # 4096 * 64 is beyond float16
    512.0
    """

    def __init__(self, layer: keras.Layer | Callable[..., Any], **kwargs: Any) -> None:
        if not callable(layer) or isinstance(layer, type):
            raise TypeError(f"`layer` must be a layer, not its class, or a function. Received: layer={layer!r}")
        super().__init__(**_in_float32(kwargs))
        self.layer = layer
        self.supports_masking = getattr(layer, "supports_masking", True)
        self._passes_training = not isinstance(layer, keras.Layer) and _takes_training(layer)
        if isinstance(layer, keras.Layer):
            _refuse_half_variables(layer)
            _set_float32(layer)

    def build(self, input_shape: Any) -> None:
        """Builds the layer inside; one that needs several shapes builds itself when it is first called."""
        if isinstance(self.layer, keras.Layer) and not self.layer.built and _takes_one_shape(self.layer):
            self.layer.build(input_shape)
            _set_float32(self.layer)  # a model may make layers of its own when it is built

    def call(self, inputs: Any, *args: Any, training: bool | None = None, **kwargs: Any) -> Any:
        if self._passes_training:  # a layer inside learns it from Keras
            kwargs["training"] = training
        # A tensor that is float32 already is handed on itself: a cast would lose the logits that Keras hangs on
        # softmax.
        return keras.tree.map_structure(to_float32, self.layer(inputs, *args, **kwargs))

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """The mask that the layer inside makes of `previous_mask`."""
        compute = getattr(self.layer, "compute_mask", None)
        return compute(inputs, previous_mask) if compute else previous_mask

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"layer": keras.saving.serialize_keras_object(self.layer)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Float32":
        layer = keras.saving.deserialize_keras_object(config["layer"])
        return cls(**config | {"layer": layer})


@keras.saving.register_keras_serializable(package=SAVED_AS)
class Softmax(keras.layers.Softmax):
    """Softmax whose input, computation and output are float32: what a classifier ends with.

    Cross-entropy on its output has the value and gradient of cross-entropy with `from_logits=True`.

    Args:
        axis: Integer, or list of integers, over which the probabilities sum to 1.
        **kwargs: `name`, and whatever else `keras.Layer` takes. A `dtype` other than float32 is an error.

    Raises:
        TypeError: If `axis` is not made of integers.
        ValueError: If `dtype` is not float32.

    Example:
    >>> Softmax()(ops.zeros((1, 4), dtype="float16")).dtype.name
    'float32'
    """

    def __init__(self, axis: int | list[int] = -1, **kwargs: Any) -> None:
        for one in axis if isinstance(axis, list | tuple) else [axis]:
            _arguments.integer("axis", one)
        super().__init__(axis=axis, **_in_float32(kwargs))


@keras.saving.register_keras_serializable(package=SAVED_AS)
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
        axis = _arguments.integer("axis", axis)
        momentum = _arguments.number("momentum", momentum, "a number from 0 to 1", lambda v: 0.0 <= v <= 1.0)
        epsilon = _arguments.number("epsilon", epsilon, "a finite number above 0", lambda v: v > 0.0)
        policy = _with_float32_variables(kwargs.get("dtype"))
        super().__init__(axis, momentum, epsilon, **kwargs | {"dtype": policy})

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        if not (training and self.trainable):
            return super().call(inputs, training=training, mask=mask)
        before = Kept(lambda: self.non_trainable_variables)
        outputs = super().call(inputs, training=training, mask=mask)
        finite = [ops.all(ops.isfinite(variable)) for variable in self.non_trainable_variables]
        before.put_back(ops.logical_not(ops.all(ops.stack(finite))))
        return outputs


def _in_float32(kwargs: dict[str, Any]) -> dict[str, Any]:
    asked = kwargs.get("dtype", "float32")
    policy = keras.dtype_policies.get(asked)
    if (policy.compute_dtype, policy.variable_dtype) != ("float32", "float32"):
        raise ValueError(f"`dtype` must be float32: the layer exists for it. Received: dtype={asked!r}")
    return kwargs | {"dtype": "float32"}


def _with_float32_variables(dtype: Any) -> keras.DTypePolicy:
    policy = keras.dtype_policies.get(dtype) if dtype is not None else keras.config.dtype_policy()
    if policy.variable_dtype in HALF:
        return keras.DTypePolicy(f"mixed_{policy.compute_dtype}")
    return policy


def _set_float32(layer: keras.Layer) -> None:
    for inner in sublayers(layer):
        inner.dtype_policy = keras.DTypePolicy("float32")


def _refuse_half_variables(layer: keras.Layer) -> None:
    half = [variable.path for variable in layer.variables if variable.dtype in HALF]
    if half:
        raise ValueError(
            f"`layer` has variables in half precision already: {', '.join(half)}. "
            "Wrap it before it is built, or build it with dtype='float32'."
        )


def _takes_training(function: Callable[..., Any]) -> bool:
    try:
        return "training" in inspect.signature(function).parameters
    except ValueError:  # some built-in functions have no signature
        return False


def _takes_one_shape(layer: keras.Layer) -> bool:
    build = type(layer).build
    return build is not keras.Layer.build and len(inspect.signature(build).parameters) == 2


def to_float32(value: Any) -> Any:
    """Returns a tensor of 16 bits in float32, and all else as it is."""
    is_half = keras.backend.standardize_dtype(value.dtype) in HALF if hasattr(value, "dtype") else False
    return ops.cast(value, "float32") if is_half else value
