"""Runs an operation of a functional graph, such as `keras.ops.exp(x)`, in float32."""

from typing import Any

import keras

from kmp.layers.casting import to_float32


@keras.saving.register_keras_serializable("kmp")
class Float32Operation(keras.Operation):
    """Runs an operation in float32: casts 16-bit tensors to float32, and computes and returns float32.

    This is an operation rather than a layer, because a layer accepts only tensors as positional arguments, but
    `keras.ops.power(x, 2)` takes a number.

    Args:
        operation: The operation to run, which stores arguments that are not tensors, such as an axis.
        name: String, the name of the operation in the graph.
    """

    def __init__(self, operation: keras.Operation, name: str | None = None) -> None:
        super().__init__(name=name)
        self.operation = operation

    def call(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = keras.tree.map_structure(to_float32, (args, kwargs))
        return self.operation(*args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"operation": keras.saving.serialize_keras_object(self.operation)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Float32Operation":
        operation = keras.saving.deserialize_keras_object(config["operation"])
        return cls(**config | {"operation": operation})
