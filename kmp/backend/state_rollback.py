"""Passes that are not part of the training: the state of the model is as before."""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from kmp.backend.keras_internals import sublayers
from kmp.backend.undo import Undos

# Operations whose state is not in a variable, by the reason in the words of a user.
_UNRESTORABLE = {
    "EagerPyFunc": "tf.py_function",
    "IteratorGetNext": "an iterator that the step reads",
    "PyFunc": "tf.numpy_function",
    "QueueDequeueV2": "a queue that the step reads",
    "QueueEnqueueV2": "a queue that the step fills",
    "WriteScalarSummary": "the summaries that the step writes",
    "WriteSummary": "the summaries that the step writes",
    "LookupTableImportV2": "a lookup table that the step changes",
    "LookupTableInsertV2": "a lookup table that the step changes",
    "LookupTableRemoveV2": "a lookup table that the step changes",
}
_CALLS = (
    "Case",
    "If",
    "PartitionedCall",
    "StatefulPartitionedCall",
    "StatelessIf",
    "StatelessWhile",
    "While",
)


class ResourceVariable(NamedTuple):
    """A variable of TensorFlow, by the handle that a traced function captures; and whether the function assigns it."""

    handle: tf.Tensor
    dtype: tf.DType
    is_assigned: bool = False

    def read(self) -> tf.Tensor:
        """Returns a copy of the value."""
        return tf.identity(tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype))

    def assign(self, value: tf.Tensor) -> None:
        """Sets the value."""
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)


@contextlib.contextmanager
def state_restored(
    model: keras.Model, variables: Iterable[ResourceVariable] = ()
) -> Iterator[keras.StatelessScope]:
    """Makes an eager pass assign nothing of Keras, and restores what it assigns of TensorFlow's `variables`.

    Assignments to Keras' variables (weights, statistics, states, seeds, metrics) end with the
    context and do not reach the variable, so nothing is lost if the pass is interrupted. Yields the
    scope that has them.
    """
    values = [value for layer in sublayers(model) for value in vars(layer).values()]
    own = [value.state if isinstance(value, tf.random.Generator) else value for value in values]
    saved = [(variable.assign, variable.read()) for variable in variables]
    saved += [
        (variable.assign, tf.identity(variable))
        for variable in own
        if isinstance(variable, tf.Variable)
    ]
    scope = keras.StatelessScope(collect_losses=True)
    with Undos() as undos, undos:
        for assign, value in saved:
            undos.add(functools.partial(assign, value))
        undos.add(functools.partial(_leave, scope))
        scope.__enter__()
        # Keras reads the variables of regularizers from the scope only. TensorFlow's variables,
        # which a tape can differentiate by, stand there: tensors could not.
        for variable in model.trainable_variables:
            scope.add_update((variable, variable.value))
        yield scope


def _leave(scope: keras.StatelessScope) -> None:
    if hasattr(scope, "original_scope"):  # it was entered
        scope.__exit__(None, None, None)


def state_of_trace(
    known: Iterable[keras.Variable], unless_assigned: bool = False
) -> tuple[list[ResourceVariable], str | None]:
    """Returns TensorFlow's variables that the function which is traced now uses, except those of Keras' `known` ones.

    With `unless_assigned`, those that it assigns outside of branches are not excepted. And what a
    pass of it would change that nobody can restore, or `None`.
    """
    if tf.executing_eagerly():
        return [], None
    graph = tf.compat.v1.get_default_graph()
    kinds = {
        operation.type
        for inner in _with_nested(graph, set())
        for operation in inner.get_operations()
    }
    reasons = [reason for kind, reason in _UNRESTORABLE.items() if kind in kinds]
    assigned = {
        id(operation.inputs[0])
        for operation in graph.get_operations()
        if operation.type.startswith("Assign")
    }
    known_handles = {
        id(variable.value.handle) for variable in known if hasattr(variable.value, "handle")
    }
    variables = []
    for handle, inner in graph.captures:
        is_handle = (
            isinstance(handle, tf.Tensor)
            and handle.dtype == tf.resource
            and not tf.is_symbolic_tensor(handle)
        )
        data = handle._handle_data if is_handle else None  # no public name; a table has none
        values: Any = data.shape_and_type if data is not None else ()
        is_assigned = id(inner) in assigned
        if len(values) == 1 and (
            id(handle) not in known_handles or (unless_assigned and is_assigned)
        ):
            variables.append(ResourceVariable(handle, tf.as_dtype(values[0].dtype), is_assigned))
    return variables, next(iter(reasons), None)


def _with_nested(graph: Any, seen: set[str]) -> Iterator[Any]:
    """Yields a graph, and those of the functions, branches and loops in it, which have no public name."""
    yield graph
    for operation in graph.get_operations():
        for attribute in operation.node_def.attr.values() if operation.type in _CALLS else ():
            name = attribute.func.name
            if name and name not in seen:
                seen.add(name)
                function = graph._get_function(name)
                if function is not None and function.graph is not None:
                    yield from _with_nested(function.graph, seen)
