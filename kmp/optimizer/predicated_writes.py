"""How XLA skips a step: the optimizer's writes have no effect."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from kmp.backend import keras_internals, xla
from kmp.backend.keras_internals import is_keras_class
from kmp.backend.sparse_division import divisions_of_present_rows

# Optimizers that write only through `_WRITE_METHODS`; a test checks each of them with all its
# options.
_PREDICABLE = (
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "Lamb",
    "Lion",
    "Muon",
    "Nadam",
    "RMSprop",
    "SGD",
    "ScheduleFreeAdamW",
)
_LARGE = 2**22  # elements, as the table of an embedding has
# The methods that Keras' optimizers call, directly or through `keras.Variable` and their own
# `assign`.
_WRITE_METHODS = (
    "assign",
    "assign_add",
    "assign_sub",
    "scatter_add",
    "scatter_sub",
    "scatter_update",
)


def supports_predicated_writes(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[Any] = ()
) -> bool:
    """Whether each write can be predicated.

    A custom class, learning rate or constraint may write its own variables.
    """
    classes = [getattr(keras.optimizers, name, None) for name in _PREDICABLE]
    replaced = (
        hasattr(type(optimizer), name) for name, each in vars(optimizer).items() if callable(each)
    )
    if type(optimizer) not in classes or any(replaced):
        return False
    constraints = [getattr(each, "constraint", None) for each in variables]
    parts = [keras_internals.learning_rate_of(optimizer), *constraints]
    return all(part is None or is_keras_class(type(part)) for part in parts)


@contextlib.contextmanager
def predicated_writes(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[Any], skip: tf.Tensor
) -> Iterator[None]:
    """Makes an optimizer's writes have no effect in the context where `skip` is true.

    XLA copies every variable that a branch writes: Adam's step with a branch takes 1.20 to 2.45
    times as long as without loss scaling, with predicated writes 1.02 to 1.34 times. In graph mode
    a branch is cheaper (1.13 to 1.17 against 1.41 to 1.45 times), so there it stays a branch.
    """
    written = [  # the optimizer may have been built on more variables than it trains here
        *variables,
        *keras_internals.variables_to_train(optimizer),
        *keras_internals.optimizer_state(optimizer),
    ]
    values = [each.value if isinstance(each, keras.Variable) else each for each in written]
    tf_variables = {id(variable): variable for variable in values}.values()
    zeros = {dtype: tf.zeros([], dtype) for dtype in {variable.dtype for variable in tf_variables}}
    # TensorFlow may replace a constant -0.0 by 0.0.
    negative_zeros = {dtype: -zero for dtype, zero in zeros.items()}
    select_by = xla.masks_of(skip)
    for variable in tf_variables:
        zero, negative_zero = zeros[variable.dtype], negative_zeros[variable.dtype]
        vars(variable).update(_writes_unless(select_by, variable, zero, negative_zero))
    try:
        with divisions_of_present_rows():
            yield
    finally:
        for variable in tf_variables:
            for name in _WRITE_METHODS:
                del vars(variable)[name]


def _writes_unless(
    skip_by: Callable[[Any], tf.Tensor],
    variable: tf.Variable,
    zero: tf.Tensor,
    negative_zero: tf.Tensor,
) -> dict[str, Callable[..., Any]]:
    """Returns replacements of a variable's write methods, for a step that may be skipped.

    A skipped step writes a neutral value. A skipped addition or subtraction writes a zero of the
    sign that preserves zeros of both signs. This takes fewer operations than a selection between
    the old value and the sum, so it traces and compiles faster. Large variables get that selection:
    XLA would share the zero with those to which it adds the rows of a sparse gradient, and read
    all.
    """

    def select(neutral: Any, value: Any) -> tf.Tensor:
        value = tf.convert_to_tensor(value)
        # tf.where adds Python overhead that would dominate the tracing time of a large model.
        neutral = tf.convert_to_tensor(neutral)
        return tf.raw_ops.SelectV2(condition=skip_by(value.shape), t=neutral, e=value)

    def predicated(write: Callable[..., Any], neutral: Any) -> Callable[..., Any]:
        def write_unless(value: Any, *args: Any, **options: Any) -> Any:
            if not isinstance(value, tf.IndexedSlices):
                return write(select(neutral, value), *args, **options)
            kept = tf.gather(variable, value.indices) if neutral is variable else neutral
            rows = tf.IndexedSlices(select(kept, value.values), value.indices, value.dense_shape)
            return write(rows, *args, **options)

        return write_unless

    neutral = (variable, negative_zero, zero, negative_zero, zero, variable)
    methods = {
        name: predicated(getattr(variable, name), each)
        for name, each in zip(_WRITE_METHODS, neutral, strict=True)
    }
    if (variable.shape.num_elements() or 0) <= _LARGE:
        return methods
    assign = methods["assign"]

    def assign_add(value: Any, *args: Any, **options: Any) -> Any:
        return assign(variable + value, *args, **options)

    def assign_sub(value: Any, *args: Any, **options: Any) -> Any:
        return assign(variable - value, *args, **options)

    return {**methods, "assign_add": assign_add, "assign_sub": assign_sub}
