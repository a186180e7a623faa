"""What a model is made of: its layers, and the operations of its graphs that are no layers, each with a path."""

from dataclasses import dataclass
from typing import Any

import keras

from kmp.backend import direct_sublayers, sublayers
from kmp.utils import unique


@dataclass(frozen=True)
class Part:
    """One layer or operation of a model.

    Args:
        path: Its name, behind the names of the layers and models that hold it, joined by `/`.
        operation: The layer, or the operation of a functional graph, such as that of `keras.ops.exp(x)`.
        holder: What holds it: the model, a nested model, a wrapper, or a layer that has layers of its own.
    """

    path: str
    operation: keras.Operation
    holder: keras.Layer

    @property
    def is_layer(self) -> bool:
        """Whether it is a layer, and has dtypes of its own."""
        return isinstance(self.operation, keras.Layer)


def parts_of(model: keras.Model) -> list[Part]:
    """Returns everything that a model is made of: graphs in their order, holders before what they hold, shared once."""
    found: dict[int, Part] = {}

    def walk(holder: keras.Layer, prefix: str) -> None:
        held = _held(holder)
        for name, operation in zip(unique(one.name for one in held), held, strict=True):
            if id(operation) not in found:
                found[id(operation)] = Part(prefix + name, operation, holder)
                if isinstance(operation, keras.Layer):
                    walk(operation, f"{prefix}{name}/")

    walk(model, "")
    return list(found.values())


def check_built(model: Any) -> None:
    """Makes sure that a model can be looked at.

    Raises:
        TypeError: If it is no Keras model.
        ValueError: If it, or a layer in it, is not built.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` must be a keras.Model, such as keras.models.load_model(file) returns. Received: model={model!r}"
        )
    # Of layers, Keras leaves some that have no weights unbuilt.
    unbuilt = [inner for inner in sublayers(model) if isinstance(inner, keras.Model) and not inner.built]
    if unbuilt:
        raise ValueError(
            f"{type(unbuilt[0]).__name__} {unbuilt[0].name!r} is not built: call it on a batch first, or give it an "
            "`Input`."
        )


def is_quantized(model: keras.Model) -> bool:
    """Whether a layer of a model holds its weights in integers."""
    return any(getattr(layer, "quantization_mode", None) for layer in sublayers(model))


def is_graph(layer: keras.Operation) -> bool:
    """Whether a layer is a functional model, which has its operations and how they feed each other."""
    return isinstance(layer, keras.Model) and hasattr(layer, "operations")


def _held(holder: keras.Layer) -> list[keras.Operation]:
    graph = holder.operations if is_graph(holder) else []
    return list({id(held): held for held in (*graph, *direct_sublayers(holder))}.values())
