"""The forward and backward pass of a training step, cut out of the graph that trains.

The program gets a batch and a loss scale, and returns losses, gradients and the outputs of layers.
It has the operations of the training step, up to the gradients that reach the optimizer; if it is
asked for another float format, they compute in that one. It changes nothing: what the step assigns,
it assigns to copies of the variables. No code of the user runs.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kmp.backend.graph_formats import (
    rewritten,
    with_fixed_numbers,
    with_operations,
    with_own_functions,
)
from kmp.backend.state_rollback import handle_dtype, unrestorable_in
from kmp.backend.step_graph import StepGraph
from kmp.backend.step_places import LayerCall
from kmp.backend.tensorflow_internals import functions_added
from kmp.utils.float_formats import DTYPES_16_BIT

# What may be done with a variable that is not assigned.
_READS = ("ReadVariableOp", "ResourceGather", "VariableShape")
# What may assign variables.
_WRITES = "Assign", "Case", "If", "PartitionedCall", "Resource", "StatefulPartitionedCall", "While"
# What a pass leaves out.
_SILENT = ("PrintV2",)
_UNOPTIMIZED = tf.compat.v1.ConfigProto()
_UNOPTIMIZED.graph_options.rewrite_options.disable_meta_optimizer = True


class ProgramView(NamedTuple):
    """A program while it is made, for what measures something in it.

    Attributes:
        find: Returns the tensor that stands for one of the graph of the step.
        own: The `GraphDef` in the formats of the training.
        rewritten: That of the program.
        step: The step.
    """

    find: Callable[[tf.Tensor], tf.Tensor]
    own: Any
    rewritten: Any
    step: StepGraph

    def find_source(self, source: str) -> tuple[tf.Tensor, tf.DType]:
        """Returns the tensor of an input of an operation, and its dtype in the step."""
        name = source if ":" in source else f"{source}:0"
        try:
            tensor = self.step.graph.get_tensor_by_name(name)
        except KeyError:  # one that kmp has added
            found = tf.compat.v1.get_default_graph().get_tensor_by_name(name)
            return found, found.dtype
        return self.find(tensor), tensor.dtype

    @property
    def operations(self) -> set[str]:
        """The names of the operations of the program."""
        return {node.name for node in self.rewritten.node}


class ProgramResult(NamedTuple):
    """What a program returned.

    Attributes:
        losses: The losses, before they are scaled.
        applied: The gradients that the optimizers get, in the order of `StepGraph.applied`, by the
            `id` of the variable: tensors or `tf.IndexedSlices`.
        measured: What `measure` of the program returned.
    """

    losses: list[tf.Tensor]
    applied: list[dict[int, Any]]
    measured: Any

    @property
    def gradients(self) -> dict[int, Any]:
        """The last gradient of each variable."""
        return {key: each for applied in self.applied for key, each in applied.items()}


class _Copy(NamedTuple):
    """The handle of a variable, and a variable that the program assigns in its place."""

    handle: tf.Tensor
    variable: tf.Variable


@dataclass(frozen=True, eq=False)
class StepProgram:
    """A training step up to the gradients; see `step_program`."""

    _step: StepGraph
    _function: Any
    _copies: list[_Copy]
    _is_optimized: bool

    def __call__(
        self,
        data: Any,
        loss_scale: float = 1.0,
        states: Mapping[int, Any] | None = None,
    ) -> ProgramResult:
        """Runs the program.

        Args:
            data: A batch of the structure and dtypes of those of the training.
            loss_scale: The loss scale.
            states: The values that variables have at the beginning, by the `id` of their handle;
                by default their values now.
        """
        states = states or {}
        for handle, variable in self._copies:
            value = states.get(id(handle))
            if value is None:
                value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=handle_dtype(handle))
            variable.assign(tf.cast(value, variable.dtype))
        losses, gradients, measured = self._run(
            [*_tensors_of(data), tf.constant(loss_scale, tf.float32)]
        )
        remaining = iter(gradients)
        applied = [
            {
                id(variable): next(remaining)
                for gradient, variable in zip(each.gradients, each.variables, strict=True)
                if gradient is not None
            }
            for each in (self._step.applied if gradients else ())
        ]
        return ProgramResult(losses, applied, measured)

    def _run(self, arguments: Sequence[tf.Tensor]) -> Any:
        function = self._function
        if self._is_optimized:
            return function(*arguments)
        # A call of the same function that TensorFlow does not optimize before it runs.
        results = tf.raw_ops.StatefulPartitionedCall(
            args=[*map(tf.convert_to_tensor, arguments), *function.captured_inputs],
            Tout=[each.dtype for each in function.outputs],
            f=function,
            config_proto=_UNOPTIMIZED.SerializeToString(),
        )
        structure = function.structured_outputs
        return tf.nest.pack_sequence_as(structure, results, expand_composites=True)

    def assigned(self, variable: keras.Variable | tf.Variable) -> tf.Tensor | None:
        """Returns the value of a variable after the last run; `None` if a run assigns it none."""
        inner: Any = variable.value if isinstance(variable, keras.Variable) else variable
        handle = inner.handle
        found = next((copy for copy in self._copies if copy.handle is handle), None)
        return None if found is None else tf.convert_to_tensor(found.variable)


@dataclass
class StepPrograms:
    """The programs of a training step, kept for all batches of a training.

    Attributes:
        made: The programs with what measures in them, by what distinguishes them.
        rows: The most examples of a batch: XLA compiles a program for each number.
        examples: The number of examples of the first batch, from which follows which values of
            outputs programs sample.
        seconds: How long it took to make and first run those that run as the training does.
    """

    made: dict[Any, Any] = field(default_factory=dict)
    rows: int = 0
    examples: int = 0
    seconds: float = 0.0


def step_program(
    step: StepGraph,
    dtype: str | None = None,
    only: Iterable[LayerCall] | None = None,
    variables: Collection[int] = (),
    *,
    tensors: Iterable[tf.Tensor] = (),
    measure: Callable[[ProgramView], Any] = lambda view: [],
    states: Collection[int] = (),
    has_backward: bool = True,
    as_trained: bool = False,
    constants: Mapping[str, np.ndarray] | None = None,
) -> StepProgram:
    """Makes a program of a training step.

    Args:
        step: The step.
        dtype: The float format in which it computes what the step computes in 16 bits; by default
            none is changed.
        only: The calls of layers that compute in this format, with their backward passes; by
            default all of the step.
        variables: The `id`s of the handles of variables that are in this format then, if the step
            assigns them.
        tensors: What it computes in addition to losses and gradients.
        measure: Adds operations to the program, and returns tensors, which the program returns.
        states: The `id`s of the handles of variables that it assigns, also after the update.
        has_backward: Whether it computes losses and gradients.
        as_trained: Whether TensorFlow optimizes it, and XLA compiles it if that compiles the step.
            Both take more time than a few runs save.
        constants: Values in this format in place of constants in 16 bits, by the name of the
            operation.

    Raises:
        RuntimeError: If the step changes what is not in a variable, such as a file; or if it
            computes its loss or gradients in a function or a branch, so that they are not recorded.
        NotRewritable: If it draws random numbers that no seed repeats.
    """
    graph = step.graph
    _check_step(step, has_backward)

    # What it returns, and what it gets in place of operations of the step.
    fetched: dict[str, list[Any]] = {"losses": [], "gradients": []}
    if has_backward:
        fetched["losses"] = [each.loss for each in step.losses]
        fetched["gradients"] = [
            gradient
            for applied in step.applied
            for gradient in applied.gradients
            if gradient is not None
        ]
    wanted = [*tf.nest.flatten(fetched, expand_composites=True), *tensors]
    given = _tensors_of(step.data)
    seeds = step.seeds  # without a loss scale, as in bfloat16, the backward pass begins with it
    scales = [each.scale for each in step.scales]
    replaced = {each.op.name for each in (*graph.inputs, *given, *scales, *seeds)}

    # The operations that it needs, as they are in the training.
    names = [*(each.op.name for each in wanted), *_writes_of(step, states)]
    later = {each.name for each in graph.get_operations()[step.position :]} - set(names)
    definition = _part_of(graph.as_graph_def(), names, replaced, not_waited_for=later)
    own = definition = with_fixed_numbers(with_own_functions(definition))
    used = _used_by(definition)
    captured, copies = _captured(graph, used)

    # The same in another format, with copies of variables and constants that hold more.
    if dtype is not None:
        chosen_variables = None if only is None else variables
        recast = _recast_copies(copies, captured, definition, dtype, chosen_variables)
        chosen = None if only is None else step.places.operations_with(only, recast)
        constants = constants or {}
        changed = [name for name in captured if _operation_of(name) in constants]
        captured |= {name: tf.constant(constants[_operation_of(name)], dtype) for name in changed}
        definition = rewritten(
            definition,
            graph,
            dtype,
            {**step.constants, **constants},
            chosen,
            recast.union(map(_operation_of, changed)),
            step.places.following_casts,
        )

    def compute(*arguments: tf.Tensor) -> Any:
        current: Any = tf.compat.v1.get_default_graph()
        *data, loss_scale = arguments
        inputs = {tensor.name: value for tensor, value in zip(given, data, strict=True)}
        inputs |= {scale.name: loss_scale for scale in scales}
        for seed in seeds:
            is_rewritten = dtype and seed.dtype.name in DTYPES_16_BIT
            scale = tf.cast(loss_scale, dtype if is_rewritten else seed.dtype)
            inputs[seed.name] = tf.fill(seed.shape, scale)
        inputs |= {name: current.capture(value) for name, value in captured.items()}
        known = {name: each for name, each in inputs.items() if name.partition(":")[0] in used}
        tf.graph_util.import_graph_def(definition, known, name="")

        def find(tensor: tf.Tensor) -> tf.Tensor:
            name = tensor.name
            return inputs[name] if name in inputs else current.get_tensor_by_name(name)

        found = tf.nest.map_structure(find, fetched, expand_composites=True)
        return (
            found["losses"],
            found["gradients"],
            measure(ProgramView(find, own, definition, step)),
        )

    # TensorFlow makes a function of it.
    functions = functions_added(definition)
    specs = [tf.TensorSpec(each.shape, each.dtype) for each in given]
    is_compiled = as_trained and step.is_compiled
    traced = tf.function(compute, autograph=False, jit_compile=is_compiled)
    function = traced.get_concrete_function(*specs, tf.TensorSpec([], tf.float32))
    program = StepProgram(step, function, copies, as_trained)
    weakref.finalize(program, functions.close)
    return program


def _writes_of(step: StepGraph, states: Collection[int]) -> list[str]:
    """Returns the names of the operations that assign variables.

    After the update they are those of these states only, such as an average of weights, which does
    not wait for the update in a program.
    """
    graph = step.graph
    operations = graph.get_operations()
    before = {each.name for each in operations[: step.position]}
    of_step = [
        each.name
        for each in graph.control_outputs
        if each.name in before and each.type.startswith(_WRITES)
    ]
    handles = {id(inner) for outer, inner in graph.captures if id(outermost(outer)) in states}
    after_update = [
        each.name
        for each in operations[step.position : step.end]
        if each.type.startswith("Assign") and id(each.inputs[0]) in handles
    ]
    return [*of_step, *after_update]


def _used_by(definition: Any) -> dict[str, bool]:
    """Returns whether an operation is only read, by the names of those that others use."""
    used: dict[str, bool] = {}
    for node in definition.node:
        for source in node.input:
            name = source.partition(":")[0]
            used[name] = used.get(name, True) and node.op.startswith(_READS)
    return used


def _captured(graph: Any, used: Mapping[str, bool]) -> tuple[dict[str, Any], list[_Copy]]:
    """Returns what a program captures in place of what a graph does, and copies of variables.

    What it captures is by the name in the graph. The copies are those of the variables that are not
    only read.
    """
    captured, copies = {}, []
    for outer, inner in graph.captures:
        if inner.op.name not in used:
            continue
        value = outermost(outer)
        dtype = handle_dtype(value)
        if dtype and not used[inner.op.name]:
            with tf.device(value.device):
                read = tf.raw_ops.ReadVariableOp(resource=value, dtype=dtype)
                copies.append(_Copy(value, tf.Variable(read, trainable=False)))
            value = copies[-1].variable.handle
        captured[inner.name] = value
    return captured, copies


def _recast_copies(
    copies: list[_Copy],
    captured: dict[str, Any],
    definition: Any,
    dtype: str,
    variables: Collection[int] | None,
) -> set[str]:
    """Puts copies in a format in place of those in 16 bits, or of those with these handles.

    Variables that a function of the step uses keep theirs.

    Returns:
        The names of the operations that stand for their handles in the graph.
    """
    in_functions = {
        _operation_of(source)
        for node in definition.node
        if not node.op.startswith((*_READS, "Assign"))
        for source in node.input
    }
    found = set()
    for index, (handle, variable) in enumerate(copies):
        is_wanted = variables is None or id(handle) in variables
        if not is_wanted or variable.dtype.name not in DTYPES_16_BIT:
            continue
        (name,) = (key for key, each in captured.items() if each is variable.handle)
        if _operation_of(name) in in_functions:
            continue
        with tf.device(variable.device):
            recast = tf.Variable(tf.cast(variable, dtype), trainable=False)
        copies[index] = _Copy(handle, recast)
        captured[name] = recast.handle
        found.add(_operation_of(name))
    return found


def _check_step(step: StepGraph, has_backward: bool) -> None:
    """Raises an error if a program of a step would change something or lack a part of the step."""
    reason = unrestorable_in(step.graph)
    if reason:
        raise RuntimeError(f"a pass would change {reason}")
    if not has_backward:
        return
    if not step.calls and not step.applied:
        raise RuntimeError("the step is in a function that was traced before")
    if not step.is_complete or any(each.losses for each in step.functions.values()):
        raise RuntimeError("the step scales a loss, or computes gradients, in a function or branch")
    scaling = [each.optimizer for each in step.applied]
    if scaling and not step.losses and any(each.rule.scales_loss for each in scaling):
        raise RuntimeError("the training step does not pass its loss to scale_loss")
    for applied in step.applied:
        gradients = [each for each in applied.gradients if each is not None]
        if not all(map(step.has, tf.nest.flatten(gradients, expand_composites=True))):
            raise RuntimeError("the step applies gradients that it does not compute")


def _part_of(
    definition: Any,
    wanted: Sequence[str],
    replaced: Collection[str],
    not_waited_for: Collection[str] = (),
) -> Any:
    """Returns the operations that these need, without those that a given value replaces."""
    nodes = {node.name: node for node in definition.node}
    needed: set[str] = set()
    waiting = [*wanted]
    while waiting:
        name = waiting.pop()
        if name in needed or name in replaced or nodes[name].op in _SILENT:
            continue
        needed.add(name)
        waiting += [
            _operation_of(source)
            for source in nodes[name].input
            if not (source.startswith("^") and source[1:] in not_waited_for)
        ]
    return with_operations(definition, needed)


def _tensors_of(data: Any) -> list[Any]:
    """Returns the tensors of a batch, which may have `None` in place of targets or weights."""
    return [each for each in tf.nest.flatten(data, expand_composites=True) if each is not None]


def _operation_of(source: str) -> str:
    return source.lstrip("^").partition(":")[0]


def outermost(value: Any) -> Any:
    """Returns the tensor that a function captures, followed through the functions around it."""
    while tf.is_symbolic_tensor(value):
        outside = (outer for outer, inner in value.graph.captures if inner is value)
        found = next(outside, None)
        if found is None:
            raise RuntimeError(f"the step uses a tensor of the code around it: {value.name}")
        value = found
    return value
