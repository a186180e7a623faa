"""One decision on all replicas and workers, and variables that each of them has for itself."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf


def agree(*values: tf.Tensor) -> Sequence[tf.Tensor]:
    """Returns the sums of `values` over all replicas and workers; they are float32, which every device can send.

    Raises:
        ValueError: Outside a replica context.
    """
    context = tf.distribute.get_replica_context()
    if context is None:
        raise ValueError("`apply` must be called in a replica context, as in `strategy.run(step)`.")
    if context.num_replicas_in_sync == 1:
        return values
    return context.all_reduce(tf.distribute.ReduceOp.SUM, list(values))


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


def variable(name: str, dtype: str, shape: tuple[int, ...] = (), aggregation: str = "sum") -> keras.Variable:
    """Returns a zero variable that each replica writes for itself; outside the step one reads the sum of all.

    Args:
        name: The variable's name.
        dtype: The variable's dtype.
        shape: The variable's shape.
        aggregation: `"only_first_replica"` to read the first replica's value in place of the sum.
    """
    options = {"trainable": False, "autocast": False, "synchronization": "on_read"}
    return keras.Variable("zeros", shape=shape, dtype=dtype, name=name, aggregation=aggregation, **options)
