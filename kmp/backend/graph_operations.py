"""What the operations of a graph call, and which of them pass a tensor on."""

import tensorflow as tf

from kmp.backend.private_names import attribute

BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
LOOPS = ("While", "StatelessWhile")
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_FUNCTION_ATTRIBUTES = ("f", "then_branch", "else_branch", "branches", "cond", "body")

PASS_BUFFERS = {
    "Bitcast",
    "EnsureShape",
    "ExpandDims",
    "Identity",
    "IdentityN",
    "PreventGradient",
    "Reshape",
    "Squeeze",
    "StopGradient",
}


def bodies_of(op: tf.Operation) -> list[tf.Graph]:
    """Returns the graphs of the functions that an operation calls.

    TensorFlow 2.21 has no public name for the graph of a function by its name.
    """
    if op.type not in (*BRANCHES, *LOOPS, *CALLS):
        return []
    attributes = op.node_def.attr
    values = [attributes[name] for name in _FUNCTION_ATTRIBUTES if name in attributes]
    names = [function.name for value in values for function in value.list.func or [value.func]]
    function_of = attribute(op.graph, "tensorflow:Graph._get_function", lambda name: None)
    functions = filter(None, map(function_of, names))
    return [function.graph for function in functions if function.graph is not None]
