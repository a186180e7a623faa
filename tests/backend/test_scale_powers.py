"""How tensors of a graph depend on the loss scale, read from the graph."""

import pytest
import tensorflow as tf

from kmp.backend.scale_powers import CONSTANT, SCALED, ZERO, Nonlinear, ScalePowers

X = tf.constant([[1.0, -2.0], [3.0, 4.0]])


def dependence_of(function):
    """Returns the dependence of what a function makes of a scaled tensor, and of the scale."""
    found = []

    @tf.function(autograph=False)
    def step(x, scale):
        result = function(x * scale, scale, x)
        found.append(ScalePowers(tf.compat.v1.get_default_graph(), [scale]).of(result))
        return result

    step(X, tf.constant(8.0))
    return found[0]


@tf.function(autograph=False)
def halved(tensor):
    return 0.5 * tensor


@tf.function(autograph=False)
def limited(tensor):
    return tf.minimum(tensor, 1.0)


def in_loop(g, s, x):
    return tf.while_loop(lambda n, _: n < 3, lambda n, v: (n + 1, v + v), (0, g))[1]


def accumulated(g, s, x):
    return tf.while_loop(lambda n, _: n < 3, lambda n, v: (n + 1, v + g), (0, tf.zeros([2, 2])))[1]


def from_variable(g, s, x):
    VARIABLE.assign(g)
    return VARIABLE.value() + 0.0


def summed_in_variable(g, s, x):
    VARIABLE.assign_add(g)
    return VARIABLE.value() + 0.0


VARIABLE = tf.Variable(tf.zeros([2, 2]))
POWERS = {
    "itself": (lambda g, s, x: g, SCALED),
    "a forward pass": (lambda g, s, x: tf.matmul(x, x), CONSTANT),
    "linear functions": (
        lambda g, s, x: tf.transpose(tf.cast(tf.reshape(-g[:, 0], [1, 2]), "float16")),
        SCALED,
    ),
    "a product with what is not scaled": (lambda g, s, x: tf.matmul(x, g), SCALED),
    "scaled twice": (lambda g, s, x: g * s, {2.0}),
    "divided": (lambda g, s, x: g / s, CONSTANT),
    "times the reciprocal": (lambda g, s, x: g * (1.0 / s), CONSTANT),
    "divided twice": (lambda g, s, x: g / s / s, {-1.0}),
    "a sum of scaled terms": (lambda g, s, x: tf.add_n([g, 2 * g]), SCALED),
    "a sum with a term that is not scaled": (lambda g, s, x: g + x, {0.0, 1.0}),
    "a sum with zeros": (lambda g, s, x: g + tf.zeros_like(x) + 0.0 * x, SCALED),
    "a norm": (lambda g, s, x: tf.norm(g), SCALED),
    "normalized": (lambda g, s, x: g / tf.norm(g), CONSTANT),
    # Of two gradients, as for several tasks: homogeneous, so that nothing is wrong with it.
    "projected": (
        lambda g, s, x: g - tf.reduce_sum(g * g) / tf.reduce_sum(tf.square(g)) * g,
        SCALED,
    ),
    "without NaN": (lambda g, s, x: tf.where(tf.math.is_finite(g), g, tf.zeros_like(g)), SCALED),
    "relu": (lambda g, s, x: tf.maximum(g, 0.0), SCALED),
    "zeros": (lambda g, s, x: tf.raw_ops.ZerosLike(x=g), ZERO),
    "a called function": (lambda g, s, x: halved(g), SCALED),
    "a branch": (
        lambda g, s, x: tf.cond(tf.reduce_sum(x) > 0, lambda: g, lambda: 2 * g),
        SCALED,
    ),
    "a loop": (in_loop, SCALED),
    "a sum in a loop": (accumulated, SCALED),
    "a variable": (from_variable, SCALED),
}


@pytest.mark.parametrize("name", POWERS)
def test_powers_of_the_loss_scale_are_followed(name):
    function, expected = POWERS[name]
    assert dependence_of(function) == expected


NONLINEAR = {
    "Minimum": lambda g, s, x: tf.minimum(g, 1.0),
    "ClipByValue": lambda g, s, x: tf.raw_ops.ClipByValue(
        t=g, clip_value_min=-1.0, clip_value_max=1.0
    ),
    "Greater": lambda g, s, x: tf.where(g > 1.0, tf.ones_like(g), g),
    "Exp": lambda g, s, x: tf.exp(g),
    "RealDiv": lambda g, s, x: g / (tf.norm(g) + 1e-6),
}


@pytest.mark.parametrize("name", NONLINEAR)
def test_an_operation_that_is_not_linear_is_named(name):
    found = dependence_of(NONLINEAR[name])
    assert isinstance(found, Nonlinear)
    assert found.operation.type == name


def test_an_operation_in_a_called_function_is_named():
    assert dependence_of(lambda g, s, x: limited(g)).operation.type == "Minimum"


@pytest.mark.parametrize(
    "function",
    [
        lambda g, s, x: tf.linalg.inv(g),
        lambda g, s, x: tf.cond(tf.reduce_sum(x) > 0, lambda: g, lambda: x),
        summed_in_variable,
    ],
)
def test_what_is_not_known_to_be_linear_is_not_known(function):
    assert dependence_of(function) == Nonlinear(None)
