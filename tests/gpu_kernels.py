"""Predicts without a GPU where a traced function would run.

It uses the kernels in TensorFlow's CUDA build.
"""

import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.framework import (
    kernels,
)  # no public API lists registered kernels or the functions of a graph

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
HANDLES = (
    tf.resource,
    tf.variant,
    tf.string,
)  # they stay on the host; resources and variants only refer to values
GPU = ("GPU", "DEFAULT")  # "DEFAULT" kernels run on any device


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
    on_host = [tensor.dtype == tf.int32 for tensor in function.graph.inputs]
    _place(function.graph, on_host, placement, devices, in_branches)
    return placement


def _place(graph, inputs_on_host, placement, devices, in_branches):
    """Returns for each output whether it is in host memory."""
    on_host = {
        tensor.ref(): is_on_host
        for tensor, is_on_host in zip(graph.inputs, inputs_on_host, strict=True)
    }

    def read_on_host(operation, tensor):
        if not on_host[tensor.ref()] and tensor.dtype not in HANDLES:
            shape = None if tensor.shape.rank is None else tuple(tensor.shape)
            placement.copies[Copy(operation.type, tensor.dtype.name, shape)] += 1

    for operation in graph.get_operations():
        operands = list(operation.inputs)
        if operation.type == "Placeholder":
            continue
        if operation.type in CALLS:
            if operation.type in BRANCHES:
                read_on_host(operation, operands.pop(0))
            arguments = [on_host[tensor.ref()] for tensor in operands]
            within = Placement() if operation.type in BRANCHES and not in_branches else placement
            called = _called_graphs(operation)
            returned = [_place(each, arguments, within, devices, in_branches) for each in called]
            results = (
                returned if operation.type in BRANCHES else returned[-1:]
            )  # a loop returns its body's outputs
            outputs = [all(flags) for flags in zip(*results, strict=True)]
        elif _is_placed_on_host(operation):
            for tensor in operands:
                read_on_host(operation, tensor)
            outputs = [True] * len(operation.outputs)
        else:
            if any("func" in attribute.type for attribute in operation.op_def.attr):
                raise NotImplementedError(
                    f"Functions called by {operation.type} are not supported."
                )
            inputs, outputs = _host_memory_flags(operation, devices)
            for tensor, is_on_host in zip(operands, inputs, strict=True):
                if is_on_host:
                    read_on_host(operation, tensor)
            if _kernel(operation, devices) is None and operation.type != "NoOp":
                placement.without_kernel[
                    operation.type, tuple(tensor.dtype.name for tensor in operands)
                ] += 1
        on_host |= {
            tensor.ref(): is_on_host
            for tensor, is_on_host in zip(operation.outputs, outputs, strict=True)
        }
    return [on_host[tensor.ref()] for tensor in graph.outputs]


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
        names = [
            name for argument in arguments for name in [argument.name] * _count(operation, argument)
        ]
        return [kernel is None or name in kernel.host_memory_arg for name in names]

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
