import keras
import models
from keras import layers

from kmp.conversion.model_parts import parts_of


def paths_of(model):
    return [part.path for part in parts_of(model)]


def test_layers_and_operations_are_listed_in_graph_order():
    inputs = keras.Input((4,), name="in")
    x = layers.Dense(4, name="first")(inputs)
    model = keras.Model(inputs, layers.Dense(2, name="last")(keras.ops.relu(x) + x))
    assert [path.rstrip("_0123456789") for path in paths_of(model)] == ["in", "first", "relu", "add", "last"]


def test_path_of_a_child_starts_with_that_of_its_parent():
    model, _ = models.autoencoder()
    paths = paths_of(model)
    assert paths.index("encoder") < next(index for index, path in enumerate(paths) if path.startswith("encoder/dense"))
    wrapped = keras.Sequential([keras.Input((3, 4)), layers.TimeDistributed(layers.Dense(2, name="in"), name="out")])
    assert paths_of(wrapped)[-2:] == ["out", "out/in"]


def test_shared_layer_is_listed_once():
    shared = layers.Dense(4, name="shared")
    inputs = keras.Input((4,))
    assert [part.operation for part in parts_of(keras.Model(inputs, shared(shared(inputs))))].count(shared) == 1


def test_layers_with_the_same_name_have_different_paths():
    class TwoDense(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = layers.Dense(2, name="same"), layers.Dense(2, name="same")

    assert paths_of(TwoDense()) == ["same", "same#2"]


def test_layers_of_a_subclassed_model_are_listed():
    model, _ = models.gan()
    assert {path.split("/")[0] for path in paths_of(model)} == {"generator", "discriminator"}
