"""The state of layers, restored if an optimizer skips the step."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, TypeAlias

import keras
import tensorflow as tf
from keras import ops

from kmp.backend import distribution, keras_internals, xla
from kmp.backend.compiled_parts import in_step
from kmp.backend.keras_internals import (
    rnn_states,
    search_again,
    sublayers,
    tensorflow_variables,
)
from kmp.backend.xla import call_if
from kmp.guarding.assignments import SavedValue, assignments_recorded, creations_recorded
from kmp.guarding.step_result import StepResult, StepWatch
from kmp.optimizer import LossScaleOptimizer

Owned: TypeAlias = tuple[Any, keras.Layer | None]  # a variable, and the layer that has it


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
        self._states = {
            id(each): SavedValue(each, ops.copy(each), owner) for each, owner in states_of(layers)
        }
        self._weights = {id(each): each for each, _ in _weights_of(layers)}

    @contextlib.contextmanager
    def changes_recorded(self) -> Iterator[None]:
        """Records, in the context, what code assigns to weights and what it creates."""
        compiles = any(optimizer.jit_compile for optimizer in self._optimizers)
        with (
            in_step(compiles),
            creations_recorded() as self._created,
            assignments_recorded(self._weights.values()) as self._assigned,
        ):
            yield

    @property
    def assigned(self) -> list[Any]:
        """The weights to which code other than the optimizer assigned a value."""
        return [each.variable for each in self._assigned.saved]

    def restore_if_skipped(self) -> StepResult:
        """Restores the layers if an optimizer skipped the step, and returns what they did."""
        result = self._watch.result()
        states = [*self._states.values(), *self._created_among(states_of, self._states)]
        weights = [*self._assigned.saved, *self._created_among(_weights_of, self._weights)]

        def restore() -> None:
            _restore_where(result.any_skipped, states)
            # An optimizer that was not skipped may have updated the weights.
            _restore_where(result.without_update(), weights)

        if states or weights:
            are_local = all(distribution.is_local(each.variable) for each in (*states, *weights))
            compiles = are_local and compiles_steps(self._optimizers)
            call_if(result.any_skipped, restore, compiles)
        return result

    def _created_among(
        self, variables_of: Callable[..., Iterable[Owned]], before: dict[int, Any]
    ) -> list[SavedValue]:
        """Returns the variables that the step created, with their initial values."""
        # In a graph, Keras creates its variables outside of it, where they are not recorded.
        if tf.executing_eagerly() and not self._created.has_any:
            return []
        for layer in _all_layers(self._layers):
            search_again(layer)  # they may have taken the place of an item of a list
        new = [each for each, _ in variables_of(self._layers) if id(each) not in before]
        saved = map(self._created.initial, new)
        return [each for each in saved if each is not None]


def _restore_where(condition: Any, saved: Iterable[SavedValue]) -> None:
    """Assigns the values where the condition is true.

    Where variables of an owner were not finite before, they and the others of it keep what is
    finite now: a sum of gradients that is Inf once would be so forever, whatever the program
    assigns after a skipped step.
    """
    for owner, group in groupby(saved, key=lambda each: each.owner):
        values = list(group)
        if owner is None:
            assign_where(condition, values)
            continue
        finite = [_is_finite(each.value) for each in values]
        all_finite = functools.reduce(ops.logical_and, finite)
        for each, was_finite in zip(values, finite, strict=True):
            is_lost = ops.logical_and(was_finite, ops.logical_not(_is_finite(each.variable)))
            restores = ops.logical_and(condition, ops.logical_or(all_finite, is_lost))
            assign_where(restores, [each])


def _is_finite(value: Any) -> Any:
    return ops.all(ops.isfinite(value))


def states_of(layers: Iterable[keras.Layer]) -> list[Owned]:
    """Returns the float variables that the forward pass of layers may assign, once each."""
    found: dict[int, Owned] = {}
    for layer in _all_layers(layers):
        # The public lists change with `trainable`, and some layers update their state even if they
        # are frozen.
        states = [*keras_internals.declared_not_trainable(layer), *rnn_states(layer)]
        states += filter(_is_assignable, tensorflow_variables(layer))
        for state in states:
            if keras.backend.is_float_dtype(keras.backend.standardize_dtype(state.dtype)):
                found[id(state)] = state, _owner_of(layer)
    return list(found.values())


def _owner_of(layer: keras.Layer) -> keras.Layer | None:
    """Returns a layer whose code is the user's; `None` of others, which add up no gradients.

    Compiled code would compute in each step whether the statistics of all of them are finite.
    """
    package = type(layer).__module__.partition(".")[0]
    return None if package in ("keras", "keras_hub", "kmp") else layer


def _is_assignable(variable: tf.Variable) -> bool:
    """Whether a variable of TensorFlow keeps its value if that is assigned to it."""
    if not variable.shape.is_fully_defined():
        return False
    is_summed = variable.aggregation == tf.VariableAggregation.SUM
    is_local = variable.synchronization == tf.VariableSynchronization.ON_READ
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    return replicas == 1 or is_local or not is_summed


def _weights_of(layers: Iterable[keras.Layer]) -> list[Owned]:
    found: dict[int, Owned] = {}
    for layer in _all_layers(layers):
        for weight in keras_internals.declared_trainable(layer):
            found[id(weight)] = weight, _owner_of(layer)
    return list(found.values())


def _all_layers(layers: Iterable[keras.Layer]) -> Iterator[keras.Layer]:
    for layer in layers:
        yield from sublayers(layer)


def assign_where(condition: Any, saved: Iterable[SavedValue]) -> None:
    """Assigns values to variables where the scalar bool tensor `condition` is true."""
    select_by = xla.masks_of(condition)
    for variable, value, _ in saved:
        variable.assign(ops.where(select_by(variable.shape), value, variable))


def compiles_steps(optimizers: Iterable[LossScaleOptimizer]) -> bool:
    """Whether the steps of all optimizers are compiled.

    What follows such a step must not wait for the host either.
    """
    return all(optimizer.compiles_step for optimizer in optimizers)
