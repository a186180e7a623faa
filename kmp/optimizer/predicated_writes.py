"""Predicated writes: under XLA, a skipped update writes the old values in place of the new ones.

XLA copies every variable that a branch writes: Adam's step with a branch takes 1.20 to 2.45 times as long as without
loss scaling, with predicated writes 1.02 to 1.34 times. In graph mode a branch is cheaper (1.13 to 1.17 against 1.41 to
1.45 times), so there it stays a branch.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from kmp.backend import is_keras_class, keras_internals

# Optimizers that write only through `_WRITE_METHODS`; a test checks each of them with all its options.
PREDICABLE_OPTIMIZERS = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lamb", "Lion", "Muon", "Nadam"),
    *("RMSprop", "SGD", "ScheduleFreeAdamW"),
)
# The methods that Keras' optimizers call, directly or through `keras.Variable` and their own `assign`.
_WRITE_METHODS = ("assign", "assign_add", "assign_sub", "scatter_add", "scatter_sub", "scatter_update")


def supports_predicated_writes(optimizer: keras.optimizers.Optimizer, variables: Sequence[Any] = ()) -> bool:
    """Whether every write of an optimizer can be predicated.

    Not for a custom class, learning rate or constraint, which may write variables of its own.

    Args:
        optimizer: The optimizer.
        variables: The variables that it trains.
    """
    parts = [keras_internals.learning_rate_of(optimizer), *(getattr(each, "constraint", None) for each in variables)]
    return type(optimizer) in {getattr(keras.optimizers, name, None) for name in PREDICABLE_OPTIMIZERS} and all(
        part is None or is_keras_class(type(part)) for part in parts
    )


@contextlib.contextmanager
def predicated_writes(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[Any], skip: tf.Tensor
) -> Iterator[None]:
    """Makes an optimizer's writes have no effect where `skip` is true, while the context is open.

    Args:
        optimizer: The optimizer, built. It may have been built on more variables than `variables`.
        variables: The variables that it trains.
        skip: Scalar bool tensor.
    """
    written = [
        *variables,
        *keras_internals.variables_to_train(optimizer),
        *keras_internals.optimizer_state(optimizer),
    ]
    tf_variables = {id(v): v for v in (v.value if isinstance(v, keras.Variable) else v for v in written)}.values()
    zeros = {dtype: tf.zeros([], dtype) for dtype in {variable.dtype for variable in tf_variables}}
    for variable in tf_variables:
        vars(variable).update(_writes_unless(skip, variable, zeros[variable.dtype]))
    try:
        yield
    finally:
        for variable in tf_variables:
            for name in _WRITE_METHODS:
                del vars(variable)[name]


def _writes_unless(skip: tf.Tensor, variable: tf.Variable, zero: tf.Tensor) -> dict[str, Callable[..., Any]]:
    """Returns replacements of a variable's write methods, which write a neutral value where `skip` is true.

    A skipped addition or subtraction writes a zero of the sign that preserves zeros of both signs. This takes fewer
    operations than a selection between the old value and the sum, so it traces and compiles faster.
    """

    def select(neutral: Any, value: Any) -> tf.Tensor:
        # tf.where adds Python overhead that would dominate the tracing time of a large model.
        return tf.raw_ops.SelectV2(condition=skip, t=tf.convert_to_tensor(neutral), e=value)

    def predicated(write: Callable[..., Any], neutral: Any) -> Callable[..., Any]:
        return lambda value, *args, **options: write(select(neutral, value), *args, **options)

    def predicated_rows(write: Callable[..., Any], neutral_at: Callable[[Any], Any]) -> Callable[..., Any]:
        def scatter(rows: tf.IndexedSlices, *args: Any, **options: Any) -> Any:
            values = select(neutral_at(rows.indices), rows.values)
            return write(tf.IndexedSlices(values, rows.indices, rows.dense_shape), *args, **options)

        return scatter

    negative_zero = -zero  # TensorFlow may replace a constant -0.0 by 0.0
    return {
        "assign": predicated(variable.assign, variable),
        "assign_add": predicated(variable.assign_add, negative_zero),
        "assign_sub": predicated(variable.assign_sub, zero),
        "scatter_add": predicated_rows(variable.scatter_add, lambda _: negative_zero),
        "scatter_sub": predicated_rows(variable.scatter_sub, lambda _: zero),
        "scatter_update": predicated_rows(variable.scatter_update, functools.partial(tf.gather, variable)),
    }
