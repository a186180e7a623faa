"""Traces that are not part of the training: the state of the model is as before."""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from kmp.backend.keras_internals import sublayers, tensorflow_variables
from kmp.backend.private_names import attribute
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
    """A variable of TensorFlow, by the handle that a traced function captures.

    `is_assigned` is whether the function assigns it.
    """

    handle: tf.Tensor
    dtype: tf.DType
    is_assigned: bool


@contextlib.contextmanager
def state_restored(model: keras.Model) -> Iterator[keras.StatelessScope]:
    """Keeps the state of a model as it is, whatever the context assigns.

    Assignments to Keras' variables (weights, statistics, states, seeds, metrics) end with the
    context and do not reach the variable, so nothing is lost if it is interrupted. TensorFlow's
    variables in layers get their values back. Yields the scope that has the assignments.
    """
    saved = []
    for layer in sublayers(model):
        values = vars(layer).values()
        states = [each.state for each in values if isinstance(each, tf.random.Generator)]
        for state in (*states, *tensorflow_variables(layer)):
            saved.append((state.assign, tf.identity(state)))
    scope = keras.StatelessScope(collect_losses=True)
    with Undos() as undos, undos.first_attempt():
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
    with contextlib.suppress(AttributeError):  # it was not entered
        scope.__exit__(None, None, None)


# The reason where TensorFlow's private names that show the state are missing.
_UNSEEN = "state that this version of kmp does not see in this version of TensorFlow"


def state_of_trace(
    known: Iterable[keras.Variable], unless_assigned: bool = False
) -> tuple[list[ResourceVariable], str | None]:
    """Returns TensorFlow's variables that the function which is traced now uses.

    Args:
        known: Keras' variables, which are left out.
        unless_assigned: Whether to return those of them that the function assigns outside of
            branches.

    Returns:
        The variables; and what a pass of the function would change that nobody can restore, or
        `None`.
    """
    if tf.executing_eagerly():
        return [], None
    graph: Any = tf.compat.v1.get_default_graph()
    values = [variable.value for variable in known]
    known_handles = {id(value.handle) for value in values if hasattr(value, "handle")}
    operations = graph.get_operations()
    assigned = {id(each.inputs[0]) for each in operations if each.type.startswith("Assign")}
    variables, reason = [], unrestorable_in(graph)
    for handle, inner in graph.captures:
        is_assigned = id(inner) in assigned
        if id(handle) in known_handles and not (unless_assigned and is_assigned):
            continue
        dtypes = _dtypes_of_handle(handle)
        if dtypes is None:
            reason = reason or _UNSEEN
        elif len(dtypes) == 1:
            variables.append(ResourceVariable(handle, dtypes[0], is_assigned))
    return variables, reason


def _dtypes_of_handle(handle: Any) -> list[tf.DType] | None:
    """Returns the dtype of the variable of a handle; none of other tensors; `None` if not known."""
    if not isinstance(handle, tf.Tensor) or handle.dtype != tf.resource:
        return []
    if tf.is_symbolic_tensor(handle):
        return []
    data = attribute(handle, "tensorflow:Tensor._handle_data", _UNSEEN)
    if data == _UNSEEN:
        return None
    shapes_and_types = () if data is None else data.shape_and_type  # a table has none
    return [tf.as_dtype(each.dtype) for each in shapes_and_types]


def handle_dtype(handle: Any) -> tf.DType | None:
    """Returns the dtype of the variable of a handle; `None` of another tensor."""
    dtypes = _dtypes_of_handle(handle)
    if dtypes is None:
        raise RuntimeError(f"a pass uses {_UNSEEN}")
    return dtypes[0] if len(dtypes) == 1 else None


def unrestorable_in(graph: Any) -> str | None:
    """Returns what a pass of a graph would change that nobody can restore, or `None`."""
    graphs = list(_with_nested(graph, set()))
    if None in graphs:
        return _UNSEEN
    types = {operation.type for inner in graphs for operation in inner.get_operations()}
    reasons = (reason for kind, reason in _UNRESTORABLE.items() if kind in types)
    return next(reasons, None)


def _with_nested(graph: Any, seen: set[str]) -> Iterator[Any]:
    """Yields a graph, and those of the functions, branches and loops in it.

    Yields `None` last if TensorFlow has no name that leads to these.
    """
    yield graph
    for operation in graph.get_operations():
        if operation.type not in _CALLS:
            continue
        names = {value.func.name for value in operation.node_def.attr.values()} - {"", *seen}
        for name in sorted(names):
            seen.add(name)
            function_of = attribute(graph, "tensorflow:Graph._get_function")
            if function_of is None:
                yield None
                return
            function = function_of(name)
            if function is not None and function.graph is not None:
                yield from _with_nested(function.graph, seen)
