import tensorflow as tf

from kmp.backend import watching_operations


def test_eager_operations_of_the_context_are_observed_and_those_of_graphs_are_not():
    seen = []

    def observe(operation, inputs, outputs):
        if operation in ("Square", "Mul"):
            seen.append((operation, [float(value.numpy()) for value in inputs], float(outputs[0].numpy())))

    x, cube = tf.constant(2.0), tf.function(lambda x: x * x * x)
    with watching_operations(observe):
        tf.square(x) * x
        cube(x)
    tf.square(x)
    assert seen == [("Square", [2.0], 4.0), ("Mul", [4.0, 2.0], 8.0)]
