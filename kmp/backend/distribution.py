"""Communication between replicas and workers, and per-replica variables."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import keras
import numpy as np
import tensorflow as tf

from kmp.backend.keras_internals import instance_attribute
from kmp.backend.private_names import find

Structure = TypeVar("Structure")

# The strategies in which each replica has its own copy of the variables, and all are updated alike.
_MIRRORING = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.OneDeviceStrategy,
)


def sum_over_replicas(values: Structure) -> Structure:
    """Returns the sums over all replicas and workers of a structure of float32 tensors.

    It takes one all-reduce. Every device can all-reduce float32. Sizes must be static.
    """
    context: Any = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return values
    # The sum is placed on its input's device. A tensor read from a variable may have none; a
    # concatenation has one.
    tensors = tf.nest.flatten(values)
    joined = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)
    sums = tf.split(
        context.all_reduce(tf.distribute.ReduceOp.SUM, joined),
        [tf.size(tensor) for tensor in tensors],
    )
    shaped = [tf.reshape(part, tensor.shape) for part, tensor in zip(sums, tensors, strict=True)]
    return tf.nest.pack_sequence_as(values, shaped)


def all_reduce_sum(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the sums over all replicas and workers of tensors of any float dtype."""
    context: Any = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1 or not tensors:
        return tensors
    return context.all_reduce(tf.distribute.ReduceOp.SUM, tensors)


def check_context(method: str, is_built: bool) -> None:
    """Raises an error if a method of an optimizer is called where it cannot work.

    It cannot be called for all replicas together, and it cannot create variables in a graph with
    several replicas, which TensorFlow does not support.
    """
    if tf.distribute.get_replica_context() is None:
        raise ValueError(
            f"`{method}` must be called in a replica context, as in `strategy.run(step)`."
        )
    if (
        not is_built
        and tf.distribute.get_strategy().num_replicas_in_sync > 1
        and not tf.executing_eagerly()
    ):
        raise ValueError(
            "With several replicas, the optimizer must be built before the first step: call "
            "`optimizer.build(model.trainable_variables)` under `strategy.scope()`."
        )


def replica_id() -> int:
    """Returns the number of the replica that this function is traced or run for.

    It is 0 without a distribution strategy.
    """
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return 0
    return int(tf.get_static_value(context.replica_id_in_sync_group) or 0)


def in_update_context(
    function: Callable[..., None], agreed: Sequence[Any], per_replica: Any
) -> None:
    """Calls `function(*agreed, per_replica)` where a branch may update variables.

    A strategy such as MirroredStrategy updates variables only in its cross-replica context, and a
    branch around such an update fails in a replica context: there the function is called once for
    all replicas. What belongs to a replica is then called with `on_each_replica`. The tensors
    `agreed` have the same value on all replicas.
    """
    if not tf.distribute.has_strategy():
        function(*agreed, per_replica)
        return

    def across_replicas(
        strategy: tf.distribute.Strategy, agreed: Sequence[Any], per_replica: Any
    ) -> None:
        of_first = tf.nest.map_structure(
            lambda value: strategy.experimental_local_results(value)[0], agreed
        )
        function(*of_first, per_replica)

    tf.distribute.get_replica_context().merge_call(across_replicas, args=(agreed, per_replica))


def mirrors_variables(strategy: tf.distribute.Strategy) -> bool:
    """Whether each replica of a strategy has its own copy of the variables."""
    return isinstance(strategy, _MIRRORING)


def can_update_parts() -> bool:
    """Whether each replica can update its own parts of variables by itself, in `update_parts`."""
    return mirrors_variables(tf.distribute.get_strategy()) and _thread_modes() is not None


def is_local(variable: Any) -> bool:
    """Whether a replica assigns a variable without the others: then compiled code can too."""
    value = variable.value if isinstance(variable, keras.Variable) else variable
    if not isinstance(value, tf.distribute.DistributedValues):
        return True
    is_on_read = value.synchronization == tf.VariableSynchronization.ON_READ
    return is_on_read or value.aggregation == tf.VariableAggregation.NONE


