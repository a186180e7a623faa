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
    """Has the functions of models, and the user's, traced again when they are called next."""
    forget_traces(functions_of_user(models))
    for model in models:
        guard = guarded_step_of(model)
        if guard:
            guard.has_repaired_layers = True
        # Not `None` in their place: another thread may be in the middle of `fit` or `predict`.
        if model.train_function is not None:
            model.make_train_function(force=True)
        if model.test_function is not None:
            model.make_test_function(force=True)
        if model.predict_function is not None:
            model.make_predict_function(force=True)


def functions_of_user(models: Sequence[keras.Model]) -> list[Any]:
    """Returns the user's `tf.function`s that were traced with weights of models."""
    weights = [weight.value for model in models for weight in model.weights]
    handles = {id(value.handle) for value in weights if not _is_distributed(value)}
    found = []
    for function in _instances_of(tf.types.experimental.PolymorphicFunction):
        python_function = getattr(function, "python_function", None)
        module = str(getattr(python_function, "__module__", ""))
        if module.startswith(("keras.", "kmp.")):
            continue
        captured = [each for trace in traces_of(function) for each in trace.captured_inputs]
        if any(id(each) in handles for each in captured):
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
    functions = functions_of_user(models)
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


def _is_distributed(variable: tf.Variable) -> bool:
    """Whether a variable has one component for each replica, and no handle of its own."""
    return isinstance(variable, tf.distribute.DistributedValues)


def _instances_of(cls: type[Found]) -> Iterator[Found]:
    for each in gc.get_objects():
        # `isinstance` asks a weak proxy for the class of an object that may be gone.
        if issubclass(type(each), cls):
            yield each
