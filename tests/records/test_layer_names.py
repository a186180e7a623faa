import keras
from conftest import sequential

from kmp.backend.keras_internals import layers_by_path
from kmp.records.layer_names import stable_name, stable_names


def build():
    dense = keras.layers.Dense
    nested = keras.Sequential([dense(2), dense(3)])
    model = sequential(
        dense(2), keras.layers.BatchNormalization(), nested, dense(1, name="head_7"), shape=(2,)
    )
    return {path: type(layer).__name__ for path, layer in layers_by_path(model).items()}


def test_names_are_those_of_every_model_of_the_architecture():
    first, second = build(), build()
    assert list(first) != list(second)
    names = list(stable_names(first).values())
    assert list(stable_names(second).values()) == names
    assert "sequential/batch_normalization" in names
    assert "sequential/head_7" in names


def test_part_of_a_layer_has_its_name():
    names = stable_names({"net/dense_9": "Dense"})
    stable = [
        stable_name(path, names) for path in ("net/dense_9", "net/dense_9/cell", "net/other_3")
    ]
    assert stable == ["net/dense", "net/dense/cell", "net/other_3"]
