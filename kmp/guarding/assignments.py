"""Records the values that variables had before code in a training step changed them."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import ops

from kmp.backend import distribution, keras_internals
from kmp.backend.inventory import Reason
from kmp.backend.patching import patches


class SavedValue(NamedTuple):
    """A variable and the value that it had.

    Attributes:
        owner: The layer of the user's own that has it, with other variables that belong together;
            `None` if the layer is of Keras, or if no layer is known.
    """

    variable: keras.Variable | tf.Variable
    value: Any
    owner: keras.Layer | None = None


class AssignmentRecord:
    """The values of weights before code assigned others to them.

    An optimizer writes TensorFlow's variable inside of Keras', so only weights to which other code
    or a constraint assigns a value cost a copy.
    """

    def __init__(self, weights: Iterable[keras.Variable]) -> None:
        self._weights = {id(weight): weight for weight in weights}
        self._saved: dict[int, SavedValue] = {}
        self._replica = distribution.replica_id()
        self._graph = _current_graph()

    @property
    def saved(self) -> list[SavedValue]:
        """The weights to which code assigned a value, with the value before the first time."""
        return list(self._saved.values())

    def before_assign(self, variable: keras.Variable) -> None:
        """Saves the value of a variable if it is one of the weights and is assigned first."""
        if id(variable) not in self._weights or id(variable) in self._saved:
            return
        # The replicas of MirroredStrategy are traced in turns, and share the weight.
        if self._replica != distribution.replica_id() or not _is_in(self._graph):
            return
        # The value is read in the graph of the step, before that calls the function, the branch or
        # the loop that assigns another one: a value that is read in there exists only there.
        with contextlib.nullcontext() if self._graph is None else self._graph.as_default():
            value = keras_internals.uncast_value(variable)
        self._saved[id(variable)] = SavedValue(variable, value)


# The records of the guarded steps that run now.
_open_records: list[AssignmentRecord] = []


@contextlib.contextmanager
def assignments_recorded(weights: Iterable[keras.Variable]) -> Iterator[AssignmentRecord]:
    """Records assignments to these weights in the context."""
    record = AssignmentRecord(weights)
    with patches.holding(Reason.STEP):
        _open_records.append(record)
        try:
            yield record
        finally:
            _open_records.remove(record)


def assign_patch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patches `keras.Variable.assign` to record the values before."""

    @functools.wraps(original)
    def assign(self: keras.Variable, value: Any) -> Any:
        for record in tuple(_open_records):
            record.before_assign(self)
        return original(self, value)

    return assign


class CreationRecord:
    """The initial values of the variables that code created."""

    def __init__(self) -> None:
        self._values: dict[int, tf.Tensor] = {}

    @property
    def has_any(self) -> bool:
        """Whether code has created any."""
        return bool(self._values)

    def create(self, create: Callable[..., tf.Variable], **arguments: Any) -> tf.Variable:
        """Creates a variable, and keeps its initial value."""
        variable = create(**arguments)
        with tf.init_scope():  # Keras may build a layer in a graph of its own in eager mode too
            if tf.executing_eagerly() and bool(variable.is_initialized()):
                self._values[id(variable)] = tf.identity(variable)
                return variable
        # In a graph, the variable has no value until the graph runs.
        value = arguments["initial_value"]
        value = value() if callable(value) else value
        self._values[id(variable)] = tf.identity(tf.cast(value, variable.dtype))
        return variable

    def initial(self, variable: keras.Variable | tf.Variable) -> SavedValue | None:
        """Returns a variable that was created in the context, with its initial value.

        Returns `None` if the code that is traced now cannot use that value: Keras builds layers in
        a graph of its own. TensorFlow then traces the step once more, with the variable, before it
        runs it.
        """
        created = variable.value if isinstance(variable, keras.Variable) else variable
        value = self._values.get(id(created))
        if value is not None:
            is_usable = not tf.is_symbolic_tensor(value) or _is_in(value.graph)
            return SavedValue(variable, value) if is_usable else None
        # It was created outside the graph, which has not run yet: the current value is the initial
        # one.
        with tf.init_scope():
            return SavedValue(variable, ops.copy(variable))


@contextlib.contextmanager
def creations_recorded() -> Iterator[CreationRecord]:
    """Records the variables that are created in the context."""
    record = CreationRecord()
    with tf.variable_creator_scope(record.create):
        yield record


def _is_in(graph: tf.Graph | None) -> bool:
    """Whether code is traced in a graph or a function of it now; for `None`, runs eagerly."""
    current: Any = _current_graph()
    while current is not None and current is not graph:
        current = getattr(current, "outer_graph", None)
    return current is graph


def _current_graph() -> tf.Graph | None:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
