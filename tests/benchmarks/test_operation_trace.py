from collections import Counter

import tensorflow as tf
from conftest import COUNTS_CPU_OPERATIONS
from operation_trace import executed_operations, optimized_graphs

pytestmark = COUNTS_CPU_OPERATIONS


def test_each_call_has_the_operations_that_it_runs():
    counter = tf.Variable(0)

    @tf.function
    def step(x):
        counter.assign_add(1)
        return tf.cond(x > 1.0, lambda: tf.atan2(x, x), lambda: tf.tan(x))

    with optimized_graphs() as graphs:
        step(tf.constant(0.5))
    calls = executed_operations(lambda: step(tf.constant(0.5)), 3)
    assert [dict(call) for call in calls] == [
        {"AssignAddVariableOp": 1, "Greater": 1, "Tan": 1}
    ] * 3
    graph = max((Counter(node.op for node in graph.node) for graph in graphs), key=Counter.total)
    assert {kind: graph[kind] for kind in ("Atan2", "Tan", "Merge")} == {
        "Atan2": 1,
        "Tan": 1,
        "Merge": 1,
    }
    assert graph["Switch"] > 0
