"""Rewrites a graph: operations in 16 bits compute in another float format."""

import itertools
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from typing import Any

import numpy as np
import tensorflow as tf

from kmp.utils.float_formats import DTYPES_16_BIT

# What keeps its format: variables and what reads and assigns them, and operations that draw random
# numbers, which would draw others in another format.
KEEPING_FORMAT = (
    "Assign",
    "Multinomial",
    "Parameterized",
    "Placeholder",
    "Random",
    "ReadVariableOp",
    "Resource",
    "StatelessRandom",
    "StatelessTruncated",
    "TruncatedNormal",
    "VarHandleOp",
)
_TYPES_16_BIT = frozenset(tf.as_dtype(name).as_datatype_enum for name in DTYPES_16_BIT)

CAST, _SEED = "kmp_cast_", "kmp_seed_"  # the names of operations begin so
_numbers = itertools.count()  # in the names of functions

# Operations that continue a stream of random numbers, and those that draw the same ones each time.
_STATELESS = {
    "RandomStandardNormal": "StatelessRandomNormal",
    "RandomUniform": "StatelessRandomUniform",
    "RandomUniformInt": "StatelessRandomUniformInt",
    "TruncatedNormal": "StatelessTruncatedNormal",
}
# Those that have no such counterpart.
_OTHER_RANDOM = frozenset(
    {
        "Multinomial",
        "ParameterizedTruncatedNormal",
        "RandomGamma",
        "RandomPoissonV2",
        "RandomShuffle",
        "SampleDistortedBoundingBoxV2",
    }
)


class NotRewritable(Exception):  # noqa: N818
    """A graph has an operation that cannot be rewritten. The message says why."""


def rewritten(
    graph_def: Any,
    graph: Any,
    dtype: str,
    constants: Mapping[str, np.ndarray],
    only: Collection[str] | None = None,
    variables: Set[str] = frozenset(),
    casts: Collection[str] = (),
) -> Any:
    """Returns a graph in which operations that computed in 16 bits compute in another format.

    Values are cast where they come from an operation that is rewritten to one that is not, or the
    other way round.

    Args:
        graph_def: A `GraphDef`: a part of the graph.
        graph: The graph, which knows the dtypes of its tensors.
        dtype: The name of the format.
        constants: The exact values of constants, by the name of the operation: one for all
            elements, or as many as there are in another shape.
        only: The names of the operations that are rewritten; by default all.
        variables: The names of the placeholders of variables in 16 bits, and of constants, that
            are in the other format in the new graph.
        casts: The names of casts that are left out where an operation that is rewritten gets what
            they return.
    """
    result = type(graph_def)()
    result.CopyFrom(graph_def)
    target = tf.as_dtype(dtype).as_datatype_enum

    # What is rewritten.
    chosen = set(variables)
    for node in result.node:
        is_wanted = only is None or node.name in only
        keeps_format = node.op.startswith(KEEPING_FORMAT) and variables.isdisjoint(node.input)
        if is_wanted and not keeps_format:
            chosen.add(node.name)

    functions = {each.signature.name: each for each in result.library.function}
    suffix = f"_in_{dtype}"
    added = _Casts()
    nodes = {node.name: node for node in graph_def.node}
    for node in result.node:
        is_rewritten = node.name in chosen
        for position, source in enumerate(node.input):
            name, _, index = source.lstrip("^").partition(":")
            is_cast = (name in chosen) != is_rewritten and not name.startswith(_SEED)
            if source.startswith("^") or not is_cast:
                continue
            own = graph.get_operation_by_name(name).outputs[int(index or 0)].dtype
            number = own.as_datatype_enum
            if own.name not in DTYPES_16_BIT or number == target:
                continue
            if is_rewritten:
                uncast, before = source, number
                if name in casts:
                    uncast, before = nodes[name].input[0], nodes[name].attr["SrcT"].type
                node.input[position] = added.cast(uncast, before, target)
            elif node.op == "Cast":
                # What takes the value in another dtype takes it from that which it has now.
                node.attr["SrcT"].type = target
            else:
                node.input[position] = added.cast(source, target, number)
        if is_rewritten:
            _rewrite_attributes(node, target, suffix, functions, constants.get(node.name))
    result.node.extend(added.nodes)
    _add_functions(result, functions, target, suffix)
    return result


class _Casts:
    """Casts that are added to a graph, each once.

    Attributes:
        nodes: Their operations.
    """

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self._names: dict[tuple[str, int], str] = {}

    def cast(self, source: str, before: int, after: int) -> str:
        """Returns the name of the operation that casts a tensor."""
        key = source, after
        if key not in self._names:
            self._names[key] = f"{CAST}{len(self.nodes)}"
            node = tf.compat.v1.NodeDef(name=self._names[key], op="Cast", input=[source])
            node.attr["SrcT"].type, node.attr["DstT"].type = before, after
            self.nodes.append(node)
        return self._names[key]


