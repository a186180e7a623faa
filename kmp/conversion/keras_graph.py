"""The graph of a Keras model, as what its layers and operations do to numbers.

What the table has no row for is traced: custom layers, `Lambda`s and functions as well as Keras'
own operations that are made of others.
"""

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import keras
import numpy as np

from kmp.backend.keras_functions import function_of, function_of_activation
from kmp.backend.keras_internals import (
    is_keras_class,
    is_passthrough,
    sublayers,
)
from kmp.backend.layer_graph import GraphCall, calls_in, has_graph
from kmp.backend.layer_trace import LayerTrace, reading_policies, traced
from kmp.conversion.traced_graph import Units, nodes_of_trace
from kmp.layers.float32_rules import Moment, float32_rule
from kmp.numerics import (
    DATA,
    INFINITY,
    Call,
    Fixed,
    Move,
    Node,
    Value,
    between,
    constant,
    extremes,
    keras_function,
    matrix_product_function,
    unit_roundoff,
)
from kmp.utils.float_formats import FLOAT32, FORMATS_16_BIT

_WEIGHT = between(-1.0, 1.0)  # weights are small, by their regularization if not at first


@dataclass
class ModelGraph:
    """What a model does to numbers.

    Attributes:
        nodes: The nodes of its layers and operations, whose units are the `id`s of these.
        with_products: The units that multiply matrices.
        not_traced: Those that kmp could not look into.
        operations: The layers and operations of the graph.
    """

    nodes: list[Node] = field(default_factory=list)
    with_products: set[Hashable] = field(default_factory=set)
    not_traced: set[Hashable] = field(default_factory=set)
    operations: list[keras.Operation] = field(default_factory=list)


def graph_of_model(
    model: keras.Model, policy: str, measured: Mapping[int, Value] = MappingProxyType({})
) -> ModelGraph:
    """Returns what a model would do to numbers under a 16-bit policy.

    Args:
        model: A built model. Of one that is no graph, the code is traced for the shapes that it was
            built for.
        policy: The policy.
        measured: The range of the outputs of layers and operations with a batch, by their `id`.
    """
    builder = _Builder(keras.DTypePolicy(policy), measured)
    with reading_policies(builder.policy_of, policy):
        builder.add_model(model)
        builder.add_others(model)
    return builder.found


