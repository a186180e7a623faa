import keras
import numpy as np
import pytest
from keras import ops

from kmp.backend import keras_internals


def layer_called_twice():
    inputs = keras.Input((4,))
    shared = keras.layers.Dense(4)
    return inputs, shared, [shared(inputs), shared(ops.relu(inputs))]


def test_every_call_of_a_layer_and_the_producers_of_its_tensors_are_found():
    inputs, shared, outputs = layer_called_twice()
    assert shared.output is outputs[0]
    calls = keras_internals.calls_of(shared)
    assert [call.output_tensors[0] for call in calls] == outputs
    assert calls[0].input_tensors[0] is inputs
    assert [keras_internals.producer_of(output) for output in outputs] == [shared, shared]
    assert isinstance(keras_internals.producer_of(inputs), keras.layers.InputLayer)


def test_parts_of_layers_of_keras_hub_are_not_created_by_a_program():
    class Block(keras.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.part = keras.layers.Dense(4, name="part")

        def call(self, x):
            return self.part(x)

    class HubBlock(Block):
        __module__ = "keras_hub.layers.block"

    model = keras.Sequential([keras.Input((4,)), Block(name="own"), HubBlock(name="hub")], name="net")
    assert set(keras_internals.layers_by_path(model)) == {"net/own", "net/own/part", "net/hub", "net/hub/part"}
    assert set(keras_internals.created_layers(model)) == {"net/own", "net/own/part", "net/hub"}


def test_learning_rate_of_returns_the_schedule_or_the_variable():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    assert keras_internals.learning_rate_of(keras.optimizers.SGD(schedule)) is schedule
    variable = keras_internals.learning_rate_of(keras.optimizers.SGD(0.25))
    assert (isinstance(variable, keras.Variable), float(variable.numpy())) == (True, 0.25)


def test_variables_to_train_are_those_the_optimizer_was_built_with():
    weight, optimizer = keras.Variable(np.zeros(2, "float32")), keras.optimizers.Adam()
    optimizer.build([weight])
    assert [id(variable) for variable in keras_internals.variables_to_train(optimizer)] == [id(weight)]
    assert id(weight) not in map(id, optimizer.variables)


@pytest.mark.parametrize("optimizer_class", [keras.optimizers.Adam, keras.optimizers.Nadam, keras.optimizers.Adafactor])
@pytest.mark.parametrize("use_ema", [False, True])
def test_optimizer_state_is_complete_and_ordered_also_in_a_loss_scale_optimizer(optimizer_class, use_ema):
    weights = [keras.Variable(np.zeros(shape, "float32")) for shape in ((3, 2), (2,))]
    plain, inner = optimizer_class(use_ema=use_ema), optimizer_class(use_ema=use_ema)
    plain.build(weights)
    keras.optimizers.LossScaleOptimizer(inner).build(weights)
    state = keras_internals.optimizer_state(inner)
    assert [variable.shape for variable in state] == [v.shape for v in keras_internals.optimizer_state(plain)]
    assert set(map(id, state)) >= set(map(id, inner.variables))
    assert len(state) == len(plain.variables)
    assert not set(map(id, weights)) & set(map(id, state))


def test_declared_variables_of_a_frozen_layer():
    layer = keras.layers.BatchNormalization()
    layer.build((None, 3))
    layer.trainable = False
    assert not layer.trainable_variables
    assert [v.name for v in keras_internals.declared_trainable(layer)] == ["gamma", "beta"]
    assert [v.name for v in keras_internals.declared_not_trainable(layer)] == ["moving_mean", "moving_variance"]


def test_compile_arguments_are_the_objects_that_compile_got():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    passed = {"optimizer": keras.optimizers.SGD(), "loss": keras.losses.MeanSquaredError(), "run_eagerly": True}
    model.compile(**passed)
    arguments = keras_internals.compile_arguments(model)
    assert all(arguments[name] is value for name, value in passed.items())


def test_functional_outputs_are_those_of_the_replaced_operations_and_call_shared_ones_again():
    inputs, shared, outputs = layer_called_twice()
    copies = {}

    def replace(operation):
        is_layer = isinstance(operation, keras.Layer)
        copy = keras.layers.Dense(2) if is_layer else keras_internals.unconnected_copy(operation)
        return copies.setdefault(operation, copy)

    replaced = keras_internals.functional_outputs(keras.Model(inputs, outputs), keras.Input((4,)), replace)
    assert [output.shape for output in replaced] == [(None, 2), (None, 2)]
    assert len(copies) == 2
    assert len(keras_internals.calls_of(copies[shared])) == 2


def test_unconnected_copy_of_an_operation_shares_its_arguments_and_is_in_no_graph():
    operation = keras_internals.producer_of(ops.sum(keras.Input((4,)), axis=-1))
    copy = keras_internals.unconnected_copy(operation)
    assert (type(copy), copy.name, copy.axis) == (type(operation), operation.name, operation.axis)
    assert keras_internals.calls_of(copy) == []
    copy(keras.Input((4,)))
    assert len(keras_internals.calls_of(operation)) == 1


def test_is_symbolic_while_keras_computes_output_shapes_only():
    calls = []

    class Layer(keras.layers.Layer):
        def call(self, x):
            calls.append(keras_internals.is_symbolic())
            return x

    keras.Model(inputs := keras.Input((2,)), Layer()(inputs))(np.zeros((1, 2)))
    assert calls == [True, False]


def test_functional_input_cast_casts_to_the_dtypes_of_the_inputs():
    functional, name = keras_internals.functional_input_cast()
    model = keras.Model(inputs := keras.Input((2,), dtype="float16"), inputs)
    assert isinstance(model, functional)
    (cast,) = getattr(model, name)([ops.ones((1, 2))])
    assert cast.dtype == "float16"
