"""Updates variables or skips the update: with a branch around it or, under XLA, with predicated writes."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf
from keras import ops

from kmp.backend import is_keras_class, keras_internals, outlined, xla

T = TypeVar("T")

# Optimizers that write only through `_WRITE_METHODS`; a test checks each of them with all its options.
_PREDICABLE_OPTIMIZERS = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lamb", "Lion", "Muon", "Nadam"),
    *("RMSprop", "SGD", "ScheduleFreeAdamW"),
)
# The methods that Keras' optimizers call, directly or through `keras.Variable` and their own `assign`.
_WRITE_METHODS = ("assign", "assign_add", "assign_sub", "scatter_add", "scatter_sub", "scatter_update")


def supports_predicated_writes(optimizer_class: type[keras.optimizers.Optimizer]) -> bool:
    """Whether every write of an optimizer class can be predicated; never for a custom class."""
    return optimizer_class in {getattr(keras.optimizers, name, None) for name in _PREDICABLE_OPTIMIZERS}


def _calls_only_keras(optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> bool:
    """Whether constraints and learning rate are classes of Keras; custom ones may write variables that they own."""
    parts = [
        keras_internals.learning_rate_of(optimizer),
        *(getattr(variable, "constraint", None) for variable in variables),
    ]
    return all(part is None or is_keras_class(type(part)) for part in parts)


def update_or_skip(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[Any],
    skip: Any,
    update: Callable[[], None],
    finish: Callable[[Any], None],
) -> None:
    """Updates variables, or leaves them and the optimizer's state bitwise unchanged; then calls `finish`.

    In graph mode a branch is cheaper. XLA copies every variable that a branch writes, so under XLA each write is
    predicated instead: the loop that computes the new value selects the new or the old one, at no extra cost.

    Args:
        optimizer: The inner optimizer, built.
        variables: The variables that it trains.
        skip: Scalar bool tensor, whether to skip the update.
        update: Applies the gradients.
        finish: Gets `True` or `False` if it is called in a branch, else `skip`; see `select`.
    """

    def update_and_finish() -> None:
        update()
        finish(False)

    is_predicable = supports_predicated_writes(type(optimizer)) and _calls_only_keras(optimizer, variables)
    # Under a strategy a variable has one component per replica, and the optimizer writes the components.
    if xla.is_tracing() and is_predicable and not tf.distribute.has_strategy():
        with _predicated_writes([*variables, *_written_by(optimizer)], skip):
            update()
        finish(skip)
    else:
        ops.cond(skip, outlined(functools.partial(finish, True)), update_and_finish)


def select(skip: Any, if_skipped: Callable[[], T], if_updated: Callable[[], T]) -> T:
    """Returns the tensors of one of two functions, of which both are called only if it depends on a tensor.

    Args:
        skip: Bool, or scalar bool tensor.
        if_skipped: Returns a structure of tensors.
        if_updated: Returns a structure of the same kind.
    """
    if isinstance(skip, bool):
        return if_skipped() if skip else if_updated()
    return tf.nest.map_structure(functools.partial(ops.where, skip), if_skipped(), if_updated())


def _written_by(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Returns the variables that an optimizer writes: its weights, of which a step may update only some, and state."""
    return [*keras_internals.variables_to_train(optimizer), *keras_internals.optimizer_state(optimizer)]


@contextlib.contextmanager
def _predicated_writes(variables: Sequence[Any], skip: tf.Tensor) -> Iterator[None]:
    """Makes writes to the variables have no effect where `skip` is true, while the context is open."""
    tf_variables = {id(v): v for v in (v.value if isinstance(v, keras.Variable) else v for v in variables)}.values()
    writes = {dtype: _PredicatedWrites(skip, dtype) for dtype in {variable.dtype for variable in tf_variables}}
    for variable in tf_variables:
        vars(variable).update(writes[variable.dtype].methods(variable))
    try:
        yield
    finally:
        for variable in tf_variables:
            for name in _WRITE_METHODS:
                del vars(variable)[name]


class _PredicatedWrites:
    """Predicated write methods for the variables of one dtype.

    A skipped addition or subtraction uses a zero of the sign that preserves zeros of both signs. This takes fewer
    operations than a selection between the old value and the sum, so it traces and compiles faster.
    """

    def __init__(self, skip: tf.Tensor, dtype: tf.DType) -> None:
        self._skip = skip
        self._zero_to_subtract = tf.zeros([], dtype)
        self._zero_to_add = -self._zero_to_subtract  # TensorFlow may replace a constant -0.0 by 0.0

    def methods(self, variable: tf.Variable) -> dict[str, Callable[..., Any]]:
        """Returns the replacements of the variable's methods, by name."""
        add, subtract = self._zero_to_add, self._zero_to_subtract
        return {
            "assign": self._predicated_assign(variable.assign, variable),
            "assign_add": self._predicated_assign(variable.assign_add, add),
            "assign_sub": self._predicated_assign(variable.assign_sub, subtract),
            "scatter_add": self._predicated_scatter(variable.scatter_add, lambda _: add),
            "scatter_sub": self._predicated_scatter(variable.scatter_sub, lambda _: subtract),
            "scatter_update": self._predicated_scatter(variable.scatter_update, functools.partial(tf.gather, variable)),
        }

    def _predicated_assign(self, write: Callable[..., Any], neutral: Any) -> Callable[..., Any]:
        """Returns `write` with `neutral`, which leaves the variable unchanged, in place of a skipped value."""

        def assign(value: Any, *args: Any, **options: Any) -> Any:
            return write(self._select(tf.convert_to_tensor(neutral), value), *args, **options)

        return assign

    def _predicated_scatter(self, write: Callable[..., Any], neutral_at: Callable[[Any], Any]) -> Callable[..., Any]:
        def scatter(rows: tf.IndexedSlices, *args: Any, **options: Any) -> Any:
            values = self._select(neutral_at(rows.indices), rows.values)
            return write(tf.IndexedSlices(values, rows.indices, rows.dense_shape), *args, **options)

        return scatter

    def _select(self, neutral: tf.Tensor, value: Any) -> tf.Tensor:
        # tf.where adds Python overhead that would dominate the tracing time of a large model.
        return tf.raw_ops.SelectV2(condition=self._skip, t=neutral, e=value)
