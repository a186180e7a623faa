"""Layers that force float32 where float16 loses: they serialize, and stay float32 after save and load."""

import inspect
from collections.abc import Callable
from typing import Any

import keras

from kmp.backend import register, sublayers
from kmp.layers.casting import to_float32, with_float32_dtype
from kmp.utils import HALF


@register
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
        super().__init__(**with_float32_dtype(kwargs))
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
