import keras
import numpy as np
import pytest
from keras import layers

from kmp.conversion.measurement import ActivationStatistics, measure_activations


def statistics_of(*values):
    return ActivationStatistics.of(tuple(np.array(value, np.float32) for value in values))


def test_overflow_and_underflow_shares_are_relative_to_all_elements():
    statistics = statistics_of([1.0, 7e4, np.inf, 1e-8], [0.0, 65504.0, 6e-8, np.nan])
    assert (statistics.overflow_share, statistics.underflow_share, statistics.is_finite) == (3 / 8, 1 / 8, False)
    assert statistics.amax == 7e4


def test_relative_error_is_the_norm_of_the_difference_over_the_norm_of_the_reference():
    assert statistics_of([3.0, 4.0]).relative_error(statistics_of([3.0, 0.0])) == pytest.approx(4 / 3)
    assert statistics_of([0.0]).relative_error(statistics_of([0.0])) == 0.0
    assert np.isnan(statistics_of([1.0]).relative_error(statistics_of([1.0, 2.0])))


def test_measuring_records_each_output_and_leaves_the_model_unchanged():
    inputs = keras.Input((2,))
    x = layers.Dense(2, kernel_initializer="ones", name="dense")(inputs)
    model = keras.Model(inputs, keras.ops.exp(x))
    attributes_before = [dict(vars(operation)).keys() for operation in model.operations]
    outputs, statistics = measure_activations(
        model, {operation.name: operation for operation in model.operations}, np.array([[1.0, 2.0]], np.float32)
    )
    np.testing.assert_array_equal(statistics["dense"].values[0], [[3.0, 3.0]])
    np.testing.assert_allclose(outputs, np.exp([[3.0, 3.0]]), rtol=1e-6)
    assert list(statistics)[-2] == "dense"
    assert [dict(vars(operation)).keys() for operation in model.operations] == attributes_before
