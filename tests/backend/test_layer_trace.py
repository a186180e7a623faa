"""What is traced of the code of layers."""

import keras
import tensorflow as tf
from keras import layers

from kmp.backend.layer_trace import reading_policies, traced


class Residual(layers.Layer):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def build(self, shape):
        self.inner.build(shape)

    def call(self, inputs):
        return inputs + self.inner(inputs)


class Repeated(Residual):
    """Calls the layer in it in a loop."""

    def call(self, inputs):
        return tf.while_loop(lambda x: tf.reduce_sum(x) < 1.0, self.inner, [inputs])[0]


class OfUnknownRank(Residual):
    """Passes a tensor of unknown rank."""

    def call(self, inputs):
        indices = tf.cast(inputs, "int32")
        return self.inner(tf.compat.v1.placeholder_with_default(indices, None))


def trace_of(layer, is_known):
    if not layer.built:
        layer.build((None, 8))
    policy = keras.DTypePolicy("mixed_float16")
    with reading_policies(lambda each: policy, policy.name):
        return traced(layer, [keras.KerasTensor((None, 8))], {}, "float16", is_known)


def operations_of(trace):
    graph = trace.step.graph
    inner = [
        body for function in graph.as_graph_def().library.function for body in function.node_def
    ]
    return [each.type for each in graph.get_operations()] + [each.op for each in inner]


def test_code_of_known_layer_is_not_traced():
    layer = Residual(layers.Dense(8))

    trace = trace_of(layer, lambda each: each is layer.inner)

    assert operations_of(trace) == ["Placeholder", "Placeholder", "AddV2"]
    call = trace.step.calls[0]
    assert (call.layer, call.operations) == (id(layer.inner), slice(1, 2))
    assert [each.dtype.name for each in call.outputs] == ["float16"]
    assert call.outputs[0].shape.as_list() == [None, 8]


def test_call_of_known_layer_is_restored():
    layer = Residual(layers.Dense(8))

    trace_of(layer, lambda each: True)

    assert "call" not in vars(layer.inner)
    assert "MatMul" in operations_of(trace_of(layer, lambda each: False))


def test_known_layer_is_traced_if_its_shapes_are_unknown():
    layer = OfUnknownRank(layers.Embedding(4, 8))

    trace = trace_of(layer, lambda each: each is layer.inner)

    assert "GatherV2" in operations_of(trace)


def test_known_layer_in_loop_is_traced():
    layer = Repeated(layers.Dense(8))

    trace = trace_of(layer, lambda each: each is layer.inner)

    assert "MatMul" in operations_of(trace)