def update_parts(
    functions: Sequence[Callable[..., None]],
    variables: Iterable[keras.Variable],
    agreed: Any,
    per_replica: Any,
) -> None:
    """Calls a function for each replica, with its own parts of these variables.

    A function that XLA compiles may neither merge replicas nor write variables of all of them. Here
    it writes the variables of one device. Each function must write the same values.

    Args:
        functions: One for each replica of this process, called as `function(*agreed, per_replica)`.
        variables: All variables that the functions read or write.
        agreed: Tensors with the same values on all replicas.
        per_replica: Tensors with a value for each replica.
    """

    def across_replicas(strategy: tf.distribute.Strategy, agreed: Any, per_replica: Any) -> None:
        for index, function in enumerate(functions):

            def local(value: Any, index: int = index) -> Any:
                if value is None:
                    return None
                return strategy.experimental_local_results(value)[index]

            own, gradients = tf.nest.map_structure(local, (agreed, per_replica))
            with contextlib.ExitStack() as stack:
                stack.enter_context(tf.device(strategy.extended.worker_devices[index]))
                for variable in variables:
                    stack.enter_context(
                        instance_attribute(variable, "_value", local(variable._value))
                    )
                stack.enter_context(_without_strategy())
                function(*own, gradients)

    tf.distribute.get_replica_context().merge_call(across_replicas, args=(agreed, per_replica))


@contextlib.contextmanager
def _without_strategy() -> Iterator[None]:
    modes = _thread_modes()
    assert modes is not None
    modes.push(modes.default())
    try:
        yield
    finally:
        modes.pop()


class _ThreadModes(NamedTuple):
    """TensorFlow's functions that set the strategy of a thread."""

    push: Callable[[Any], None]
    pop: Callable[[], None]
    default: Callable[[], Any]


def _thread_modes() -> _ThreadModes | None:
    """Returns the functions that set the strategy of a thread; `None` if TensorFlow lacks any."""
    names = ("_push_per_thread_mode", "_pop_per_thread_mode", "_get_default_replica_mode")
    found = [find(f"tensorflow.python.distribute.distribute_lib:{name}") for name in names]
    return None if None in found else _ThreadModes(*found)


def on_each_replica(function: Callable[..., None], *args: Any) -> None:
    """Calls `function(*args)` on each replica, inside of `in_update_context`."""
    strategy = tf.distribute.get_strategy()
    # Under XLA on GPUs, Keras would add a collective operation on each replica, which XLA does not
    # compile in a branch. It adds none in the cross-replica context, where a single replica can
    # update. TensorFlow 2.21 has no public name.
    supports = find("tensorflow:__internal__.distribute.strategy_supports_no_merge_call")
    is_single = strategy.num_replicas_in_sync == 1
    updates_outside = is_single and supports is not None and supports()
    if tf.distribute.in_cross_replica_context() and not updates_outside:
        strategy.extended.call_for_each_replica(function, args=args)
    else:
        function(*args)


def has_several_workers(strategy: tf.distribute.Strategy) -> bool:
    """Whether the strategy has replicas in other processes."""
    replica_count = strategy.num_replicas_in_sync
    return replica_count > 1 and replica_count > len(strategy.extended.worker_devices)


def local_values(variable: keras.Variable) -> list[np.ndarray]:
    """Returns a variable's value on each replica of this process, without communication."""
    value = getattr(variable, "value", variable)
    strategy = getattr(value, "distribute_strategy", None)
    return [
        part.numpy()
        for part in (strategy.experimental_local_results(value) if strategy else [value])
    ]


def variable(
    name: str, dtype: str, shape: tuple[int, ...] = (), aggregation: str = "sum"
) -> keras.Variable:
    """Returns a zero-initialized variable with a separate value on each replica.

    `local_values` reads these. Elsewhere its value is that which `aggregation` names, `"sum"` or
    `"only_first_replica"`.
    """
    options = {"trainable": False, "autocast": False, "synchronization": "on_read"}
    return keras.Variable(
        "zeros", shape=shape, dtype=dtype, name=name, aggregation=aggregation, **options
    )
