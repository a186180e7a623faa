import keras

import kmp
from kmp.backend import compute_dtypes


def test_compute_dtypes_are_float_dtypes_without_those_of_lookups():
    with kmp.enable():
        lookup, embedding = keras.layers.StringLookup(vocabulary=["a"]), keras.layers.Embedding(2, 4)
        model = keras.Sequential([keras.Input((), dtype="string"), lookup, embedding, kmp.layers.Softmax()])
    assert lookup.compute_dtype not in compute_dtypes(model)
    assert compute_dtypes(model) == {"float16", "float32"}