class _Builder:
    """Adds the nodes of a model and of those in it."""

    def __init__(self, policy: keras.DTypePolicy, measured: Mapping[int, Value]) -> None:
        self._policy, self._measured = policy, measured
        self._float32 = keras.DTypePolicy(FLOAT32.name)
        self._data = Value(relative=unit_roundoff(FORMATS_16_BIT[policy.compute_dtype]))
        self._policies: dict[int, tuple[keras.Layer, keras.DTypePolicy]] = {}  # by `id`
        self._results: dict[GraphCall, Sequence[Node]] = {}  # a node for each output
        self._traces: dict[Hashable, tuple[Any, LayerTrace]] = {}  # by the state of what is called
        self.found = ModelGraph()

    def policy_of(self, layer: keras.Layer) -> keras.DTypePolicy:
        """Returns the policy that a layer has in the converted model."""
        if id(layer) not in self._policies:
            used = own = layer.dtype_policy
            if keras.backend.is_float_dtype(own.compute_dtype or ""):
                needed = float32_rule(layer, self._policy, Moment.CONVERSION)
                used = self._float32 if needed else self._policy
            self._policies[id(layer)] = layer, used
        return self._policies[id(layer)][1]

    def add_model(self, model: keras.Model) -> None:
        """Adds the layers and operations of a model, in the order of its graph."""
        if not has_graph(model):
            self._add_subclassed(model)
        for call in calls_in(model).calls:
            self._results[call] = self._results_of(call)
            for node in self._results[call]:
                node.measured = self._measured.get(id(call.origin.operation))

    def add_others(self, model: keras.Model) -> None:
        """Adds the layers that were not traced, each alone.

        Such as those of a training, or of code that cannot be traced.
        """
        reached = {unit for node in self.found.nodes for unit in node.units}
        for layer in sublayers(model):
            if id(layer) in reached or is_passthrough(layer):
                continue
            node = self._known_layer(layer, (id(layer),))
            if node is not None:
                self._add(node)
            elif not is_keras_class(type(layer)) or isinstance(layer, keras.layers.Lambda):
                self.found.not_traced.add(id(layer))
                self.found.operations.append(layer)

    def _add_subclassed(self, model: keras.Model) -> None:
        """Adds a model whose code calls its layers."""
        shapes = getattr(model, "_build_shapes_dict", None) or {}
        try:
            arguments = {
                name.removesuffix("_shape"): _tensors_of(shape) for name, shape in shapes.items()
            }
        except (TypeError, ValueError):  # what its `build` got is no shape
            self.found.not_traced.add(id(model))
            return
        given = tuple(arguments.values()) if len(arguments) == 1 else ()
        count = len(keras.tree.flatten(list(arguments.values())))
        self._trace(model, given, {} if given else arguments, [DATA] * count, ())

    def _operand(self, value: Any, call: GraphCall) -> Node | Value:
        """Returns what is known of an argument of a call."""
        if isinstance(value, keras.KerasTensor):
            if value.dtype == "bool":
                return between(0.0, 1.0)
            source = call.sources[id(value)]
            return self._results[source.call][source.tensor_index]
        if isinstance(value, keras.Variable):
            return _WEIGHT
        return constant(np.asarray(value, "float64"))

    def _add(self, node: Node) -> Node:
        self.found.nodes.append(node)
        return node

    def _results_of(self, call: GraphCall) -> Sequence[Node]:
        """Adds the nodes of a call, and returns one for each of its outputs."""
        operands = [self._operand(each, call) for each in call.inputs]
        if call.is_input:
            known = None if operands else DATA
            node = Node(keras_function("identity"), operands, is_float32=True, value=known)
            return [self._add(node)]
        operation, count, units = call.operation, len(call.outputs), (id(call.operation),)
        self.found.operations.append(operation)
        are_floats = [keras.backend.is_float_dtype(each.dtype) for each in call.inputs]
        floats = list(itertools.compress(operands, are_floats))
        follows: list[Node] = []
        if type(operation).__name__ == "Cast" and not is_keras_class(type(call.model)):
            # The constructor of the model runs again, and casts to a dtype that is 16 bits then.
            follows = [each for each in floats if isinstance(each, Node)]
            identity = keras_function("identity")
            return [self._add(Node(identity, operands, units=units, follows=follows))]
        if isinstance(operation, keras.Layer):
            terms = _terms_of(operation, call.inputs[0]) if call.inputs else INFINITY
            found = self._known_layer(operation, units, operands, terms)
        else:
            found = self._known_operation(operation, units, call)
            follows = [each for each in floats if isinstance(each, Node)]
        if found is not None:
            return [self._add(found)] * count
        args, kwargs = call.arguments.args, call.arguments.kwargs
        # A layer as an activation has no precision of its own.
        is_activation = type(operation) is keras.layers.Activation
        function = operation.activation if is_activation else operation
        results = self._trace(function, args, kwargs, floats, units, follows, count)
        return results if len(results) == count else results * count

    def _known_layer(
        self,
        layer: Any,
        units: Units,
        operands: Sequence[Node | Value] | None = None,
        terms: float = INFINITY,
    ) -> Node | None:
        """Returns the node of a layer that need not be traced; `None` for the others."""
        if is_passthrough(layer) and not isinstance(layer, keras.layers.InputLayer):
            return None  # its layers are looked at
        policy = self.policy_of(layer)
        if not keras.backend.is_float_dtype(policy.compute_dtype or ""):
            return Node(value=DATA, units=units, is_float32=True)
        is_float32 = policy is self._float32
        inner = _inner_layers(layer) if is_keras_class(type(layer)) else []
        if inner:
            found = [self._known_layer(each, units) for each in inner]
            self.found.nodes += filter(None, found[:-1])
            return found[-1] if all(found) else None
        function = function_of(layer)
        activation = getattr(layer, "activation", None)
        if type(layer) is keras.layers.Activation:
            activation = None  # it is the function
        if function is not None and "multiplies_matrices" in function.traits:
            # One with weights is of Keras, and knows what its activation needs.
            self.found.with_products.update(units[1:] if layer.weights else units)
        # A function of the table, with its default arguments.
        is_known = function is not None and not function.adds_up
        if function is not None and is_known and activation is None:
            operands = operands or [self._data]
            return Node(function, operands, Call(terms), units=units, is_float32=is_float32)
        # A layer with weights, which knows what it needs itself, but for its activations.
        if not (is_keras_class(type(layer)) and layer.weights):
            return None
        of_gates = getattr(layer, "recurrent_activation", None)
        if of_gates is not None:
            self._add(self._node_of_activation(of_gates, units, is_float32))
        if activation is not None:
            return self._node_of_activation(activation, units, is_float32)
        return Node(operands=[self._data], units=units, is_float32=is_float32, value=self._data)

    def _node_of_activation(self, activation: Any, units: Units, is_float32: bool) -> Node:
        function = function_of_activation(activation)
        if function is not None:
            return Node(function, [self._data], units=units, is_float32=is_float32)
        tensor = keras.KerasTensor((None, 8), FLOAT32.name)
        results = self._trace(activation, (tensor,), {}, [self._data], units)
        return Node(keras_function("identity"), results, units=units, is_float32=is_float32)

    def _known_operation(self, operation: Any, units: Units, call: GraphCall) -> Node | None:
        """Returns the node of an operation that is a function of the table, or `None`.

        Of a function that depends on arguments that are no values, such as the axis of a sum, the
        trace knows more.
        """
        function = function_of(operation)
        if function is None or function.adds_up:
            return None
        function = matrix_product_function(function, call.outputs[0].shape)
        given, kwargs = call.arguments.args, call.arguments.kwargs
        if isinstance(function, Fixed | Move) or function.in_float32:
            values = call.inputs
            if function.in_float32:
                values = values[-1:]  # such as the probabilities beside the targets
            has_numbers = any(map(_is_float_constant, keras.tree.flatten([given, kwargs])))
            if isinstance(function, Move) and has_numbers:
                return None
        else:
            values = [each for each in given if not isinstance(each, str | None)]
            # A function of the table has its default arguments.
            if not values or kwargs or vars(operation).get("alpha", 1.0) != 1.0:
                return None
        if "multiplies_matrices" in function.traits:
            self.found.with_products.add(units[0])
        operands = [self._operand(each, call) for each in values]
        terms = _terms_of(operation, values[0])
        return Node(
            function,
            operands,
            Call(terms, are_same=len(values) == 2 and values[0] is values[1]),
            units=units,
            follows=[each for each in operands if isinstance(each, Node)],
            constants=_constants_of(operation, call),
        )

    def _trace(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        operands: Sequence[Node | Value],
        units: Units,
        follows: Sequence[Node] = (),
        count: int = 1,
    ) -> list[Node]:
        """Adds the nodes of the code of a layer, operation or function.

        Returns those of its results, or one for all if they are not as many as expected.
        """
        layers = {}
        if isinstance(function, keras.Layer):
            layers = {id(each): each for each in sublayers(function)}
        state = _state_of((function, args, kwargs), {})

        def node_of_layer(key: int, inner: Units) -> Node | None:
            layer = layers.get(key)
            return None if layer is None else self._known_layer(layer, inner)

        is_float32 = isinstance(function, keras.Layer) and self.policy_of(function) is self._float32
        result = Node(value=self._data, units=units, is_float32=is_float32, follows=follows)
        try:
            if state not in self._traces:
                dtype = self._policy.compute_dtype
                trace = traced(function, args, kwargs, dtype, _is_known_with_weights)
                self._traces[state] = function, trace
            original, trace = self._traces[state]
            copies = _copies(original, function)
            found = nodes_of_trace(trace, operands, units, follows, node_of_layer, copies)
        except Exception:  # the code of the user may raise anything
            self.found.not_traced.update(units or (id(function),))
            return [self._add(result)]
        self.found.nodes += found.nodes
        self.found.with_products |= found.with_products
        if len(found.outputs) in (1, count):
            return found.outputs
        if found.outputs:
            result.value, result.function, result.operands = (
                None,
                keras_function("identity"),
                found.outputs,
            )
        return [self._add(result)]


