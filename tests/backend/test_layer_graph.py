import keras
import pytest
from keras import layers, ops

from kmp.backend import private_names
from kmp.backend.layer_graph import next_layers


def dense(name):
    return layers.Dense(3, name=name)


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
def test_without_the_private_names_of_keras_there_is_no_graph(monkeypatch):
    x = keras.Input((3,))
    model = keras.Model(x, dense("only")(x))
    found = private_names.attribute

    def attribute(instance, where, default=None):
        return default if where.endswith("_run_through_graph") else found(instance, where, default)

    monkeypatch.setattr(private_names, "attribute", attribute)
    assert next_layers(model) == {}
