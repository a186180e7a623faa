"""The transpositions that TensorFlow adds to a graph on a GPU, found without a GPU.

TensorFlow adds them in two places:

- Its graph optimizer, Grappler, computes convolutions, pooling and fused normalization in NHWC if
  half or more of the Conv2Ds of a graph have 16 bits, else in NCHW, on a GPU with Tensor Cores. It
  transposes what has the other layout. Here it optimizes the graph for a GPU that is described.
- The kernel of a fused batch normalization that trains computes in NCHW. It transposes NHWC inside:
  the input and the output in the forward pass, both inputs and the output in the backward pass.
  cuDNN's persistent kernel, for 16 bits only, needs no transposition. TensorFlow uses it with
  TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT=1. Source: `fast_nhwc_batch_norm` in
  tensorflow/core/kernels/fused_batch_norm_op.cc.
"""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from kmp.backend.private_names import find
from kmp.utils.float_formats import FORMATS_16_BIT

_DEVICE = "/job:localhost/replica:0/task:0/device:{}:0"
# An H100. The optimizer asks for the architecture: from 7.0 on, a GPU has Tensor Cores.
_GPU = {"architecture": "9.0", "cuda": "12050", "cudnn": "9000"}
_CHANNELS_LAST = ("NHWC", "NDHWC")


class GpuLayout(NamedTuple):
    """What the layout optimizer makes of a graph.

    Args:
        formats: The data formats of operations, by name.
        transposed: The tensors that it transposes, by the name of the new operation. It begins with
            the name of the operation for which the tensor is transposed.
    """

    formats: Mapping[str, str]
    transposed: Mapping[str, tf.Tensor]


def layout_on_gpu(graph: tf.Graph) -> GpuLayout:
    """Returns the data formats and the transpositions of a graph on a GPU."""
    graph_def = graph.as_graph_def(add_shapes=True)
    before = _formats(graph_def)
    optimized = _optimized(graph, graph_def) if before else None
    if optimized is None:
        return GpuLayout(before, {})
    originals = {op.name: op for op in graph.get_operations()}
    nodes = {node.name: node for node in optimized.node}
    transposed = {}
    for node in optimized.node:
        if node.op == "Transpose" and node.name not in originals:
            source, index = _source(node.input[0])
            while source not in originals:  # a new operation, which keeps the size
                source, index = _source(nodes[source].input[0])
            transposed[node.name] = originals[source].outputs[index]
    return GpuLayout(_formats(optimized), transposed)


def _formats(graph_def: Any) -> dict[str, str]:
    return {
        node.name: node.attr["data_format"].s.decode()
        for node in graph_def.node
        if "data_format" in node.attr
    }


def _source(name: str) -> tuple[str, int]:
    """Returns the operation of a tensor as a `GraphDef` names it, and the number of the output."""
    operation, _, index = name.partition(":")
    return operation, int(index or 0)


def _optimized(graph: tf.Graph, graph_def: Any) -> Any:
    """Returns the graph as the layout optimizer leaves it; `None` if there is no such optimizer.

    TensorFlow 2.21 has no public name for an optimization without a session.
    """
    is_enabled = tf.config.optimizer.get_experimental_options().get("layout_optimizer", True)
    optimize = find("tensorflow.python.grappler.tf_optimizer:OptimizeGraph")
    cluster_of = find("tensorflow.python.grappler.cluster:Cluster")
    named_device = find("tensorflow.core.protobuf.device_properties_pb2:NamedDevice")
    if not is_enabled or None in (optimize, cluster_of, named_device):
        return None
    gpu, cpu = (named_device(name=_DEVICE.format(kind)) for kind in ("GPU", "CPU"))
    gpu.properties.type, cpu.properties.type = "GPU", "CPU"
    gpu.properties.environment.update(_GPU)

    meta_graph = tf.compat.v1.MetaGraphDef(graph_def=graph_def)
    for node in meta_graph.graph_def.node:
        node.device = gpu.name
    fetched = [tensor.op.name for tensor in graph.outputs]
    fetched += [op.name for op in graph.control_outputs]
    meta_graph.collection_def["train_op"].node_list.value.extend(fetched)

    config = tf.compat.v1.ConfigProto()
    rewriting = config.graph_options.rewrite_options
    rewriting.optimizers.append("layout")
    rewriting.meta_optimizer_iterations = rewriting.ONE
    rewriting.min_graph_nodes = -1  # a small graph too
    return optimize(config, meta_graph, verbose=False, cluster=cluster_of(devices=[gpu, cpu]))


def transposed_inside(op: tf.Operation, data_format: str | None) -> list[tf.Tensor]:
    """Returns the tensors that the kernel of an operation transposes.

    Args:
        op: Any operation.
        data_format: Its data format, as the layout optimizer leaves it.
    """
    is_channels_last = data_format in _CHANNELS_LAST
    if not (is_channels_last and is_fused_normalization(op) and op.get_attr("is_training")):
        return []
    # The persistent kernel transposes nothing. TensorFlow reads the variable in the same way.
    setting = os.environ.get("TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT", "")
    has_persistent_kernel = setting.lower() in ("1", "true")
    is_16_bit = op.inputs[0].dtype.name in FORMATS_16_BIT
    if has_persistent_kernel and is_16_bit and op.type.endswith("V3"):
        return []
    is_gradient = "Grad" in op.type
    return [*op.inputs[: 2 if is_gradient else 1], op.outputs[0]]


def is_fused_normalization(op: tf.Operation) -> bool:
    """Whether an operation is TensorFlow's fused batch normalization, or its gradient."""
    return op.type.startswith("FusedBatchNorm")
