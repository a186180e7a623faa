import keras

import kmp
from kmp.backend.keras_internals import compute_dtypes, created_layers, layers_by_path


def test_parts_of_layers_of_keras_hub_are_not_created_by_a_program():
    class Block(keras.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.part = keras.layers.Dense(4, name="part")

        def call(self, x):
            return self.part(x)

    class HubBlock(Block):
        __module__ = "keras_hub.layers.block"

    model = keras.Sequential(
        [keras.Input((4,)), Block(name="own"), HubBlock(name="hub")], name="net"
    )
    assert set(layers_by_path(model)) == {"net/own", "net/own/part", "net/hub", "net/hub/part"}
    assert set(created_layers(model)) == {"net/own", "net/own/part", "net/hub"}


def test_compute_dtypes_are_float_dtypes_without_those_of_lookups():
    with kmp.enable():
        lookup, embedding = (
            keras.layers.StringLookup(vocabulary=["a"]),
            keras.layers.Embedding(2, 4),
        )
        model = keras.Sequential(
            [keras.Input((), dtype="string"), lookup, embedding, kmp.layers.Softmax()]
        )
    assert lookup.compute_dtype not in compute_dtypes(model)
    assert compute_dtypes(model) == {"float16", "float32"}
