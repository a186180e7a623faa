import inspect
import sys

import keras
import pytest
from keras import layers, ops

from kmp.backend import private_names
from kmp.backend.layer_graph import calls_in, next_layers, output_operations


def dense(name):
    return layers.Dense(3, name=name)


def names_of(calls):
    return [call.operation.name for call in calls]


def test_calls_are_those_of_the_graph_each_after_its_inputs():
    x, unused = keras.Input((3,), name="x"), keras.Input((3,), name="unused")
    shared, later = dense("shared"), dense("later")
    first = shared(x)
    second = shared(later(first))
    keras.Model(x, dense("other")(shared(first)))  # another model calls the layer too
    graph = calls_in(keras.Model([x, unused], [second, first]))
    assert names_of(graph.calls) == ["x", "unused", "shared", "later", "shared"]
    assert [names_of(call.calls_before) for call in graph.calls[2:]] == [
        ["x"],
        ["shared"],
        ["later"],
    ]
    assert [each.tensor for each in graph.outputs] == [second, first]
    assert output_operations(graph) == [shared]


def test_nested_model_is_its_calls_for_each_call_of_it():
    inputs = {name: keras.Input((3,), name=name) for name in ("b", "a")}
    both = [dense("of_a")(inputs["a"]), inputs["b"]]
    inner = keras.Model(inputs, both, name="inner")
    x, y = keras.Input((3,), name="x"), keras.Input((3,), name="y")
    first = inner({"a": x, "b": y})
    graph = calls_in(keras.Model([x, y], inner({"a": first[1], "b": first[0]})))
    assert names_of(graph.calls) == ["x", "y", *["a", "b", "of_a"] * 2]
    positions = {call: index for index, call in enumerate(graph.calls)}
    sources = [[positions[each] for each in call.calls_before] for call in graph.calls]
    assert sources == [[], [], [0], [1], [2], [3], [4], [5]]
    assert [positions[each.call] for each in graph.outputs] == [7, 6]
    assert [each.name for each in output_operations(graph)] == ["of_a"]


def test_model_with_a_list_of_inputs_takes_those_of_a_dictionary_by_name():
    pair = [keras.Input((3,), name="second"), keras.Input((3,), name="first")]
    inner = keras.Model(pair, dense("only")(pair[0]))
    x, y = keras.Input((3,), name="x"), keras.Input((3,), name="y")
    graph = calls_in(keras.Model([x, y], inner({"first": x, "second": y})))
    assert {call.operation.name: names_of(call.calls_before) for call in graph.calls[2:]} == {
        "first": ["x"],
        "second": ["y"],
        "only": ["second"],
    }


def test_input_of_a_nested_model_that_is_a_constant_has_no_source():
    x = keras.Input((3,))
    pair = [keras.Input((3,)), keras.Input((3,))]
    inner = keras.Model(pair, layers.Add(name="add")(pair))
    graph = calls_in(keras.Model(x, inner([x, ops.ones((1, 3))])))
    assert [len(call.sources) for call in graph.calls] == [0, 1, 0, 2]


def test_graph_may_be_deeper_than_the_stack():
    model = keras.Sequential([keras.Input((3,)), *(layers.ReLU() for _ in range(300))])
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 100)
    try:
        assert len(calls_in(model).calls) == 301
    finally:
        sys.setrecursionlimit(limit)


def test_layers_of_nested_models_are_followed_by_those_that_take_the_same_output():
    inputs = keras.Input((3,))
    heads = keras.Model(inputs, [dense("left")(inputs), dense("right")(inputs)], name="heads")
    x = keras.Input((3,))
    tower = keras.Sequential([keras.Input((3,)), dense("a"), dense("b")], name="tower")
    left, right = heads(tower(x))
    model = keras.Model(x, [dense("after_left")(left), dense("after_right")(right)])
    found = next_layers(model)
    assert set(found.pop("tower/b")) == {"left", "right"}
    assert found == {
        "tower/a": ["tower/b"],
        "left": ["after_left"],
        "right": ["after_right"],
        "after_left": [],
        "after_right": [],
    }


def test_operations_between_layers_and_layers_that_are_called_twice_are_followed():
    x = keras.Input((3,))
    shared = dense("shared")
    first = shared(x)
    last = dense("last")(ops.relu(first) + shared(first))
    assert next_layers(keras.Model(x, last)) == {"shared": ["shared", "last"], "last": []}


def test_model_whose_code_alone_knows_the_order_has_no_graph():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = dense("layer")

        def call(self, x):
            return self.layer(x)

    model = Own()
    model(ops.zeros((1, 3)))
    assert next_layers(model) == {}
    assert next_layers(keras.Sequential([dense("unbuilt")])) == {}


@pytest.mark.filterwarnings("ignore:.*which this version of kmp uses")
@pytest.mark.parametrize("name", ["Operation._inbound_nodes", "KerasTensor._keras_history"])
def test_without_the_private_names_of_keras_there_is_no_graph(monkeypatch, name):
    x = keras.Input((3,))
    model = keras.Model(x, dense("only")(x))
    found = private_names.attribute

    def attribute(instance, where, default=None):
        return default if where.endswith(name) else found(instance, where, default)

    monkeypatch.setattr(private_names, "attribute", attribute)
    assert next_layers(model) == {}
