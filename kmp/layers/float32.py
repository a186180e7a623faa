"""Layers, functions and operations that compute in float32 under every policy.

They do so after saving and loading too.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from kmp.backend import keras_internals
from kmp.backend.keras_internals import sublayers
from kmp.layers.layer_calls import creating_float32
from kmp.utils import validation
from kmp.utils.float_formats import DTYPES_16_BIT


@keras.saving.register_keras_serializable("kmp")
class Float32(keras.Layer):
    """Runs a layer or function in float32 under every policy.

    Casts 16-bit inputs to float32, computes in float32 and returns float32. Use it for operations
    that are unsafe in float16: exp, log, powers, norms, variances, sums over many elements. Tensors
    of other dtypes pass through unchanged.

    Args:
        layer: A layer, which is set to float32 together with its sublayers, and stays quantized if
            it is; or a function of tensors. To save the model, register the function with
            `keras.saving.register_keras_serializable`.
        **kwargs: Other arguments of `keras.Layer`, such as `name`. `dtype` must be float32 if
            given.

    Call arguments are those of the layer or function; arrays and tensors among them are cast.

    Raises:
        TypeError: If `layer` is not a layer or function.
        ValueError: If `dtype` is not float32, or `layer` already has variables in float16 or
            bfloat16.

    Example:
    >>> import kmp
    >>> from keras import ops
    >>> norm = kmp.layers.Float32(lambda x: ops.sqrt(ops.sum(ops.square(x), axis=-1)))
    >>> float(norm(ops.full((1, 4096), 8.0, dtype="float16"))[0])  # 4096 * 64 overflows in float16
    512.0
    """

    def __init__(self, layer: keras.Layer | Callable[..., Any], **kwargs: Any) -> None:
        if not callable(layer) or isinstance(layer, type):
            raise TypeError(
                f"`layer` must be a layer instance or a function. Received: layer={layer!r}"
            )
        super().__init__(**_with_float32_dtype(kwargs))
        self.layer = layer
        self.supports_masking = getattr(layer, "supports_masking", True)
        self._passes_training = False
        if isinstance(layer, keras.Layer):
            half = [
                variable.path for variable in layer.variables if variable.dtype in DTYPES_16_BIT
            ]
            if half:
                raise ValueError(
                    f"`layer` already has variables in half precision: {', '.join(half)}. "
                    "Wrap the layer before it is built, or create it with dtype='float32'."
                )
            _set_float32(layer)
        else:
            with contextlib.suppress(ValueError):  # some built-in functions have no signature
                self._passes_training = "training" in inspect.signature(layer).parameters

    def build(self, input_shape: Any) -> None:
        """Builds the wrapped layer.

        A layer that needs several input shapes is built by its first call.
        """
        if not isinstance(self.layer, keras.Layer) or self.layer.built:
            return
        build = type(self.layer).build
        needed = [
            each
            for each in inspect.signature(build).parameters.values()
            if each.default is each.empty
        ]
        if build is not keras.Layer.build and len(needed) == 2:
            with creating_float32():
                self.layer.build(input_shape)
            _set_float32(self.layer)

    def call(self, inputs: Any, *args: Any, training: bool | None = None, **kwargs: Any) -> Any:
        if self._passes_training:  # Keras itself passes it to a wrapped layer
            kwargs["training"] = training
        is_unbuilt = isinstance(self.layer, keras.Layer) and not self.layer.built
        with creating_float32():
            outputs = self.layer(inputs, *args, **kwargs)
        if is_unbuilt:
            _set_float32(self.layer)
        # A float32 tensor must pass through without a cast, which would drop the logits that Keras
        # attaches to the output of softmax.
        return keras_internals.in_float32(outputs)

    def compute_output_spec(
        self, inputs: Any, *args: Any, training: bool | None = None, **kwargs: Any
    ) -> Any:
        inputs, args, kwargs = keras_internals.without_wrong_sparsity((inputs, args, kwargs))
        # By default, Keras traces `call`, which also builds it.
        if not isinstance(self.layer, keras.Layer) or not self.layer.built:
            return super().compute_output_spec(inputs, *args, training=training, **kwargs)
        inputs, args, kwargs = keras_internals.in_float32((inputs, args, kwargs))
        return keras_internals.in_float32(self.layer.compute_output_spec(inputs, *args, **kwargs))

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


@keras.saving.register_keras_serializable("kmp")
class Float32Operation(keras.Operation):
    """Runs an operation of a functional graph, such as that of `keras.ops.exp(x)`, in float32.

    Casts 16-bit tensors to float32, and computes and returns float32. This is an operation rather
    than a layer, because a layer accepts only tensors as positional arguments, but
    `keras.ops.power(x, 2)` takes a number. The operation stores arguments that are not tensors,
    such as an axis.
    """

    def __init__(self, operation: keras.Operation, name: str | None = None) -> None:
        super().__init__(name=name)
        self.operation = operation

    def call(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = keras_internals.in_float32((args, kwargs))
        return self.operation(*args, **kwargs)

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = keras_internals.in_float32((args, kwargs))
        return self.operation.compute_output_spec(*args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {
            "operation": keras.saving.serialize_keras_object(self.operation)
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Float32Operation":
        operation = keras.saving.deserialize_keras_object(config["operation"])
        return cls(**config | {"operation": operation})


@keras.saving.register_keras_serializable("kmp")
class Softmax(keras.layers.Softmax):
    """Softmax with float32 input, computation and output, for the output of a classifier.

    Cross-entropy on its output has the same value and gradient as cross-entropy with
    `from_logits=True`.

    Args:
        axis: Integer or list of integers, the axis or axes along which the probabilities sum to 1.
        **kwargs: Other arguments of `keras.Layer`, such as `name`. `dtype` must be float32 if
            given.

    Raises:
        TypeError: If `axis` is not an integer or a list of integers.
        ValueError: If `dtype` is not float32.

    Example:
    >>> import kmp
    >>> from keras import ops
    >>> kmp.layers.Softmax()(ops.zeros((1, 4), dtype="float16")).dtype.name
    'float32'
    """

    def __init__(self, axis: int | list[int] = -1, **kwargs: Any) -> None:
        integer = functools.partial(validation.integer, "axis")
        axis = list(map(integer, axis)) if isinstance(axis, list | tuple) else integer(axis)
        super().__init__(axis=axis, **_with_float32_dtype(kwargs))


def _with_float32_dtype(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns a layer's keyword arguments with `dtype="float32"`.

    Raises a `ValueError` if they have another dtype.
    """
    dtype = kwargs.get("dtype") or "float32"
    policy = keras.dtype_policies.get(dtype)
    if (policy.compute_dtype, policy.variable_dtype) != ("float32", "float32"):
        raise ValueError(f"`dtype` must be float32 or omitted. Received: dtype={dtype!r}")
    return kwargs | {"dtype": "float32"}


def _set_float32(layer: keras.Layer) -> None:
    for sublayer in sublayers(layer):
        sublayer.dtype_policy = keras_internals.float32_policy(sublayer)