def _rewrite_attributes(
    node: Any,
    target: int,
    suffix: str,
    functions: Iterable[str],
    exact: np.ndarray | None = None,
) -> None:
    for attribute in node.attr.values():
        kind = attribute.WhichOneof("value")
        if kind == "type" and attribute.type in _TYPES_16_BIT:
            attribute.type = target
        elif kind == "tensor" and attribute.tensor.dtype in _TYPES_16_BIT:
            value = tf.make_ndarray(attribute.tensor)
            if exact is not None and exact.size == 1:
                value = np.broadcast_to(exact, value.shape)
            elif exact is not None and exact.size == value.size:
                value = exact.reshape(value.shape)
            dtype = tf.as_dtype(target)
            attribute.tensor.CopyFrom(tf.make_tensor_proto(value.astype(dtype.as_numpy_dtype)))
        elif kind == "func" and attribute.func.name in functions:
            attribute.func.name += suffix
        elif kind == "list":
            types = [target if each in _TYPES_16_BIT else each for each in attribute.list.type]
            attribute.list.type[:] = types
            for function in attribute.list.func:
                if function.name in functions:
                    function.name += suffix


def _add_functions(result: Any, functions: Mapping[str, Any], target: int, suffix: str) -> None:
    """Adds the rewritten functions to the library."""
    for function in functions.values():
        copy = result.library.function.add()
        copy.CopyFrom(function)
        copy.signature.name += suffix
        for argument in (*copy.signature.input_arg, *copy.signature.output_arg):
            if argument.type in _TYPES_16_BIT:
                argument.type = target
        kept = _cast_kept(copy, target)
        for node in copy.node_def:
            if node.name not in kept:
                _rewrite_attributes(node, target, suffix, functions)


def _cast_kept(function: Any, target: int) -> set[str]:
    """Casts what operations of a function get and return that keep 16 bits; returns their names."""
    kept = {
        node.name: node.attr["dtype"].type
        for node in function.node_def
        if node.op.startswith(KEEPING_FORMAT) and node.attr["dtype"].type in _TYPES_16_BIT
    }
    added = _Casts()
    for node in function.node_def:
        for position, source in enumerate(node.input):
            name = source.partition(":")[0]
            is_value = node.op.startswith("Assign") and position == 1
            if name in kept and node.name not in kept:
                node.input[position] = f"{added.cast(source, kept[name], target)}:y:0"
            elif node.name in kept and is_value and name not in kept:
                node.input[position] = f"{added.cast(source, target, kept[node.name])}:y:0"
    for output, source in function.ret.items():
        name = source.partition(":")[0]
        if name in kept:
            function.ret[output] = f"{added.cast(source, kept[name], target)}:y:0"
    function.node_def.extend(added.nodes)
    return {*kept, *(node.name for node in added.nodes)}


def with_operations(graph_def: Any, names: Collection[str]) -> Any:
    """Returns a graph with these operations only, which wait for no others."""
    result = type(graph_def)(versions=graph_def.versions, library=graph_def.library)
    result.node.extend(node for node in graph_def.node if node.name in names)
    for node in result.node:
        node.attr.pop("_class", None)  # may name another operation
        node.input[:] = [each for each in node.input if each[0] != "^" or each[1:] in names]
    return result


def with_fixed_numbers(graph_def: Any) -> Any:
    """Returns a graph whose random operations draw the same numbers each time it runs.

    Operations that get a seed stay as they are.

    Raises:
        NotRewritable: If an operation cannot be given a seed.
    """
    result = type(graph_def)()
    result.CopyFrom(graph_def)
    inside = [(function.node_def, ":output:0") for function in result.library.function]
    for nodes, output in [(result.node, ""), *inside]:
        for node in nodes:
            if node.op in _OTHER_RANDOM:
                raise NotRewritable(f"{node.op} {node.name!r} draws other numbers each time")
        _fix_numbers(nodes, output)
    return result


def with_own_functions(graph_def: Any) -> Any:
    """Returns a graph with only the functions that it calls, under names that no other graph has.

    TensorFlow knows functions by their names, and would run another one of the same name.
    """
    result = type(graph_def)(node=graph_def.node, versions=graph_def.versions)
    functions = {each.signature.name: each for each in graph_def.library.function}
    suffix = f"_kmp_{next(_numbers)}"
    found: set[str] = set()
    waiting = [result.node]
    while waiting:
        for called in [each for node in waiting.pop() for each in _functions_of(node)]:
            name = called.name
            if name not in functions:
                continue
            called.name += suffix
            if name in found:
                continue
            found.add(name)
            copy = result.library.function.add()
            copy.CopyFrom(functions[name])
            copy.signature.name += suffix
            waiting.append(copy.node_def)
    return result


def _functions_of(node: Any) -> Iterator[Any]:
    """Yields what refers to a function in the attributes of a node."""
    for attribute in node.attr.values():
        kind = attribute.WhichOneof("value")
        if kind == "func":
            yield attribute.func
        elif kind == "list":
            yield from attribute.list.func


def _fix_numbers(nodes: Any, output: str) -> None:
    drawing = [node for node in nodes if node.op in _STATELESS]
    for number, node in enumerate(drawing):
        seed = nodes.add(name=f"{_SEED}{number}", op="Const")
        seed.attr["dtype"].type = tf.int32.as_datatype_enum
        value = [zlib.crc32(node.name.encode()) & 0x7FFFFFFF, 0]
        seed.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.int32))
        inputs = list(node.input)
        node.input[:] = [inputs[0], f"{seed.name}{output}", *inputs[1:]]
        integers = node.op == "RandomUniformInt"
        dtype = node.attr["Tout" if integers else "dtype"].type
        index = node.attr["T"].type
        node.op = _STATELESS[node.op]
        for name in list(node.attr):
            if not name.startswith("_"):
                del node.attr[name]
        node.attr["dtype"].type, node.attr["T"].type = dtype, index
        node.attr["Tseed"].type = tf.int32.as_datatype_enum
