"""An operation of a functional graph, such as that of `keras.ops.exp(x)`, run in float32 whatever comes in."""

from typing import Any

import keras

from kmp.backend import register
from kmp.layers.casting import to_float32


@register
class Float32Operation(keras.Operation):
    """Runs an operation in float32: tensors up to float32, computation and output in it.

    An operation itself and no layer, because a layer takes nothing but tensors where `keras.ops.power(x, 2)` takes a
    number.

    Args:
        operation: The operation, which holds the arguments that are no tensors, such as an axis.
        name: String, its name in the graph.
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
