"""Predicts without a GPU where a traced function would run.

It uses the kernels in TensorFlow's CUDA build.
"""

import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import tensorflow as tf

# No public API lists registered kernels or the functions of a graph.
from tensorflow.python.framework import kernels

# The attributes that name the functions an operation calls. These functions take the operands of
# the operation.
CALLS = {
    "PartitionedCall": ("f",),
    "StatefulPartitionedCall": ("f",),
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "While": ("cond", "body"),
    "StatelessWhile": ("cond", "body"),
}
BRANCHES = ("If", "StatelessIf")
# They stay on the host; resources and variants only refer to values.
HANDLES = (tf.resource, tf.variant, tf.string)
GPU = ("GPU", "DEFAULT")  # "DEFAULT" kernels run on any device
XLA_GPU = ("XLA_GPU_JIT",)


class Copy(NamedTuple):
    """A copy of a tensor from the device to the host, which has to wait for it.

    Args:
        operation: The type of the operation that reads the tensor on the host.
        dtype: The dtype of the tensor.
        shape: The shape of the tensor, or `None` if the trace does not contain it.
    """

    operation: str
    dtype: str
    shape: tuple | None


@dataclass
class Placement:
    """The copies to the host and the unsupported operations of a function.

    Args:
        copies: Maximum number of times each copy is made.
        without_kernel: Number of operations without a kernel for the device, by type and dtypes of
            the operands.
    """

    copies: Counter = field(default_factory=Counter)
    without_kernel: Counter = field(default_factory=Counter)


def place(function, devices=GPU, in_branches=True):
    """Tracks whether each tensor of a concrete function is in host or device memory.

    The kernels require one of the two. Without `in_branches`, no branch is taken, as in a finite
    step that is not sampled.

    TensorFlow places an operation on the GPU if it has a kernel there. Many GPU kernels take or
    return int32 in host memory. Constant folding, which may remove some operations, is not taken
    into account.
    """
    placement = Placement()
    inputs_on_host = [tensor.dtype == tf.int32 for tensor in function.graph.inputs]
    _Tracker(inputs_on_host, placement, devices, in_branches).outputs_of(function.graph)
    return placement


class _Tracker:
    """Tracks the tensors of one graph.

    Args:
        inputs_on_host: For each input of the graph, whether it is in host memory.
        placement: Gets the copies and the operations without a kernel.
        devices: The devices whose kernels are used.
        in_branches: Whether branches are taken.
    """

    def __init__(self, inputs_on_host, placement, devices, in_branches):
        self.inputs_on_host, self.placement = inputs_on_host, placement
        self.devices, self.in_branches = devices, in_branches
        self.on_host = {}

    def outputs_of(self, graph):
        """Returns for each output of the graph whether it is in host memory."""
        self._set(graph.inputs, self.inputs_on_host)
        for operation in graph.get_operations():
            if operation.type == "Placeholder":
                continue
            if operation.type in CALLS:
                outputs = self._outputs_of_call(operation)
            elif _is_placed_on_host(operation):
                for tensor in operation.inputs:
                    self._read_on_host(operation, tensor)
                outputs = [True] * len(operation.outputs)
            else:
                outputs = self._outputs_of_kernel(operation)
            self._set(operation.outputs, outputs)
        return [self.on_host[tensor.ref()] for tensor in graph.outputs]

    def _set(self, tensors, on_host):
        for tensor, is_on_host in zip(tensors, on_host, strict=True):
            self.on_host[tensor.ref()] = is_on_host

    def _read_on_host(self, operation, tensor):
        if not self.on_host[tensor.ref()] and tensor.dtype not in HANDLES:
            shape = None if tensor.shape.rank is None else tuple(tensor.shape)
            self.placement.copies[Copy(operation.type, tensor.dtype.name, shape)] += 1

    def _outputs_of_call(self, operation):
        operands = list(operation.inputs)
        placement = self.placement
        is_compiled = operation.node_def.attr["_XlaMustCompile"].b
        devices = XLA_GPU if is_compiled else self.devices
        is_branch = operation.type in BRANCHES
        if is_branch:
            self._read_on_host(operation, operands.pop(0))
            placement = placement if self.in_branches else Placement()
        arguments = [self.on_host[tensor.ref()] for tensor in operands]
        returned = []
        for graph in _called_graphs(operation):
            tracker = _Tracker(arguments, placement, devices, self.in_branches)
            returned.append(tracker.outputs_of(graph))
        results = returned if is_branch else returned[-1:]  # a loop returns its body's outputs
        return [all(flags) for flags in zip(*results, strict=True)]

    def _outputs_of_kernel(self, operation):
        if any("func" in attribute.type for attribute in operation.op_def.attr):
            raise NotImplementedError(f"Functions called by {operation.type} are not supported.")
        inputs, outputs = _host_memory_flags(operation, self.devices)
        for tensor, is_on_host in zip(operation.inputs, inputs, strict=True):
            if is_on_host:
                self._read_on_host(operation, tensor)
        if _kernel(operation, self.devices) is None and operation.type != "NoOp":
            dtypes = tuple(tensor.dtype.name for tensor in operation.inputs)
            self.placement.without_kernel[operation.type, dtypes] += 1
        return outputs


def _is_placed_on_host(operation):
    """Returns whether `tf.device` asks for the CPU; TensorFlow reads a variable where it is."""
    handles = [tensor.op for tensor in operation.inputs if tensor.dtype == tf.resource]
    return any("CPU" in each.device for each in (operation, *handles))


def _called_graphs(operation):
    names = [operation.get_attr(name).name for name in CALLS[operation.type]]
    return [operation.graph._get_function(name).graph for name in names]


def _host_memory_flags(operation, devices):
    """Returns for each operand, and for each output, whether the kernel has it in host memory."""
    kernel = _kernel(operation, devices)
    definition = operation.op_def

    def on_host(arguments):
        flags = []
        for argument in arguments:
            is_on_host = kernel is None or argument.name in kernel.host_memory_arg
            flags += [is_on_host] * _count(operation, argument)
        return flags

    return on_host(definition.input_arg), on_host(definition.output_arg)


def _count(operation, argument):
    if argument.number_attr:
        return operation.get_attr(argument.number_attr)
    return len(operation.get_attr(argument.type_list_attr)) if argument.type_list_attr else 1


def _kernel(operation, devices):
    return next(
        (kernel for kernel in _kernels(operation.type, devices) if _fits(kernel, operation)), None
    )


@functools.cache
def _kernels(operation_type, devices):
    registered = kernels.get_registered_kernels_for_op(operation_type).kernel
    return [kernel for kernel in registered if kernel.device_type in devices]


def _fits(kernel, operation):
    for constraint in kernel.constraint:
        dtypes = operation.get_attr(constraint.name)
        allowed = [tf.as_dtype(dtype) for dtype in constraint.allowed_values.list.type]
        if not all(
            dtype in allowed for dtype in (dtypes if isinstance(dtypes, list) else [dtypes])
        ):
            return False
    return True
