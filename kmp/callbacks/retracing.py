"""Finds what was traced with layers whose policy changes, and has it traced again.

A layer does not know the models that it is part of, and kmp keeps no list of all models: a repair
is rare, so it looks through the objects of the process.
"""

import gc
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from kmp.backend.keras_internals import sublayers
from kmp.backend.step_graph import StepGraph
from kmp.backend.tensorflow_internals import forget_traces, restore_traces, traces_of

Found = TypeVar("Found")


def models_with(layers: Sequence[keras.Layer]) -> list[keras.Model]:
    """Returns all models of the process that contain one of these layers."""
    ids = set(map(id, layers))
    return [
        model
        for model in _instances_of(keras.Model)
        if any(id(layer) in ids for layer in sublayers(model))
    ]


def trace_again(models: Sequence[keras.Model], proven: Sequence[StepGraph]) -> list[str]:
    """Has what was traced with weights of models traced again.

    Functions of Keras, and that of a step that was proven, when they are called next, with the
    functions in them. Others that the user calls at once: those that cannot be traced again run as
    before.

    Returns:
        The names of these.
    """
    functions = functions_with(models)
    lazy = {id(function) for step in proven for function, _ in traces_with(step, functions)}
    lazy |= {id(each) for each in functions if _module_of(each).startswith("keras.")}
    traces = {
        id(function): [each for each in traces_of(function) if not _is_inner(each.graph)]
        for function in functions
        if id(function) not in lazy
    }
    before = {id(function): forget_traces([function]) for function in functions}
    failed = []
    for function in functions:
        try:
            for trace in traces.get(id(function), ()):
                _trace(function, trace)
        except Exception:  # of the user's code, which may not take float32
            restore_traces(before[id(function)])
            failed.append(getattr(function.python_function, "__qualname__", repr(function)))
    return failed


def functions_with(models: Sequence[keras.Model]) -> list[Any]:
    """Returns the `tf.function`s, of Keras and of the user, that were traced with their weights."""
    weights = [weight.value for model in models for weight in model.weights]
    handles = {id(each.handle) for value in weights for each in getattr(value, "values", [value])}
    found = []
    for function in _instances_of(tf.types.experimental.PolymorphicFunction):
        captured = [each for trace in traces_of(function) for each in trace.captured_inputs]
        is_of_kmp = _module_of(function).startswith("kmp.")  # it calls no layer
        if not is_of_kmp and any(id(each) in handles for each in captured):
            found.append(function)
    return found


def _is_inner(graph: Any) -> bool:
    """Whether the function of a graph was called in another one, not from Python."""
    return hasattr(graph.outer_graph, "outer_graph")


def _module_of(function: Any) -> str:
    return str(getattr(getattr(function, "python_function", None), "__module__", ""))


def traces_with(step: StepGraph, functions: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Returns the function among these that has a step, with the trace; nothing if there is none.

    The outermost one, of functions that call each other.
    """
    outermost = step.graph
    while _is_inner(outermost):
        outermost = outermost.outer_graph
    traces = [(each, trace) for each in functions for trace in traces_of(each)]
    return [(each, trace) for each, trace in traces if trace.graph is outermost]


def trace_function_again(step: StepGraph, models: Sequence[keras.Model]) -> None:
    """Traces the user's `tf.function` that has a step once more. Later calls run as before.

    Raises:
        RuntimeError: If no function that was traced with weights of the models has the step.
    """
    functions = functions_with(models)
    found = traces_with(step, functions)
    if not found:
        raise RuntimeError("its step is in no `tf.function` that can be traced again")
    before = forget_traces(functions)
    try:
        _trace(*found[0])
    finally:
        restore_traces(before)


def _trace(function: Any, trace: Any) -> None:
    """Traces a function for the arguments of an earlier trace."""
    if function.input_signature is not None:
        function.get_concrete_function()
        return
    arguments, keywords = trace.structured_input_signature
    constraints = [each.type_constraint for each in trace.function_type.parameters.values()]
    values = [
        # Of a Python object, the signature has a placeholder.
        given if _is_known(given) else constraint.placeholder_value(None)
        for given, constraint in zip((*arguments, *keywords.values()), constraints, strict=True)
    ]
    named = dict(zip(keywords, values[len(arguments) :], strict=True))
    function.get_concrete_function(*values[: len(arguments)], **named)


def _is_known(argument: Any) -> bool:
    plain = (tf.TypeSpec, np.ndarray, np.generic, bool, int, float, complex, str, bytes, type(None))
    return all(isinstance(each, plain) for each in tf.nest.flatten(argument))


def _instances_of(cls: type[Found]) -> Iterator[Found]:
    matches: dict[type, bool] = {}
    for each in gc.get_objects():
        # `isinstance` asks a weak proxy for the class of an object that may be gone.
        kind = type(each)
        if kind not in matches:
            matches[kind] = issubclass(kind, cls)
        if matches[kind]:
            yield each
