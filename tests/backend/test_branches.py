import pytest
import tensorflow as tf
from operation_trace import executed_operations

from kmp.backend import call_if


@pytest.mark.parametrize("options", [{}, {"jit_compile": True}])
@pytest.mark.parametrize("condition", [True, False])
def test_function_writes_only_where_the_condition_is_true(condition, options):
    variable = tf.Variable(0.0)

    @tf.function(**options)
    def step(condition):
        def write():
            variable.assign(tf.where(condition, 1.0, variable))

        call_if(condition, write)

    step(tf.constant(condition))
    assert float(variable) == float(condition)


def test_nothing_of_the_function_runs_where_the_condition_is_false():
    variable = tf.Variable(1.0)

    def double():
        variable.assign(variable * 2.0)

    step = tf.function(lambda condition: call_if(condition, double))
    step(tf.constant(False))
    (executed,) = executed_operations(lambda: step(tf.constant(False)), 1)
    assert not executed.keys() - {"ReadVariableOp"}
