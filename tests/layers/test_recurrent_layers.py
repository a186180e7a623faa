"""LSTM and GRU use cuDNN's kernel in 16 bits, as Keras' own do."""

import sys

import keras
import pytest
import tensorflow as tf
from keras import layers

import kmp
from kmp.backend import xla


def recurrent_model():
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(20, 8),
            layers.LSTM(8, return_sequences=True),
            layers.Bidirectional(layers.LSTM(4, return_sequences=True)),
            layers.GRU(8),
            layers.Dense(2, dtype="float32"),
        ]
    )


def cudnn_calls(model):
    """Returns the types and dtypes of the calls of cuDNN in a training step, traced for a GPU."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=False)
    model.optimizer.build(model.trainable_variables)

    def step(x, y):
        with xla.traced_for_gpu():
            return model.train_step((x, y))

    specs = tf.TensorSpec((4, 6), tf.int32), tf.TensorSpec((4,), tf.int64)
    graph = tf.function(step, autograph=False).get_concrete_function(*specs).graph
    operations = graph.get_operations()
    assert not any(op.type in ("While", "StatelessWhile") for op in operations)
    calls = [op for op in operations if op.type.startswith("CudnnRNN")]
    return [(op.type, op.get_attr("T").name) for op in calls]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float32"])
def test_recurrent_layers_use_the_kernel_of_cudnn_in_the_dtype_of_their_policy(policy, monkeypatch):
    # Keras asks for a GPU when it calls a layer.
    keras_module = sys.modules["keras.src.backend.tensorflow.rnn"]
    monkeypatch.setattr(keras_module, "_is_gpu_available", lambda: True)
    plain = recurrent_model()
    with kmp.enable(policy):
        found = cudnn_calls(recurrent_model())
    if policy != "float32":
        assert cudnn_calls(kmp.convert(plain, policy)) == found
    dtype = policy.removeprefix("mixed_")
    expected = [("CudnnRNNV3", dtype)] * 4 + [("CudnnRNNBackpropV3", dtype)] * 4
    assert sorted(found) == sorted(expected)
