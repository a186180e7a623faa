import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MODES, compiled_model, fit, optimizer_for

import kmp


def built_optimizer(*shapes, **arguments):
    variables = [
        keras.Variable(np.ones(shape, "float32"), name=f"v{index}")
        for index, shape in enumerate(shapes)
    ]
    optimizer = optimizer_for(*variables, **arguments)
    optimizer.scale_loss(1.0)
    return optimizer, variables


def one_step(optimizer, variables, gradients, run_step=lambda step: step):
    owner = keras.Layer()
    optimizer.sampler.start(owner, every_n_steps=1)
    run_step(lambda: optimizer.apply(gradients, variables))()
    return optimizer.snapshot().sample


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
def test_sample_holds_counts_amax_and_norm_of_each_variable(run_step):
    optimizer, variables = built_optimizer(2, 3, 4, (5, 2), loss_scale=4.0)
    sparse = tf.IndexedSlices(
        tf.constant([[1.0, 2.0], [2.0, 0.0]]), tf.constant([0, 3]), tf.constant([5, 2])
    )
    gradients = [tf.constant([8.0, -0.5]), None, tf.constant([0.0, 0.0, 3.0, 4.0]), sparse]
    sample = one_step(optimizer, variables, gradients, run_step)
    assert (sample.step, sample.loss_scale) == (1, 4.0)
    row_of = dict(zip(sample.names, range(4), strict=True))
    rows = [row_of[variable.path] for variable in variables]
    assert sample[variables[0].path].by_exponent[[148, 152]].tolist() == [1, 1]
    # Only stored rows.
    assert [sample[variable.path].total for variable in variables] == [2, 0, 4, 4]
    assert [sample[variable.path].zeros for variable in variables] == [0, 0, 2, 1]
    np.testing.assert_allclose(sample.amax[rows], [8.0, 0.0, 4.0, 2.0])
    np.testing.assert_allclose(sample.norm[rows], np.array([np.hypot(8, 0.5), 0.0, 5.0, 3.0]) / 4)


def test_callback_samples_only_its_own_variables_at_its_own_steps(enabled):
    model = compiled_model()
    kernels = kmp.callbacks.GradientHistogram(every_n_steps=8, variables="*/kernel")
    biases = kmp.callbacks.GradientHistogram(every_n_steps=4, variables="*/bias")
    fit(model, [kernels, biases], batches=16)
    assert {name.rpartition("/")[2] for sample in kernels.run.samples for name in sample} == {
        "kernel"
    }
    assert {name.rpartition("/")[2] for sample in biases.run.samples for name in sample} == {"bias"}
    assert [sample.histogram.total for sample in biases.run.samples] == [10] * 6
    assert [sample.step for sample in biases.run.samples] == [1, 2, 4, 8, 12, 16]
    assert [sample.step for sample in kernels.run.samples] == [1, 2, 4, 8, 16]


def test_unmatched_pattern_raises_before_the_optimizer_changes_and_does_not_affect_the_next_fit(
    enabled,
):
    model = compiled_model(run_eagerly=True)
    histogram = kmp.callbacks.GradientHistogram(variables="*/kernel")
    for callbacks in ([], [histogram]):  # the optimizer is not built, and built
        before = model.optimizer.snapshot()
        with pytest.raises(ValueError, match=r"No variable matches 'conv\*'"):
            fit(model, [kmp.callbacks.GradientHistogram(variables="conv*")])
        assert model.optimizer.snapshot() == before
        fit(model, callbacks, batches=2)
    assert {name.rpartition("/")[2] for sample in histogram.run.samples for name in sample} == {
        "kernel"
    }


def test_variables_with_the_same_path_are_measured_separately(enabled):
    class Twins(keras.Model):
        def __init__(self):
            super().__init__(name="m")
            constant, arguments = keras.initializers.Constant, {"name": "out", "use_bias": False}
            self.first = keras.layers.Dense(4, kernel_initializer="ones", **arguments)
            self.second = keras.layers.Dense(4, kernel_initializer=constant(10), **arguments)

        def call(self, inputs):
            return self.second(self.first(inputs))

    model = Twins()
    model(np.ones((1, 4)))
    model.compile(kmp.wrap(keras.optimizers.SGD(0.0), loss_scale=1.0), "mse", run_eagerly=True)
    histogram = kmp.callbacks.GradientHistogram(every_n_steps=1)
    model.fit(np.ones((4, 4)), np.ones((4, 4)), verbose=0, callbacks=[histogram])
    sample = histogram.run.samples[0]
    weight_norms = dict(zip(sample.names, sample.weight_norm, strict=True))
    assert weight_norms == pytest.approx({"m/out/kernel": 4.0, "m/out/kernel#2": 40.0})


@pytest.mark.parametrize("mode", ["graph", "steps_per_execution"])
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_end_of_a_dataset_of_unknown_length_counts_no_extra_step(mode):
    """Keras detects the end by a step without a batch, in which operations may run all the same."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(kmp.wrap("sgd", loss_scale=1.0), lambda y, prediction: prediction, **MODES[mode])
    batches = [np.full((2, 1), number, "float32") for number in range(1, 6)]
    signature = (tf.TensorSpec((2, 1)), tf.TensorSpec((2, 1)))
    data = tf.data.Dataset.from_generator(
        lambda: zip(batches, batches, strict=True), output_signature=signature
    )
    for fits, every_n_steps in enumerate((3, 5), start=1):
        histogram = kmp.callbacks.GradientHistogram(every_n_steps=every_n_steps)
        model.fit(data, epochs=3, shuffle=False, verbose=0, callbacks=[histogram])
        assert model.optimizer.snapshot().step == model.optimizer.iterations == 15 * fits
        assert len(histogram.run.samples) >= 3
        for sample in histogram.run.samples:
            assert sample.total_norm == (sample.step - 1) % 5 + 1


def test_branch_of_a_sample_captures_three_variables():
    optimizer, variables = built_optimizer(2, 3)
    owner = keras.Layer()
    optimizer.sampler.start(owner, every_n_steps=1)
    step = tf.function(lambda *gradients: optimizer.apply(gradients, variables), autograph=False)
    graph = step.get_concrete_function(*(tf.TensorSpec(each.shape) for each in variables)).graph
    branch = next(each for each in graph.get_operations() if each.type == "If")
    dtypes = [tensor.dtype for tensor in branch.inputs]
    # The gradients; the counts and the loss scale, and what stores the sample.
    assert dtypes.count(tf.float32) == 2
    assert dtypes.count(tf.resource) == 3
