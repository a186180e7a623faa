"""Applying an update or skipping it: by a branch around it, or by a gate before each variable that it writes."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from kmp.backend import is_keras_class, keras_internals, xla

# Those that write their state by the methods of its variables; a test holds each of them to it, with all its options.
_GATEABLE = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lamb", "Lion", "Muon", "Nadam"),
    *("RMSprop", "SGD", "ScheduleFreeAdamW"),
)
# All that Keras' optimizers write by, directly or through `keras.Variable` and their own `assign`.
_METHODS = ("assign", "assign_add", "assign_sub", "scatter_add", "scatter_sub", "scatter_update")


def has_predicable_writes(kind: type[keras.optimizers.Optimizer]) -> bool:
    """Whether a gate holds all that optimizers of a class write; one of a user's own may write in other ways."""
    return kind in {getattr(keras.optimizers, name, None) for name in _GATEABLE}


def _calls_only_keras(optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> bool:
    """Whether constraints and learning rate are Keras' own; a user's may keep and write variables."""
    parts = [
        keras_internals.learning_rate_of(optimizer),
        *(getattr(variable, "constraint", None) for variable in variables),
    ]
    return all(part is None or is_keras_class(type(part)) for part in parts)


def update_or_skip(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[Any], skips: Any, update: Callable[[], None]
) -> None:
    """Updates variables, or leaves them and the optimizer's own exactly as they are.

    In graph mode a branch is the cheaper one. XLA copies every variable that a branch writes, so there every write goes
    through a gate, which costs nothing: the new value or the old one is chosen in the loop that computes it.

    Args:
        optimizer: The inner optimizer, built.
        variables: Those that it trains.
        skips: Scalar bool tensor.
        update: Applies the gradients.
    """
    is_held = has_predicable_writes(type(optimizer)) and _calls_only_keras(optimizer, variables)
    # A strategy's variable is several; its optimizer writes the parts.
    if xla.is_tracing() and is_held and not tf.distribute.has_strategy():
        with _gated([*variables, *_written_by(optimizer)], skips):
            update()
    else:
        ops.cond(skips, lambda: None, update)


def _written_by(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Returns what an optimizer writes: its state, and weights, of which it may know more than a step updates."""
    return [*keras_internals.variables_to_train(optimizer), *keras_internals.optimizer_state(optimizer)]


@contextlib.contextmanager
def _gated(variables: Sequence[Any], skips: tf.Tensor) -> Iterator[None]:
    """Lets no write through to the variables where `skips` is true, as long as this is open."""
    tf_variables = {id(v): v for v in (v.value if isinstance(v, keras.Variable) else v for v in variables)}.values()
    gates = {dtype: _Gate(skips, dtype) for dtype in {variable.dtype for variable in tf_variables}}
    for variable in tf_variables:
        vars(variable).update(gates[variable.dtype].methods(variable))
    try:
        yield
    finally:
        for variable in tf_variables:
            for name in _METHODS:
                del vars(variable)[name]


class _Gate:
    """What stands before the variables of one dtype.

    Adding or subtracting a zero, of the sign that leaves zeros of either sign as they are, costs fewer operations than
    choosing between the old value and the sum: tracing and compiling take less time.
    """

    def __init__(self, skips: tf.Tensor, dtype: tf.DType) -> None:
        self._skips = skips
        self._nothing_to_subtract = tf.zeros([], dtype)
        self._nothing_to_add = -self._nothing_to_subtract  # TensorFlow may take a constant 0.0 for -0.0

    def methods(self, variable: tf.Variable) -> dict[str, Callable[..., Any]]:
        """Returns what takes the place of the variable's methods."""
        add, subtract = self._nothing_to_add, self._nothing_to_subtract
        return {
            "assign": self._writing(variable.assign, variable),
            "assign_add": self._writing(variable.assign_add, add),
            "assign_sub": self._writing(variable.assign_sub, subtract),
            "scatter_add": self._scattering(variable.scatter_add, lambda _: add),
            "scatter_sub": self._scattering(variable.scatter_sub, lambda _: subtract),
            "scatter_update": self._scattering(variable.scatter_update, functools.partial(tf.gather, variable)),
        }

    def _writing(self, write: Callable[..., Any], nothing: Any) -> Callable[..., Any]:
        def gated(value: Any, *args: Any, **options: Any) -> Any:
            return write(self._choose(tf.convert_to_tensor(nothing), value), *args, **options)

        return gated

    def _scattering(self, write: Callable[..., Any], nothing_at: Callable[[Any], Any]) -> Callable[..., Any]:
        def gated(rows: tf.IndexedSlices, *args: Any, **options: Any) -> Any:
            values = self._choose(nothing_at(rows.indices), rows.values)
            return write(tf.IndexedSlices(values, rows.indices, rows.dense_shape), *args, **options)

        return gated

    def _choose(self, nothing: tf.Tensor, value: Any) -> tf.Tensor:
        # tf.where is this with a Python layer, which takes most of a large model's tracing.
        return tf.raw_ops.SelectV2(condition=self._skips, t=nothing, e=value)
