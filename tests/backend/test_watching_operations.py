import tensorflow as tf

from kmp.backend import watching_operations


def test_eager_operations_of_the_context_are_observed():
    seen = []

    def observe(operation, inputs, outputs):
        seen.append((operation, [float(value.numpy()) for value in inputs], float(outputs[0].numpy())))

    x = tf.constant(2.0)
    with watching_operations(observe):
        tf.square(x) * x
    tf.square(x)
    assert seen == [("Square", [2.0], 4.0), ("Mul", [4.0, 2.0], 8.0)]


def test_operations_of_graphs_are_not_observed():
    seen = []

    @tf.function
    def cube(x):
        return x * x * x

    with watching_operations(lambda operation, *_: seen.append(operation)):
        cube(tf.constant(2.0))
    assert "Mul" not in seen
