"""The forward and backward pass of a replica, compiled with XLA apart from the updates.

Keras compiles no step under a `tf.distribute` strategy, because replicas synchronize in the update.
All else of a `train_step` can be compiled: it is traced as one function in which `apply` defers its
update, and the updates follow that function. What uses the result of an update is another function.
"""

import re
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from kmp.backend import distribution, xla
from kmp.guarding.step_parts import parts_of, run_parts
from kmp.optimizer.deferred_updates import DeferredUpdate, updates_deferred
from kmp.utils.user_messages import one_line


class NotCompilable(Exception):  # noqa: N818 (it is no error: the step is traced without XLA then)
    """XLA cannot compile a step apart from its updates. The message says why."""


def run_compiled(step: Callable[[Any], Any], data: Any, layers: Iterable[keras.Layer]) -> Any:
    """Runs a training step on a batch, compiled but for its updates, and returns its logs.

    Args:
        step: The `train_step`.
        data: The batch of this replica.
        layers: Those that the step may call, one of which a message names.

    Raises:
        NotCompilable: If XLA cannot compile the step. It has added no operation to the graph then.
    """
    updates: list[DeferredUpdate] = []

    @tf.function(jit_compile=True, autograph=False)
    def passes(data: Any) -> Any:
        with updates_deferred() as deferred:
            logs = step(data)
        updates[:] = deferred
        return logs, [update.gradients for update in deferred]

    try:
        function = passes.get_concrete_function(data)
    except Exception as error:  # also of the user's code, which is traced again without XLA
        raise NotCompilable(_reason_of(error)) from error
    _check_devices(function)
    _check_compilable(function, layers)

    parts = parts_of(function.graph, updates)
    needed = _needed_in(function.graph)
    parts = {name: part for name, part in parts.items() if name in needed}
    if any(parts.values()):
        return run_parts(function, data, updates, parts)
    logs, gradients = function(data)
    for update, own in zip(updates, gradients, strict=True):
        update.take(own)
    return logs


def _check_devices(function: Any) -> None:
    """Raises an error if a concrete function uses a variable that its replica does not have.

    One that is created outside of `strategy.scope()`, such as a metric of a `compile` there, is on
    one device only, which compiled code of another device cannot reach.
    """
    strategy = tf.distribute.get_strategy()
    # Under some strategies it is a list of lists.
    (device,) = tf.nest.flatten(tf.distribute.get_replica_context().devices)
    has_several = strategy.num_replicas_in_sync > 1
    for variable in function.variables:
        is_of_replica = strategy.extended.variable_created_in_scope(variable)
        # The replicas decide alike: their updates meet.
        if variable.device != device or (has_several and not is_of_replica):
            raise NotCompilable(
                f"variable {variable.name!r} is on {variable.device} only, not on each replica"
            )


def _check_compilable(function: Any, layers: Iterable[keras.Layer]) -> None:
    """Raises an error if XLA cannot compile a concrete function."""
    if distribution.replica_id() > 0:
        return  # the first one stands for all
    devices = tf.distribute.get_strategy().extended.worker_devices
    try:
        xla.check_compilable(function, devices[0])
    except ValueError as error:
        names = re.findall(r"\{\{node (\S+)\}\}", str(error))
        named = (_layer_of(name, layers) for name in names)
        where = next(filter(None, named), "")
        raise NotCompilable(f"{where}{one_line(error)}") from error


def _needed_in(graph: Any) -> set[str]:
    """Returns the names of the operations whose results are used, that write, or that set an order.

    A read has no effect.
    """
    effects = [each for each in graph.control_outputs if each.type != "ReadVariableOp"]
    waiting = [*(tensor.op for tensor in graph.outputs), *effects]
    needed = {op.name for op in graph.get_operations() if op.type == "NoOp"}
    while waiting:
        operation = waiting.pop()
        if operation.name not in needed:
            needed.add(operation.name)
            waiting += [tensor.op for tensor in operation.inputs]
    return needed


def _layer_of(operation: str, layers: Iterable[keras.Layer]) -> str:
    """Returns the innermost layer in the name of an operation, for a message; empty if none."""
    scopes = operation.split("/")
    # TensorFlow appends a number to a scope that is entered again.
    scopes += [re.sub(r"_\d+$", "", scope) for scope in scopes]
    named = [layer for layer in layers if layer.name in scopes]
    return _described(named[-1:])


def _reason_of(error: Exception) -> str:
    """Returns an error on one line, with the layer in whose code it was raised."""
    called = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    # The model, whose `train_step` runs, says nothing.
    layers = [
        each
        for each in called
        if isinstance(each, keras.Layer) and not isinstance(each, keras.Model)
    ]
    return _described(layers[-1:]) + one_line(error)


def _described(layers: list[keras.Layer]) -> str:
    return "".join(f"layer {layer.name!r} ({type(layer).__name__}): " for layer in layers)