def _tensors_of(shapes: Any) -> Any:
    """Returns tensors for a shape, or for a structure of shapes."""
    if isinstance(shapes, Mapping):
        return {name: _tensors_of(shape) for name, shape in shapes.items()}
    if all(size is None or isinstance(size, int) for size in shapes):
        return keras.KerasTensor(tuple(shapes), FLOAT32.name)
    return [_tensors_of(shape) for shape in shapes]


# What all layers have, and what does not change what they compute.
_OF_TRAINING = keras.Initializer, keras.Regularizer, keras.constraints.Constraint
_OF_ALL_LAYERS = frozenset(vars(keras.Layer())) - {"_trainable", "_supports_masking"} | {"seed"}


def _state_of(value: Any, seen: dict[int, int]) -> Hashable:
    """Returns what the computation of a layer or function depends on.

    Two layers of one state compute the same, of weights with other values.

    Args:
        value: The layer or function, or what it has.
        seen: The number of each object that was met before, by its `id`.
    """
    if isinstance(value, bool | int | float | str | bytes | type | None):
        return type(value), value
    if isinstance(value, keras.Layer | Mapping | list | tuple):
        if id(value) in seen:
            return "met before", seen[id(value)]
        seen[id(value)] = len(seen)
    if isinstance(value, keras.Layer):
        own = {
            name: each
            for name, each in vars(value).items()
            if name not in _OF_ALL_LAYERS and not name.startswith("_self_")  # of checkpoints
        }
        return type(value), _state_of(own, seen)
    if isinstance(value, _OF_TRAINING):
        return (type(value),)
    if isinstance(value, keras.KerasTensor | keras.Variable):
        return type(value), tuple(value.shape), str(value.dtype)
    if isinstance(value, Mapping):
        return tuple((name, _state_of(each, seen)) for name, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(_state_of(each, seen) for each in value)
    return id(value)


def _copies(original: Any, copy: Any) -> dict[int, Any]:
    """Returns the `id`s of layers, and handles of variables, in the place of those of another."""
    if original is copy or not isinstance(original, keras.Layer):
        return {}
    pairs = zip(sublayers(original), sublayers(copy), strict=True)
    layers: dict[int, Any] = {id(before): id(after) for before, after in pairs}
    variables = zip(original.variables, copy.variables, strict=True)
    handles = {id(before.value.handle): after.value.handle for before, after in variables}
    return layers | handles


def _terms_of(operation: keras.Operation, value: Any) -> float:
    """Returns how many elements an operation along the last axis combines; Inf if not known."""
    shape = getattr(value, "shape", None)
    is_last = getattr(operation, "axis", -1) == -1
    return shape[-1] or INFINITY if is_last and shape else INFINITY


def _is_known_with_weights(layer: Any) -> bool:
    """Whether a layer has weights and a node by its class; others may return their inputs."""
    if is_passthrough(layer) or not (layer.weights and is_keras_class(type(layer))):
        return False
    return all(map(_is_known_with_weights, _inner_layers(layer)))


def _inner_layers(layer: Any) -> Sequence[Any]:
    """Returns the layers that a wrapper, or a recurrent layer, calls."""
    names = ("forward_layer", "layer", "cell")
    inner = next((each for name in names if (each := getattr(layer, name, None))), None)
    inner = inner or getattr(layer, "cells", [])  # of `StackedRNNCells`
    return inner if isinstance(inner, list | tuple) else [inner]


def _is_float_constant(value: Any) -> bool:
    is_array = isinstance(value, np.ndarray | np.number)
    return type(value) is float or (is_array and np.issubdtype(value.dtype, np.floating))


def _constants_of(operation: Any, call: GraphCall) -> tuple[float, ...]:
    """Returns the smallest and the largest constant that Keras converts to the dtype of floats."""
    arguments = [*vars(operation).values(), call.arguments.args, call.arguments.kwargs]
    constants = []
    for value in keras.tree.flatten(arguments):
        if type(value) in (int, float) or isinstance(value, np.ndarray | np.number):
            constants.append(value)
    if not _has_floats(call.inputs):
        # With a float output, as in `where(mask, 0.0, -1e9)`, float constants become floats.
        is_float = _has_floats(call.outputs)
        constants = [each for each in constants if is_float and not isinstance(each, int)]
    return extremes(np.concatenate([np.zeros(0), *(np.ravel(each) for each in constants)]))


def _has_floats(tensors: Sequence[keras.KerasTensor]) -> bool:
    return any(keras.backend.is_float_dtype(tensor.dtype) for tensor in tensors)
