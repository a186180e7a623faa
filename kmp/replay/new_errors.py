"""The error that a layer itself adds in its own precision, measured in a pass in float32."""

from collections.abc import Callable, Sequence, Set
from typing import Any

import tensorflow as tf

from kmp.backend.graph_formats import CAST, KEEPING_FORMAT
from kmp.backend.step_graph import StepGraph
from kmp.backend.step_places import LayerCall
from kmp.replay.layer_results import LayerResults, numeric_outputs, sample
from kmp.replay.output_errors import largest_error, samples_of
from kmp.replay.step_program import ProgramView
from kmp.utils.float_formats import DTYPES_16_BIT

_NOTED_ERROR = 0.01  # smaller ones are rounding


class NewErrors:
    """Adds the operations of layers to a program in float32 twice more.

    The first copies compute in the precision of the layer, on the inputs that the layer has in
    float32. The second ones compute in float32, on inputs that are rounded.

    Args:
        step: The step.
        calls: The calls of layers whose outputs the program has.
        path_of: Returns the path of the layer of a call.
        examples: The number of examples in the batch.
    """

    def __init__(
        self,
        step: StepGraph,
        calls: Sequence[LayerCall],
        path_of: Callable[[LayerCall | None], str],
        examples: int,
    ) -> None:
        self._step, self._path_of, self._examples = step, path_of, examples
        outermost = step.places.outermost_calls
        self._calls = [
            call
            for call in calls
            if numeric_outputs(call) and call not in outermost and call.dtype in DTYPES_16_BIT
        ]

    def add(self, view: ProgramView) -> Any:
        """Adds the operations to a program, and returns the outputs of each call.

        There are three of each: in float32, in its own precision, and with rounded inputs.
        """
        operations = self._step.graph.get_operations()
        own, rounded = _Copies("own", view), _Copies("rounded", view, rounds_inputs=True)
        exact: list[list[tf.Tensor]] = []
        for call in self._calls:
            outputs = numeric_outputs(call)
            inside = {each.name for each in operations[call.operations]}
            exact.append([view.find(each) for each in outputs])
            own.add(call, outputs, inside)
            rounded.add(call, outputs, inside)
        return [
            [[sample(each, self._examples) for each in outputs] for outputs in kinds]
            for kinds in zip(exact, own.outputs(), rounded.outputs(), strict=True)
        ]

    def read(self, measured: Any, results: LayerResults) -> None:
        """Adds what a run has measured to the results of its layers."""
        for call, kinds in zip(self._calls, measured, strict=True):
            path = self._path_of(call)
            exact, own, rounded = (samples_of(each) for each in kinds)
            error = largest_error(own, exact)
            results.new_errors[path] = max(error, results.new_errors.get(path, 0.0))
            if error > _NOTED_ERROR:
                error = largest_error(rounded, exact)
                results.input_errors[path] = max(error, results.input_errors.get(path, 0.0))


class _Copies:
    """Copies of the operations of calls, in a program that computes in float32.

    Args:
        name: A name for them.
        view: The program.
        rounds_inputs: Whether they compute in float32, with inputs that are rounded to the
            precision of the layer; else they compute in that precision.
    """

    def __init__(self, name: str, view: ProgramView, *, rounds_inputs: bool = False) -> None:
        self._name, self._view, self._rounds_inputs = name, view, rounds_inputs
        definition = view.rewritten if rounds_inputs else view.own
        self._nodes = {
            node.name: node for node in definition.node if not node.op.startswith(KEEPING_FORMAT)
        }
        self._copied = tf.compat.v1.GraphDef(versions=definition.versions)
        self._inputs: dict[str, tf.Tensor] = {}
        # The names of the copies; or an input that a call returns as it is.
        self._outputs: list[list[str | tf.Tensor]] = []

    def add(self, call: LayerCall, outputs: Sequence[tf.Tensor], inside: Set[str]) -> None:
        """Adds the operations of a call."""
        prefix = f"{self._name}_{len(self._outputs)}/"
        waiting, done = list[str](), set[str]()
        self._outputs.append([])
        for output in outputs:
            if output.op.name in inside and output.op.name in self._nodes:
                self._outputs[-1].append(prefix + output.name)
                waiting.append(output.op.name)
            else:
                self._outputs[-1].append(self._input(output.name, call.dtype))
        while waiting:
            name = waiting.pop()
            if name in done:
                continue
            done.add(name)
            node = self._copied.node.add()
            node.CopyFrom(self._nodes[name])
            node.name = prefix + name
            node.attr.pop("_class", None)  # may name another operation
            sources = [each for each in node.input if not each.startswith("^")]
            node.input[:] = [prefix + each for each in sources]
            for source in sources:
                origin = source.partition(":")[0]
                # Casts to the format of the program have no place in the step. The lists in which a
                # loop keeps values for its backward pass are made later than the call.
                is_copied = origin in inside or origin.startswith(CAST)
                if not is_copied:
                    is_copied = self._view.find_source(source)[1] == tf.variant
                if origin in self._nodes and is_copied:
                    waiting.append(origin)
                else:
                    self._inputs[prefix + source] = self._input(source, call.dtype)

    def _input(self, source: str, dtype: str) -> tf.Tensor:
        value, own_dtype = self._view.find_source(source)
        if not value.dtype.is_floating:
            return value
        if self._rounds_inputs:
            return tf.cast(tf.cast(value, dtype), value.dtype)
        return tf.cast(value, own_dtype)

    def outputs(self) -> list[list[tf.Tensor]]:
        """Imports the copies into the program, and returns the outputs of each call."""
        outputs = [each for outputs in self._outputs for each in outputs]
        names = [each for each in outputs if isinstance(each, str)]
        found = iter(
            tf.graph_util.import_graph_def(
                self._copied, self._inputs, return_elements=names, name="kmp_copies"
            )
        )
        return [
            [next(found) if isinstance(each, str) else each for each in outputs]
            for outputs in self._outputs
        ]
