"""Gives the `Input`s of a converted model an integer dtype where 16 bits would round the indices that they hold."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from kmp.backend import index_uses, keras_internals, sublayers
from kmp.conversion.model_parts import parts_of
from kmp.policy import rounded_indices
from kmp.utils import FloatFormat

INTEGER_DTYPE = "int32"
_DECLARED = (
    "Input {name!r} holds indices for {places}, which {dtype} would round above {limit}: kmp.convert declares it with "
    "dtype='int32'."
)
_OTHER_ROWS = (
    "With this batch {place} selects other rows than in float32: {count} of {size} indices differ, such as {after} in "
    "place of {before}."
)


def with_integer_inputs(
    model: keras.Model, converted: keras.Model, rebuild: Callable[[set[int]], keras.Model]
) -> keras.Model:
    """Returns the converted model, rebuilt if 16 bits would round the indices in some of its inputs.

    An input becomes int32 if its values are used as an index only, compared, moved or cast to integers.

    Args:
        model: The float32 model.
        converted: The converted model.
        rebuild: Takes the `id`s of input layers of `model`, and converts `model` with an integer dtype for these.
    """
    layers = [
        layer
        for graph in _graphs(converted)
        for layer, uses in _input_uses(graph)
        if uses.rounded and not uses.float_operations
    ]
    inputs = {id(before) for before, after in _input_layers(model, converted).values() if after in layers}
    if not inputs:
        return converted
    try:
        rebuilt = rebuild(inputs)
    except Exception:  # custom code that does not accept integers may raise anything
        return converted
    return rebuilt if all(_input_uses(graph) for graph in _graphs(rebuilt)) else converted


def may_round(model: keras.Model, compute_dtype: str) -> bool:
    """Whether a model uses a float input as an index of more rows than a 16-bit dtype has integers."""
    return any(
        uses.is_float and use.exceeds(FloatFormat(compute_dtype))
        for graph in _graphs(model)
        for _, uses in _input_uses(graph)
        for use in uses.indices
    )


def describe_changes(model: keras.Model, converted: keras.Model, compute_dtype: str) -> dict[str, str]:
    """Returns the paths of the inputs that are integers in the converted model only, each with a description."""
    float_format = FloatFormat(compute_dtype)
    changed = {
        id(before): path
        for path, (before, after) in _input_layers(model, converted).items()
        if keras.backend.is_float_dtype(before.dtype) and not keras.backend.is_float_dtype(after.dtype)
    }
    uses_of_changed = [
        (graph, changed[id(layer)], uses)
        for graph in (_graphs(model) if changed else [])
        for layer, uses in _input_uses(graph)
        if id(layer) in changed
    ]
    return {
        path: _DECLARED.format(
            name=path,
            places=rounded_indices.places_of(
                graph, [use for use in uses.indices if use.exceeds(float_format)], _path_of(graph, model, model)
            ),
            dtype=compute_dtype,
            limit=float_format.max_exact_integer,
        )
        for graph, path, uses in uses_of_changed
    }


def describe_rounding(
    model: keras.Model, reference: keras.Model, candidate: keras.Model, batch: Any = None
) -> list[str]:
    """Returns descriptions of the inputs of the candidate whose indices its layers round.

    Args:
        model: The model whose paths are shown: the reference or the candidate.
        reference: The model in float32.
        candidate: The same model in mixed precision.
        batch: An input of both. If given, adds the layers that select other rows than in the reference.
    """
    graphs = _graphs(candidate)
    outermost = graphs[:1] if candidate in graphs else graphs
    descriptions = [
        text
        for graph in outermost
        for text in rounded_indices.describe(
            graph, [uses for _, uses in _input_uses(graph)], _path_of(graph, candidate, model)
        )
    ]
    return descriptions + (_describe_other_rows(model, reference, candidate, batch) if batch is not None else [])


def _describe_other_rows(model: keras.Model, reference: keras.Model, candidate: keras.Model, batch: Any) -> list[str]:
    in_float32, in_candidate = (index_uses.index_values(variant, batch) for variant in (reference, candidate))
    path_of = _path_of(candidate, candidate, model)
    descriptions = {}
    for (_, before), (operation, after) in zip(in_float32, in_candidate, strict=False):
        differs = before != after if before.shape == after.shape else np.array(False)
        if differs.any():
            place = path_of(index_uses.layer_path(candidate, operation)) or model.name
            descriptions[place] = _OTHER_ROWS.format(
                place=place, count=differs.sum(), size=differs.size, after=after[differs][0], before=before[differs][0]
            )
    return list(descriptions.values())


def _path_of(graph: keras.Model, variant: keras.Model, model: keras.Model) -> Callable[[str], str]:
    """Returns a function from the path of a layer below a graph in a variant of a model to its path in the model."""
    prefix = next((part.path for part in parts_of(variant) if part.operation is graph), "")
    paths = {after.path: before.path for before, after in zip(parts_of(model), parts_of(variant), strict=False)}

    def path_of(path: str) -> str:
        path_in_variant = "/".join(filter(None, (prefix, path)))
        return paths.get(path_in_variant, path_in_variant)

    return path_of


def _graphs(model: keras.Model) -> list[keras.Model]:
    """Returns the model and the models inside it that have known inputs, if they may use these as an index."""
    if not rounded_indices.may_use_indices(model):
        return []
    models = [layer for layer in sublayers(model) if isinstance(layer, keras.Model)]
    return [inner for inner in models if keras_internals.graph_tensors(inner, "inputs")]


def _input_uses(graph: keras.Model) -> list[tuple[keras.Layer, index_uses.InputUses]]:
    """Returns the input layers of a graph, with their uses; none if it cannot be traced."""
    structure = graph.inputs[0] if isinstance(graph, keras.Sequential) else graph.input
    uses = index_uses.traced_uses(graph, structure)
    layers = [keras_internals.producer_of(tensor) for tensor in graph.inputs]
    return list(zip(layers, uses, strict=True)) if uses else []


def _input_layers(model: keras.Model, converted: keras.Model) -> dict[str, tuple[keras.Layer, keras.Layer]]:
    """Returns the input layers of a model and those of the converted model, by path."""
    return {
        before.path: (before.operation, after.operation)
        for before, after in zip(parts_of(model), parts_of(converted), strict=False)
        if isinstance(before.operation, keras.layers.InputLayer)
    }
