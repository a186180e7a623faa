"""The graph of a step that does not train as a graph, or of the inference of a model."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from kmp.backend.attributes import attributes_restored
from kmp.backend.inventory import Reason
from kmp.backend.keras_internals import sublayers
from kmp.backend.patching import patches
from kmp.backend.step_graph import StepGraph, recording
from kmp.backend.tensorflow_internals import functions_run_eagerly
from kmp.backend.thread_overrides import own_method
from kmp.optimizer import LossScaleOptimizer
from kmp.utils import user_messages
from kmp.utils.context_values import context_value


def traced_step(
    run: Callable[[Any], Any],
    data: Any,
    layers: Iterable[keras.Layer],
    optimizers: Iterable[keras.optimizers.Optimizer] = (),
    operations: Iterable[keras.Operation] = (),
) -> StepGraph:
    """Traces a step once, up to the gradients; the code of the user runs in Python.

    Attributes that it sets in layers and optimizers, and what it adds to lists there, are restored.

    Args:
        run: The step. What it assigns it assigns in a graph that never runs.
        data: A batch, which tells its structure.
        layers: The layers whose attributes the step may set.
        optimizers: The optimizers of the step.
        operations: Operations of the graph of a model whose calls are recorded as those of layers
            are.
    """
    found: list[StepGraph] = []

    def trace(data: Any) -> None:
        with recording(data, only_gradients=True) as step, contextlib.ExitStack() as stack:
            assert step is not None
            for operation in operations:
                stack.enter_context(own_method(operation, "call", _recorded(step, operation)))
            run(data)
            found[:] = [step.with_gradients or step]

    with (
        attributes_restored(objects_of_step(layers, optimizers)),
        patches.holding(Reason.REPLAY),
        context_value(user_messages.is_quiet, True),
    ):
        errors = []
        # Code of the user may need the number of rows, or autograph in a `tf.function` of its own.
        for spec_of, inline in (
            (_spec_of_any_rows, functions_run_eagerly),
            (_spec_of, functions_run_eagerly),
            (_spec_of_any_rows, contextlib.nullcontext),
        ):
            specs = keras.tree.map_structure(spec_of, data)
            try:
                with inline():
                    tf.function(trace, autograph=False).get_concrete_function(specs)
                return found[0]
            except Exception as error:
                errors.append(error)
        raise errors[0]


def _recorded(step: StepGraph, operation: keras.Operation) -> Callable[..., Any]:
    """Returns what makes the call of an operation one that records itself."""

    def recorded(call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded_call(*args: Any, **kwargs: Any) -> Any:
            begin = step.graph.version
            outputs = call(*args, **kwargs)
            step.add_call(operation, begin, outputs)
            return outputs

        return recorded_call

    return recorded


def objects_of_step(
    layers: Iterable[keras.Layer], optimizers: Iterable[keras.optimizers.Optimizer]
) -> list[Any]:
    """Returns the objects whose attributes the trace of a step sets."""
    inner = [each for layer in layers for each in sublayers(layer)]
    scaling = [each for each in optimizers if isinstance(each, LossScaleOptimizer)]
    monitors = [each.step_monitor for each in scaling]
    return [*inner, *optimizers, *monitors, *(each.stage for each in monitors)]


def _spec_of(value: Any) -> tf.TensorSpec | None:
    if value is None:  # an optional input
        return None
    tensor = tf.convert_to_tensor(value)
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _spec_of_any_rows(value: Any) -> tf.TensorSpec | None:
    spec = _spec_of(value)
    if spec is None:
        return None
    return tf.TensorSpec([None, *spec.shape[1:]] if spec.shape.rank else [], spec.dtype)
