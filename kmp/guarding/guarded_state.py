"""The state of layers, restored if an optimizer skips the step."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf
from keras import ops

from kmp.backend import keras_internals, xla
from kmp.backend.keras_internals import rnn_states, sublayers, tensorflow_variables
from kmp.backend.xla import call_if
from kmp.guarding.assignments import SavedValue, assignments_recorded, creations_recorded
from kmp.guarding.step_result import StepResult, StepWatch
from kmp.optimizer import LossScaleOptimizer

Variable: TypeAlias = keras.Variable | tf.Variable


class GuardedState:
    """The state of layers before a training step. Runs on each replica.

    Create it before the step, run the step in `changes_recorded()`, then call
    `restore_if_skipped()`.
    """

    def __init__(
        self, layers: Sequence[keras.Layer], optimizers: Sequence[LossScaleOptimizer]
    ) -> None:
        self._layers = layers
        self._optimizers = optimizers
        self._watch = StepWatch(optimizers)
        self._states = {id(each): SavedValue(each, ops.copy(each)) for each in states_of(layers)}
        self._weights = {id(each): each for each in _weights_of(layers)}

    @contextlib.contextmanager
    def changes_recorded(self) -> Iterator[None]:
        """Records, in the context, what code assigns to weights and what it creates."""
        with (
            creations_recorded() as self._created,
            assignments_recorded(self._weights.values()) as self._assigned,
        ):
            yield

    def restore_if_skipped(self) -> StepResult:
        """Restores the layers if an optimizer skipped the step, and returns what they did."""
        result = self._watch.result()
        states = [*self._states.values(), *self._created_among(states_of, self._states)]
        weights = [*self._assigned.saved, *self._created_among(_weights_of, self._weights)]

        def restore() -> None:
            assign_where(result.any_skipped, states)
            # An optimizer that was not skipped may have updated the weights.
            assign_where(result.without_update(), weights)

        if states or weights:
            call_if(result.any_skipped, restore, compiles=compiles_steps(self._optimizers))
        return result

    def _created_among(self, variables_of: Any, before: dict[int, Any]) -> list[SavedValue]:
        now = variables_of(self._layers)
        return [self._created.initial(each) for each in now if id(each) not in before]


def states_of(layers: Iterable[keras.Layer]) -> list[Variable]:
    """Returns the float variables that the forward pass of layers may assign, once each."""
    found: dict[int, Variable] = {}
    for layer in _all_layers(layers):
        # The public lists change with `trainable`, and some layers update their state even if they
        # are frozen.
        states = [*keras_internals.declared_not_trainable(layer), *rnn_states(layer)]
        states += filter(_is_assignable, tensorflow_variables(layer))
        for state in states:
            if keras.backend.is_float_dtype(keras.backend.standardize_dtype(state.dtype)):
                found[id(state)] = state
    return list(found.values())


def _is_assignable(variable: tf.Variable) -> bool:
    """Whether a variable of TensorFlow keeps its value if that is assigned to it."""
    if not variable.shape.is_fully_defined():
        return False
    is_summed = variable.aggregation == tf.VariableAggregation.SUM
    is_local = variable.synchronization == tf.VariableSynchronization.ON_READ
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    return replicas == 1 or is_local or not is_summed


def _weights_of(layers: Iterable[keras.Layer]) -> list[keras.Variable]:
    found: dict[int, keras.Variable] = {}
    for layer in _all_layers(layers):
        for weight in keras_internals.declared_trainable(layer):
            found[id(weight)] = weight
    return list(found.values())


def _all_layers(layers: Iterable[keras.Layer]) -> Iterator[keras.Layer]:
    for layer in layers:
        yield from sublayers(layer)


def assign_where(condition: Any, saved: Iterable[SavedValue]) -> None:
    """Assigns values to variables where the scalar bool tensor `condition` is true."""
    select_by = xla.masks_of(condition)
    for variable, value in saved:
        variable.assign(ops.where(select_by(variable.shape), value, variable))


def compiles_steps(optimizers: Iterable[LossScaleOptimizer]) -> bool:
    """Whether the steps of all optimizers are compiled.

    What follows such a step must not wait for the host either.
    """
    return all(optimizer.compiles_step for optimizer in optimizers)
