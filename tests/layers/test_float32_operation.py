import keras
import numpy as np
import pytest
from keras import ops

import kmp
from kmp.layers import Float32Operation


def test_result_beyond_the_float16_range_is_finite_and_integer_tensors_are_not_cast():
    squared = Float32Operation(ops.power(keras.Input((1,)), 2)._keras_history.operation, name="squared")
    outputs = squared(ops.full((1, 1), 300.0, "float16"), 2)
    assert outputs.dtype == "float32"
    assert float(outputs[0, 0]) == pytest.approx(90000.0, rel=2**-21)  # on a GPU the last few bits of `power` differ
    inputs = keras.Input((4,), dtype="int32")
    operation = Float32Operation(ops.where(inputs > 0, inputs, inputs)._keras_history.operation)
    assert operation(*[ops.ones((1, 4), "int32")] * 3).dtype == "int32"


def test_operation_is_restored_from_a_saved_model(tmp_path):
    inputs = keras.Input((4,), dtype="float16")
    total = ops.sum(inputs, axis=-1, keepdims=True)._keras_history.operation
    model = keras.Model(inputs, Float32Operation(total, name="total")(inputs))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(np.full((2, 4), 3e4, "float16")), np.full((2, 1), 120000.0, "float32"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Float32Operation(ops.softmax(keras.Input((4,)))._keras_history.operation),
        lambda: kmp.layers.Float32(keras.layers.LayerNormalization()),
    ],
    ids=["operation", "layer"],
)
def test_input_may_be_a_tensor_times_a_number_which_keras_takes_for_sparse(make):
    inputs = keras.Input((4,))
    scaled = inputs * 0.125
    model = keras.Model(inputs, make()(scaled))
    assert model.output.dtype == "float32"
    assert np.isfinite(model(np.full((2, 4), 3.0, "float32"))).all()
