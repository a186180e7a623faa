import keras
import numpy as np
import pytest
from keras import layers

from kmp.conversion.activation_statistics import ActivationStatistics, measure_activations


def seen(*values):
    return ActivationStatistics.of(tuple(np.array(value, np.float32) for value in values))


def test_shares_beyond_and_below_float16_are_those_of_all_elements():
    found = seen([1.0, 7e4, np.inf, 1e-8], [0.0, 65504.0, 6e-8, np.nan])
    assert (found.beyond, found.below, found.is_finite) == (3 / 8, 1 / 8, False)
    assert found.amax == 7e4


def test_drift_is_the_difference_over_the_reference():
    assert seen([3.0, 4.0]).drift(seen([3.0, 0.0])) == pytest.approx(4 / 3)
    assert seen([0.0]).drift(seen([0.0])) == 0.0
    assert np.isnan(seen([1.0]).drift(seen([1.0, 2.0])))


def test_what_each_part_puts_out_is_noted_and_the_model_is_as_before():
    inputs = keras.Input((2,))
    x = layers.Dense(2, kernel_initializer="ones", name="dense")(inputs)
    model = keras.Model(inputs, keras.ops.exp(x))
    before = [dict(vars(operation)).keys() for operation in model.operations]
    outputs, found = measure_activations(model, np.array([[1.0, 2.0]], np.float32))
    np.testing.assert_array_equal(found["dense"].values[0], [[3.0, 3.0]])
    np.testing.assert_allclose(outputs, np.exp([[3.0, 3.0]]), rtol=1e-6)
    assert list(found)[-2] == "dense"
    assert [dict(vars(operation)).keys() for operation in model.operations] == before
