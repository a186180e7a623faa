"""Lists the layers of a model, and the operations of its functional graphs, each with a path."""

from dataclasses import dataclass
from typing import Any

import keras

from kmp.backend import compute_dtypes, direct_sublayers, is_keras_class, is_passthrough, sublayers
from kmp.utils import DTYPES_16_BIT, unique_names


@dataclass(frozen=True)
class Part:
    """One layer or operation of a model.

    Args:
        path: Its name, prefixed with the names of the layers and models that contain it, joined by `/`.
        operation: The layer, or the operation of a functional graph, such as that of `keras.ops.exp(x)`.
        parent: The model, nested model, wrapper or layer that directly contains it.
    """

    path: str
    operation: keras.Operation
    parent: keras.Layer

    @property
    def is_layer(self) -> bool:
        """Whether it is a layer, which has its own dtype policy."""
        return isinstance(self.operation, keras.Layer)


def parts_of(model: keras.Model) -> list[Part]:
    """Returns all layers and operations of a model: in graph order, parents before children, shared ones once."""
    parts: dict[int, Part] = {}

    def walk(parent: keras.Layer, prefix: str) -> None:
        children = _children(parent)
        for name, operation in zip(unique_names(child.name for child in children), children, strict=True):
            if id(operation) not in parts:
                parts[id(operation)] = Part(prefix + name, operation, parent)
                if isinstance(operation, keras.Layer):
                    walk(operation, f"{prefix}{name}/")

    walk(model, "")
    return list(parts.values())


def check_built(model: Any) -> None:
    """Checks that `model` is a built Keras model.

    Raises:
        TypeError: If it is not a Keras model.
        ValueError: If the model, or a model that is a layer of a Sequential or functional one, is not built.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` must be a keras.Model, such as keras.models.load_model(file) returns. Received: model={model!r}"
        )
    # Only models are checked: Keras leaves some layers without weights unbuilt. Custom code may use a nested model as a
    # container of layers, or never.
    children = (child for layer in sublayers(model) if is_passthrough(layer) for child in direct_sublayers(layer))
    unbuilt = [inner for inner in (model, *children) if isinstance(inner, keras.Model) and not inner.built]
    if unbuilt:
        raise ValueError(
            f"{type(unbuilt[0]).__name__} {unbuilt[0].name!r} is not built: call it on a batch first, or give it an "
            "`Input`."
        )


def is_quantized(model: keras.Model) -> bool:
    """Whether any layer of a model is quantized."""
    return any(getattr(layer, "quantization_mode", None) for layer in sublayers(model))


def computes_in_16_bits(model: keras.Model) -> bool:
    """Whether any layer of a model computes in float16 or bfloat16."""
    return bool(compute_dtypes(model) & set(DTYPES_16_BIT))


def is_graph(layer: keras.Operation) -> bool:
    """Whether a layer is a functional model, whose operations and their connections are known."""
    return isinstance(layer, keras.Model) and hasattr(layer, "operations")


def config_contains_sublayers(layer: keras.Layer) -> bool:
    """Whether the config of a layer contains those of its sublayers, which are not created in custom code then."""
    try:
        return is_keras_class(type(layer)) or "layers" in layer.get_config()
    except Exception:  # custom code may raise anything; cloning the model reports it
        return False


def check_not_float64(model: keras.Model) -> None:
    """Checks that no layer of a model computes in float64.

    Raises:
        ValueError: If one does.
    """
    if "float64" in compute_dtypes(model):
        raise ValueError(f"{model.name!r} computes in float64: conversion would round its weights to float32.")


def _children(parent: keras.Layer) -> list[keras.Operation]:
    operations = parent.operations if is_graph(parent) else []
    return list({id(child): child for child in (*operations, *direct_sublayers(parent))}.values())
