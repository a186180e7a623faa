"""The graph of a functional or Sequential model: the calls of its layers and operations."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras

from kmp.backend.keras_internals import call_of, graph_tensors, is_passthrough


class Output(NamedTuple):
    """One tensor that a call returns."""

    call: "GraphCall"
    tensor_index: int

    @property
    def tensor(self) -> keras.KerasTensor:
        """The tensor, in the graph of the model that directly contains the call."""
        return self.call.outputs[self.tensor_index]


@dataclass(frozen=True, eq=False)
class GraphCall:
    """A call of a layer or operation in a graph.

    Args:
        operation: The layer or operation.
        model: The model that directly contains the call.
        arguments: What it is called with: Keras' symbolic `args` and `kwargs`.
        inputs: The tensors among them.
        outputs: The tensors that it returns.
        sources: The output of another call that each input is, by the `id` of the input.
    """

    operation: keras.Operation
    model: keras.Layer
    arguments: Any
    inputs: Sequence[keras.KerasTensor]
    outputs: Sequence[keras.KerasTensor]
    sources: Mapping[int, Output]

    @property
    def is_input(self) -> bool:
        """Whether it is an `InputLayer`; that of a nested model has what the model is called with.

        It converts that to its dtype, and computes nothing.
        """
        return isinstance(self.operation, keras.layers.InputLayer)

    @property
    def origin(self) -> "GraphCall":
        """The call that computes what it returns: for the input of a nested model, one before."""
        call = self
        while call.is_input and call.sources:
            (call,) = call.calls_before
        return call

    @property
    def calls_before(self) -> list["GraphCall"]:
        """The calls that return its inputs."""
        return [each.call for each in self.sources.values()]


@dataclass
class LayerGraph:
    """The calls in a graph.

    Attributes:
        calls: They, each after those that return its inputs.
        outputs: The outputs of the model.
    """

    calls: list[GraphCall] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)


def has_graph(operation: keras.Operation) -> bool:
    """Whether an operation is a functional or Sequential model whose graph is known."""
    if not isinstance(operation, keras.Model) or not is_passthrough(operation):
        return False
    return bool(graph_tensors(operation, "outputs"))


def calls_in(model: keras.Layer) -> LayerGraph:
    """Returns the calls of layers and operations in a model.

    The calls in a nested functional or Sequential model take the place of each call of that model.
    There are no calls in a model without a graph, of which only its code knows the order. One with
    a graph whose `call` is overridden may compute more.
    """
    graph = LayerGraph()
    if graph_tensors(model, "outputs"):
        graph.outputs = _add_calls(graph.calls, model, {})
    return graph


def _add_calls(
    calls: list[GraphCall], model: keras.Layer, given: Mapping[int, Output]
) -> list[Output]:
    """Adds the calls in a model to a list, and returns the sources of its outputs.

    The sources of its inputs are `given` by their `id`s; those of the outermost model have none.
    """
    found: dict[int, Output] = {}
    outputs = graph_tensors(model, "outputs")
    for node in _nodes_before([*graph_tensors(model, "inputs"), *outputs]):
        tensors = node.output_tensors
        sources = {id(each): found[id(each)] for each in node.input_tensors}
        if has_graph(node.operation):
            inputs = graph_tensors(node.operation, "inputs")
            arguments = node.arguments
            given_to_model = arguments.args[0] if arguments.args else arguments.kwargs["inputs"]
            values = values_of_inputs(node.operation, given_to_model)
            pairs = zip(inputs, values, strict=False)  # as Keras does
            # Others are constants.
            inner = {id(own): sources[id(each)] for own, each in pairs if id(each) in sources}
            results = _add_calls(calls, node.operation, inner)
        else:
            values = node.input_tensors
            if id(tensors[0]) in given:
                source = given[id(tensors[0])]
                values, sources = [source.tensor], {id(source.tensor): source}
            call = GraphCall(node.operation, model, node.arguments, values, tensors, sources)
            calls.append(call)
            results = [Output(call, index) for index in range(len(tensors))]
        found.update(zip(map(id, tensors), results, strict=True))
    return [found[id(each)] for each in outputs]


def _nodes_before(tensors: Iterable[keras.KerasTensor]) -> Iterable[Any]:
    """Returns Keras' nodes of the calls that compute tensors, each after those it depends on."""
    found: dict[int, Any] = {}
    entered = set[int]()
    pending = [call_of(each) for each in tensors][::-1]
    while pending:
        node = pending.pop()
        if id(node) in entered:
            found[id(node)] = node  # all before it are found
            continue
        entered.add(id(node))
        before = [call_of(each) for each in node.input_tensors]
        pending += [node, *(each for each in before[::-1] if id(each) not in entered)]
    return found.values()


def values_of_inputs(model: keras.Model, given: Any) -> list[Any]:
    """Returns what each input of a functional or Sequential model gets from an argument."""
    if isinstance(given, Mapping) and not isinstance(model.input, Mapping):
        return [given[each.name] for each in graph_tensors(model, "inputs")]
    return keras.tree.flatten(given)


def output_operations(graph: LayerGraph) -> list[keras.Operation]:
    """Returns the layers and operations that produce the outputs of a model, each once."""
    operations = (each.call.origin.operation for each in graph.outputs)
    return list({id(each): each for each in operations}.values())


def next_layers(model: keras.Model) -> dict[str, list[str]]:
    """Returns the layers that take the outputs of each layer, by path.

    What computes between two layers, such as an addition, is no layer. The result is empty for a
    model without a graph.
    """
    following: dict[str, dict[str, None]] = {}
    graph = LayerGraph()
    # A missing private name has warned, and costs the graph.
    with contextlib.suppress(RuntimeError):
        graph = calls_in(model) if has_graph(model) else graph
    closest: dict[GraphCall, dict[str, None]] = {}  # the layers that an output comes from
    for call in graph.calls:
        layers: dict[str, None] = {}
        for each in call.calls_before:
            layers.update(closest[each])
        closest[call] = layers
        operation = call.operation
        if isinstance(operation, keras.Layer) and not call.is_input:
            path = operation.path or operation.name
            following.setdefault(path, {})
            for before in layers:
                following[before][path] = None
            closest[call] = {path: None}
    return {path: list(after) for path, after in following.items()}


def previous_layers(model: keras.Model) -> dict[str, list[str]]:
    """Returns the layers whose outputs each layer takes, by path: the reverse of `next_layers`."""
    following = next_layers(model)
    found: dict[str, list[str]] = {path: [] for path in following}
    for path, layers in following.items():
        for layer in layers:
            found[layer].append(path)
    return found
