"""One decision on all replicas and workers, and variables that each of them has for itself."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf


def agree(value: tf.Tensor) -> tf.Tensor:
    """Returns the sum of `value` over all replicas and workers; it is float32, which every device can send.

    Raises:
        ValueError: Outside a replica context.
    """
    context = tf.distribute.get_replica_context()
    if context is None:
        raise ValueError("`apply` must be called in a replica context, as in `strategy.run(step)`.")
    if context.num_replicas_in_sync == 1:
        return value
    # The sum goes to the device of what is sent; one that was read from a variable may name none, a copy of it does.
    return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(value))


def refuse_to_build_in_a_step() -> None:
    """Raises an error where TensorFlow would fail on the variables that a step of several replicas makes.

    Raises:
        ValueError: In a `tf.function` on several replicas.
    """
    if tf.distribute.get_strategy().num_replicas_in_sync > 1 and not tf.executing_eagerly():
        raise ValueError(
            "On several replicas the optimizer must be built before the step: call "
            "`optimizer.build(model.trainable_variables)` under `strategy.scope()`."
        )


def once(function: Callable[..., None], agreed: Sequence[tf.Tensor], per_replica: Sequence[Any]) -> None:
    """Calls `function(on_each, *agreed, *per_replica)` where a branch may update variables.

    Args:
        function: Its first argument, `on_each(f, *args)`, calls `f` on each replica.
        agreed: Tensors that are the same on all replicas.
        per_replica: Arguments that each replica has of its own.
    """
    # No public name: a strategy such as MirroredStrategy updates variables only from its cross-replica context, and a
    # branch around that fails in a replica's own.
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        function(lambda f, *args: f(*args), *agreed, *per_replica)
        return

    def across(strategy: tf.distribute.Strategy, agreed: Sequence[Any], per_replica: Sequence[Any]) -> None:
        same = [strategy.experimental_local_results(value)[0] for value in agreed]
        extended = strategy.extended
        function(lambda f, *args: extended.call_for_each_replica(f, args=args), *same, *per_replica)

    tf.distribute.get_replica_context().merge_call(across, args=(agreed, per_replica))


def has_several_workers(strategy: tf.distribute.Strategy) -> bool:
    """Whether replicas run in other processes too."""
    replicas = strategy.num_replicas_in_sync
    return replicas > 1 and replicas > len(strategy.extended.worker_devices)


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process is the one of several workers that writes files."""
    resolver = strategy.cluster_resolver
    if resolver is None or not resolver.task_type:
        return True
    has_chief = "chief" in resolver.cluster_spec().as_dict()
    return resolver.task_type == "chief" or (not has_chief and (resolver.task_type, resolver.task_id) == ("worker", 0))


def total(strategy: tf.distribute.Strategy, number: float) -> float:
    """Returns the sum of a number over all workers, once all of them have called this."""
    if not has_several_workers(strategy):
        return number
    here = len(strategy.extended.worker_devices)

    @tf.function
    def add() -> Any:
        share = tf.constant(number / here)
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(lambda: tf.identity(share)), axis=None)

    return float(add())


def local_values(variable: keras.Variable) -> list[np.ndarray]:
    """Returns what each of this process' replicas holds: no other worker has to take part in the reading."""
    value = variable.value
    strategy = getattr(value, "distribute_strategy", None)
    parts = strategy.experimental_local_results(value) if strategy else [value]
    return [part.numpy() for part in parts]


def variable(name: str, dtype: str, shape: tuple[int, ...] = (), aggregation: str = "sum") -> keras.Variable:
    """Returns a zero variable that each replica writes for itself; outside the step, see `local_values`.

    Args:
        name: The variable's name.
        dtype: The variable's dtype.
        shape: The variable's shape.
        aggregation: `"only_first_replica"` to read the first replica's value in place of the sum.
    """
    options = {"trainable": False, "autocast": False, "synchronization": "on_read"}
    return keras.Variable("zeros", shape=shape, dtype=dtype, name=name, aggregation=aggregation, **options)
