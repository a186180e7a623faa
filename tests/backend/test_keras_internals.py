import keras
import numpy as np
import pytest
from keras import ops

from kmp.backend import keras_internals


def shared_twice():
    inputs = keras.Input((4,))
    shared = keras.layers.Dense(4)
    return inputs, shared, [shared(inputs), shared(ops.relu(inputs))]


def test_calls_of_an_operation_are_all_known_where_keras_shows_one():
    inputs, shared, outputs = shared_twice()
    assert shared.output is outputs[0]
    calls = keras_internals.calls_of(shared)
    assert [call.output_tensors[0] for call in calls] == outputs
    assert calls[0].input_tensors[0] is inputs


def test_a_tensor_knows_its_maker():
    inputs, shared, outputs = shared_twice()
    assert [keras_internals.producer_of(output) for output in outputs] == [shared, shared]
    assert isinstance(keras_internals.producer_of(inputs), keras.layers.InputLayer)


def test_a_schedule_is_given_as_it_is_and_a_number_as_its_variable():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    assert keras_internals.learning_rate_of(keras.optimizers.SGD(schedule)) is schedule
    variable = keras_internals.learning_rate_of(keras.optimizers.SGD(0.25))
    assert isinstance(variable, keras.Variable)
    assert float(variable.numpy()) == 0.25


def test_an_optimizer_knows_what_it_was_built_on():
    weight, optimizer = keras.Variable(np.zeros(2, "float32")), keras.optimizers.Adam()
    optimizer.build([weight])
    assert [id(one) for one in keras_internals.variables_to_train(optimizer)] == [id(weight)]
    assert id(weight) not in map(id, optimizer.variables)


@pytest.mark.parametrize("kind", [keras.optimizers.Adam, keras.optimizers.Nadam, keras.optimizers.Adafactor])
@pytest.mark.parametrize("use_ema", [False, True])
def test_the_state_of_an_optimizer_is_whole_and_in_one_order_within_a_loss_scaler_too(kind, use_ema):
    weights = [keras.Variable(np.zeros(shape, "float32")) for shape in ((3, 2), (2,))]
    alone, inner = kind(use_ema=use_ema), kind(use_ema=use_ema)
    alone.build(weights)
    keras.optimizers.LossScaleOptimizer(inner).build(weights)
    state = keras_internals.optimizer_state(inner)
    assert [one.shape for one in state] == [one.shape for one in keras_internals.optimizer_state(alone)]
    assert set(map(id, state)) >= set(map(id, inner.variables))
    assert len(state) == len(alone.variables)
    assert not set(map(id, weights)) & set(map(id, state))


def test_a_frozen_layer_still_says_what_it_declared():
    layer = keras.layers.BatchNormalization()
    layer.build((None, 3))
    layer.trainable = False
    assert not layer.trainable_variables
    assert [one.name for one in keras_internals.declared_trainable(layer)] == ["gamma", "beta"]
    assert [one.name for one in keras_internals.declared_not_trainable(layer)] == ["moving_mean", "moving_variance"]
