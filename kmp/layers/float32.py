"""A wrapper that runs a layer or function in float32, also after saving and loading."""

import inspect
from collections.abc import Callable
from typing import Any

import keras

from kmp.backend import sublayers
from kmp.layers.casting import to_float32, with_float32_dtype
from kmp.utils import DTYPES_16_BIT


@keras.saving.register_keras_serializable("kmp")
class Float32(keras.Layer):
    """Runs a layer or function in float32 under every policy.

    Casts 16-bit inputs to float32, computes in float32 and returns float32. Use it for operations that are unsafe in
    float16: exp, log, powers, norms, variances, sums over many elements. Tensors of other dtypes pass through
    unchanged.

    Args:
        layer: A layer, which is set to float32 together with its sublayers; or a function of tensors. To save the
            model, register the function with `keras.saving.register_keras_serializable`.
        **kwargs: Other arguments of `keras.Layer`, such as `name`. `dtype` must be float32 if given.

    Call arguments are those of the layer or function; arrays and tensors among them are cast.

    Raises:
        TypeError: If `layer` is not a layer or function.
        ValueError: If `dtype` is not float32, or `layer` already has variables in float16 or bfloat16.

    Example:
    >>> from keras import ops
    >>> norm = Float32(lambda x: ops.sqrt(ops.sum(ops.square(x), axis=-1)))
    >>> float(norm(ops.full((1, 4096), 8.0, dtype="float16"))[0])  # 4096 * 64 overflows in float16
    512.0
    """

    def __init__(self, layer: keras.Layer | Callable[..., Any], **kwargs: Any) -> None:
        if not callable(layer) or isinstance(layer, type):
            raise TypeError(f"`layer` must be a layer instance or a function. Received: layer={layer!r}")
        super().__init__(**with_float32_dtype(kwargs))
        self.layer = layer
        self.supports_masking = getattr(layer, "supports_masking", True)
        self._passes_training = not isinstance(layer, keras.Layer) and _takes_training(layer)
        if isinstance(layer, keras.Layer):
            _refuse_half_variables(layer)
            _set_float32(layer)

    def build(self, input_shape: Any) -> None:
        """Builds the wrapped layer; a layer that needs several input shapes is built by its first call."""
        if isinstance(self.layer, keras.Layer) and not self.layer.built and _takes_one_shape(self.layer):
            self.layer.build(input_shape)
            _set_float32(self.layer)  # building a model may create more sublayers

    def call(self, inputs: Any, *args: Any, training: bool | None = None, **kwargs: Any) -> Any:
        if self._passes_training:  # Keras itself passes it to a wrapped layer
            kwargs["training"] = training
        # A float32 tensor must pass through without a cast, which would drop the logits that Keras attaches to the
        # output of softmax.
        return keras.tree.map_structure(to_float32, self.layer(inputs, *args, **kwargs))

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """Returns the mask that the wrapped layer computes from `previous_mask`."""
        compute = getattr(self.layer, "compute_mask", None)
        return compute(inputs, previous_mask) if compute else previous_mask

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"layer": keras.saving.serialize_keras_object(self.layer)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Float32":
        layer = keras.saving.deserialize_keras_object(config["layer"])
        return cls(**config | {"layer": layer})


def _set_float32(layer: keras.Layer) -> None:
    for sublayer in sublayers(layer):
        sublayer.dtype_policy = keras.DTypePolicy("float32")


def _refuse_half_variables(layer: keras.Layer) -> None:
    half = [variable.path for variable in layer.variables if variable.dtype in DTYPES_16_BIT]
    if half:
        raise ValueError(
            f"`layer` already has variables in half precision: {', '.join(half)}. "
            "Wrap the layer before it is built, or create it with dtype='float32'."
        )


def _takes_training(function: Callable[..., Any]) -> bool:
    try:
        return "training" in inspect.signature(function).parameters
    except ValueError:  # some built-in functions have no signature
        return False


def _takes_one_shape(layer: keras.Layer) -> bool:
    build = type(layer).build
    return build is not keras.Layer.build and len(inspect.signature(build).parameters) == 2
