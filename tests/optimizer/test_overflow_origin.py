import keras
import numpy as np
import pytest
import tensorflow as tf

from kmp.optimizer.overflow_origin import network_order


def chain(weights, x):
    """A network with one weight in each layer."""
    for weight in weights:
        x = tf.nn.tanh(x * weight)
    return tf.reduce_sum(x)


def order_in_graph(loss, count, change=lambda gradients: gradients, **options):
    weights = [tf.Variable(0.5) for _ in range(count)]
    order = []

    @tf.function(**options)
    def step():
        with tf.GradientTape() as tape:
            value = loss(weights)
        order[:] = network_order(change(tape.gradient(value, weights)))

    step.get_concrete_function()
    return order


@pytest.mark.parametrize("indices", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_order_is_that_of_the_network_for_any_order_of_creation(indices, jit_compile):
    loss = lambda weights: chain([weights[index] for index in indices], tf.constant([0.3]))  # noqa: E731
    assert order_in_graph(loss, 4, jit_compile=jit_compile) == indices


def test_individually_changed_gradients_keep_their_order():
    loss = lambda weights: chain([weights[2], weights[0], weights[1]], tf.constant([0.3]))  # noqa: E731
    clipped = lambda gradients: [tf.clip_by_norm(g * 2.0, 1.0) for g in gradients]  # noqa: E731
    assert order_in_graph(loss, 3, clipped) == [2, 0, 1]


def test_variable_used_twice_has_the_position_of_its_first_use():
    loss = lambda w: chain([w[1], w[0], w[2], w[1]], tf.constant([0.3]))  # noqa: E731
    assert order_in_graph(loss, 3) == [1, 0, 2]


def test_missing_gradients_and_gradients_of_another_function_keep_the_order_of_the_list():
    assert network_order([None, tf.constant(1.0), None]) == [0, 1, 2]
    order = []

    @tf.function
    def apply(first, second):
        order[:] = network_order([first, second])

    apply.get_concrete_function(tf.TensorSpec([2]), tf.TensorSpec([2]))
    assert order == [0, 1]


def test_sparse_gradients_are_ordered():
    table, head = tf.Variable(tf.ones([5, 2])), tf.Variable(tf.ones([2, 1]))
    order = []

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.matmul(tf.gather(table, [1, 2]), head) ** 2)
        gradients = tape.gradient(loss, [head, table])
        assert isinstance(gradients[1], tf.IndexedSlices)
        order[:] = network_order(gradients)

    step.get_concrete_function()
    assert order == [1, 0]


class Reversed(keras.Model):
    """A model that creates its layers from the loss to the input, and calls them in the opposite order."""

    def __init__(self):
        super().__init__()
        self.third, self.second, self.first = (keras.layers.Dense(4, "tanh", name=n) for n in ("c", "b", "a"))

    def call(self, inputs):
        return self.third(self.second(self.first(inputs)))


def test_variables_by_path_has_call_order_in_a_graph_and_creation_order_eagerly(run_step):
    import kmp

    model = Reversed()
    optimizer = kmp.LossScaleOptimizer("sgd")
    x = tf.constant(np.random.default_rng(0).normal(size=(3, 4)).astype("float32"))
    model(x)
    optimizer.build(model.trainable_variables)

    def step():
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_mean(model(x) ** 2))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    compiled = run_step(step)
    compiled()
    names = [path.split("/")[-2] for path in optimizer.variables_by_path()]
    is_eager = compiled is step
    assert names == (["c", "c", "b", "b", "a", "a"] if is_eager else ["a", "a", "b", "b", "c", "c"])
