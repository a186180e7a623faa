"""What a GPU would do with a traced function, told without one by the kernels of TensorFlow's CUDA build."""

import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.framework import kernels  # nothing public tells which are registered, nor a graph's functions

# The attributes that name the functions which an operation calls; its own operands are theirs.
CALLS = {
    "PartitionedCall": ("f",),
    "StatefulPartitionedCall": ("f",),
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "While": ("cond", "body"),
    "StatelessWhile": ("cond", "body"),
}
BRANCHES = ("If", "StatelessIf")
HANDLES = (tf.resource, tf.variant, tf.string)  # they stay on the host, and say where the values are
GPU = ("GPU", "DEFAULT")  # the second: kernels that any device has


class Copy(NamedTuple):
    """A tensor on the device that the host has to wait for.

    Args:
        operation: The type of the operation that needs it.
        dtype: The tensor's.
        shape: Its shape, or `None` where the trace does not tell.
    """

    operation: str
    dtype: str
    shape: tuple | None


@dataclass
class Placed:
    """What was found.

    Args:
        copies: How often each copy is made, at most.
        without_kernel: Types of the operations that the device lacks, with the dtypes of their operands.
    """

    copies: Counter = field(default_factory=Counter)
    without_kernel: Counter = field(default_factory=Counter)


def place(function, devices=GPU):
    """Follows every tensor of a concrete function through the memories that the kernels demand.

    TensorFlow puts an operation on the GPU if it has a kernel there, and many of those take or give int32 in the
    host's memory. Constant folding, which may do some of the work beforehand, is not taken into account.
    """
    found = Placed()
    _place(function.graph, [tensor.dtype == tf.int32 for tensor in function.graph.inputs], found, devices)
    return found


def _place(graph, inputs_on_host, found, devices):
    """Returns for each output whether it lies on the host."""
    on_host = {tensor.ref(): here for tensor, here in zip(graph.inputs, inputs_on_host, strict=True)}

    def demand(operation, tensor):
        if not on_host[tensor.ref()] and tensor.dtype not in HANDLES:
            shape = None if tensor.shape.rank is None else tuple(tensor.shape)
            found.copies[Copy(operation.type, tensor.dtype.name, shape)] += 1

    for operation in graph.get_operations():
        operands = list(operation.inputs)
        if operation.type == "Placeholder":
            continue
        if operation.type in CALLS:
            if operation.type in BRANCHES:
                demand(operation, operands.pop(0))
            given = [on_host[tensor.ref()] for tensor in operands]
            returned = [_place(inner, given, found, devices) for inner in _called(operation)]
            results = returned if operation.type in BRANCHES else returned[-1:]  # a loop gives what its body gives
            outputs = [all(each) for each in zip(*results, strict=True)]
        else:
            if any("func" in attribute.type for attribute in operation.op_def.attr):
                raise NotImplementedError(f"What {operation.type} calls is not followed.")
            needed, outputs = _memories(operation, devices)
            for tensor, is_needed in zip(operands, needed, strict=True):
                if is_needed:
                    demand(operation, tensor)
            if _kernel(operation, devices) is None and operation.type != "NoOp":
                found.without_kernel[operation.type, tuple(tensor.dtype.name for tensor in operands)] += 1
        on_host |= {tensor.ref(): here for tensor, here in zip(operation.outputs, outputs, strict=True)}
    return [on_host[tensor.ref()] for tensor in graph.outputs]


def _called(operation):
    names = [operation.get_attr(name).name for name in CALLS[operation.type]]
    return [operation.graph._get_function(name).graph for name in names]


def _memories(operation, devices):
    """Returns for each operand, and for each output, whether it is on the host."""
    kernel = _kernel(operation, devices)
    definition = operation.op_def

    def on_host(arguments):
        names = [name for argument in arguments for name in [argument.name] * _count(operation, argument)]
        return [kernel is None or name in kernel.host_memory_arg for name in names]

    return on_host(definition.input_arg), on_host(definition.output_arg)


def _count(operation, argument):
    if argument.number_attr:
        return operation.get_attr(argument.number_attr)
    return len(operation.get_attr(argument.type_list_attr)) if argument.type_list_attr else 1


def _kernel(operation, devices):
    return next((kernel for kernel in _kernels(operation.type, devices) if _fits(kernel, operation)), None)


@functools.cache
def _kernels(operation_type, devices):
    registered = kernels.get_registered_kernels_for_op(operation_type).kernel
    return [kernel for kernel in registered if kernel.device_type in devices]


def _fits(kernel, operation):
    for constraint in kernel.constraint:
        dtypes = operation.get_attr(constraint.name)
        allowed = [tf.as_dtype(dtype) for dtype in constraint.allowed_values.list.type]
        if not all(dtype in allowed for dtype in (dtypes if isinstance(dtypes, list) else [dtypes])):
            return False
    return True
