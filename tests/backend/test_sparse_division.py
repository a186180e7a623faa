"""A sparse gradient is divided by the rows of a table that it has."""

import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from kmp.backend.sparse_division import divisions_of_present_rows

# The shapes of the table and of the divisor.
WITH_ROWS = [((5, 3), (5, 3)), ((5,), (5,)), ((5, 3, 2), (5, 3, 2)), ((5, 3), (5, 1))]
# Keras gathers rows of the divisor as if it had as many as the table.
REFUSED_BY_KERAS = [((5, 3), (3,)), ((5, 5), (5,)), ((5, 3), (1, 3)), ((5, 3), (1,))]


def division(table_shape, divisor_shape):
    """Returns a quotient as a dense tensor, what it must be, and whether rows were gathered."""
    random = np.random.default_rng(0)
    values = tf.constant(random.normal(size=(2, *table_shape[1:])), tf.float32)
    divisor = tf.constant(random.uniform(1.0, 2.0, divisor_shape), tf.float32)

    @tf.function(autograph=False)
    def quotient(values, divisor):
        gradient = tf.IndexedSlices(values, tf.constant([4, 1]), tf.constant(table_shape))
        return tf.convert_to_tensor(ops.divide(gradient, divisor))

    with divisions_of_present_rows():
        graph = quotient.get_concrete_function(values, divisor).graph
    types = {op.type for op in graph.get_operations()}
    dense = tf.scatter_nd([[4], [1]], values, table_shape)
    return quotient(values, divisor), dense / divisor, "GatherV2" in types


@pytest.mark.parametrize("shapes", [*WITH_ROWS, ((5, 3), ())])
def test_sparse_gradient_divided_by_a_table_reads_the_rows_that_it_has(shapes):
    found, expected, has_gathered = division(*shapes)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert has_gathered is (shapes in WITH_ROWS)


@pytest.mark.parametrize("shapes", REFUSED_BY_KERAS)
def test_divisor_that_is_broadcast_to_the_table_is_an_error_as_in_keras(shapes):
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        division(*shapes)
