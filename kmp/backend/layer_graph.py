"""Follows the graph of a model: which layers take the outputs of each layer."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from kmp.backend.keras_internals import (
    calls_of,
    functional_outputs,
    graph_tensors,
    is_passthrough,
)


@dataclass(frozen=True)
class _Output:
    """Takes the place of a tensor in a graph: the paths of the layers that produce it."""

    layers: tuple[str, ...] = ()


def next_layers(model: keras.Model) -> dict[str, list[str]]:
    """Returns the layers that take the outputs of each layer, by path.

    A functional or Sequential model has such a graph, which contains the layers of such models in
    it. What computes between two layers, such as an addition, is no layer. The result is empty for
    any other model, of which only its code knows the order.
    """
    graph = _Graph()
    if _has_graph(model):
        # A missing private name has warned, and costs the graph.
        with contextlib.suppress(RuntimeError):
            graph.run(model, [_Output() for _ in graph_tensors(model, "inputs")])
            return {path: list(following) for path, following in graph.following.items()}
    return {}


def previous_layers(model: keras.Model) -> dict[str, list[str]]:
    """Returns the layers whose outputs each layer takes, by path: the reverse of `next_layers`."""
    following = next_layers(model)
    found: dict[str, list[str]] = {path: [] for path in following}
    for path, layers in following.items():
        for layer in layers:
            found[layer].append(path)
    return found


def _has_graph(operation: keras.Operation) -> bool:
    if not isinstance(operation, keras.Model) or not is_passthrough(operation):
        return False
    return bool(graph_tensors(operation, "outputs"))


class _Graph:
    """Runs a graph on `_Output`s.

    Attributes:
        following: The paths of the layers that take the outputs of each layer.
    """

    def __init__(self) -> None:
        self.following: dict[str, dict[str, None]] = {}

    def run(self, model: keras.Model, inputs: Any) -> Any:
        """Returns the outputs of a model for these inputs."""
        if not isinstance(model, keras.Sequential):
            return functional_outputs(model, inputs, self._in_place_of)
        result = inputs
        for layer in model.layers:
            result = self._in_place_of(layer)(result)
        return result

    def _in_place_of(self, operation: keras.Operation) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            given = keras.tree.flatten((args, kwargs))
            inputs = [each for each in given if isinstance(each, _Output)]
            if _has_graph(operation):
                return self.run(operation, inputs)
            output = self._output_of(operation, inputs)
            return [output] * len(calls_of(operation)[0].outputs)

        return called

    def _output_of(self, operation: keras.Operation, inputs: list[_Output]) -> _Output:
        layers: dict[str, None] = {}
        for each in inputs:
            layers.update(dict.fromkeys(each.layers))
        if not isinstance(operation, keras.Layer):
            return _Output(tuple(layers))
        path = operation.path or operation.name
        self.following.setdefault(path, {})
        for layer in layers:
            self.following[layer][path] = None
        return _Output((path,))
