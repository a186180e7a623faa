"""Finds what was traced with layers whose policy changes, and has it traced again.

A layer does not know the models that it is part of, and kmp keeps no list of all models: a repair
is rare, so it looks through the objects of the process.
"""

import gc
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from kmp.backend.keras_internals import sublayers
from kmp.backend.step_graph import StepGraph
from kmp.backend.tensorflow_internals import forget_traces, traces_of
from kmp.guarding.guarded_step import guarded_step_of

Found = TypeVar("Found")


def models_with(layers: Sequence[keras.Layer]) -> list[keras.Model]:
    """Returns all models of the process that contain one of these layers."""
    ids = set(map(id, layers))
    return [
        model
        for model in _instances_of(keras.Model)
        if any(id(layer) in ids for layer in sublayers(model))
    ]


def trace_again(models: Sequence[keras.Model]) -> None:
    """Has what was traced with weights of models traced again when it is called next."""
    for model in models:
        guard = guarded_step_of(model)
        if guard:
            guard.has_repaired_layers = True
    forget_traces(functions_with(models))


def functions_with(models: Sequence[keras.Model]) -> list[Any]:
    """Returns the `tf.function`s, of Keras and of the user, that were traced with their weights."""
    weights = [weight.value for model in models for weight in model.weights]
    handles = {id(each.handle) for value in weights for each in getattr(value, "values", [value])}
    found = []
    for function in _instances_of(tf.types.experimental.PolymorphicFunction):
        module = getattr(getattr(function, "python_function", None), "__module__", "")
        captured = [each for trace in traces_of(function) for each in trace.captured_inputs]
        is_of_kmp = str(module).startswith("kmp.")  # it calls no layer
        if not is_of_kmp and any(id(each) in handles for each in captured):
            found.append(function)
    return found


def trace_function_again(step: StepGraph, models: Sequence[keras.Model]) -> None:
    """Traces the user's `tf.function` that has a step once more, as its next call does again.

    Raises:
        RuntimeError: If no function that was traced with weights of the models has the step.
    """
    outermost = step.graph
    while hasattr(outermost.outer_graph, "outer_graph"):  # not the graph around all functions
        outermost = outermost.outer_graph
    functions = functions_with(models)
    traces = [(each, trace) for each in functions for trace in traces_of(each)]
    of_step = next(((each, trace) for each, trace in traces if trace.graph is outermost), None)
    if of_step is None:
        raise RuntimeError("its step is in no `tf.function` that can be traced again")
    function, trace = of_step
    arguments, keywords = trace.structured_input_signature
    try:
        forget_traces(functions)
        function.get_concrete_function(*arguments, **keywords)
    finally:
        forget_traces(functions)


def _instances_of(cls: type[Found]) -> Iterator[Found]:
    for each in gc.get_objects():
        # `isinstance` asks a weak proxy for the class of an object that may be gone.
        if issubclass(type(each), cls):
            yield each
