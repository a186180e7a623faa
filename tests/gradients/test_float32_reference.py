import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled_model, fit, small_data, values
from keras import ops

import kmp
from kmp.callbacks import gradient_histogram


def batch():
    x, y = small_data(2)
    return x, y


@keras.saving.register_keras_serializable("tests")
class ScalesDown(keras.layers.Layer):
    """Scales activations and gradients down so far that float16 flushes them to zero."""

    def call(self, x):
        return x * ops.cast(1e-5, x.dtype)


def test_reference_disables_tf32():
    enabled_in_call = []

    class RecordsTf32(keras.layers.Layer):
        def call(self, x):
            enabled_in_call.append(tf.config.experimental.tensor_float_32_execution_enabled())
            return x

    tf.config.experimental.enable_tensor_float_32_execution(True)
    with kmp.enable():
        model = keras.Sequential([keras.Input((4,)), RecordsTf32(), keras.layers.Dense(2), kmp.layers.Softmax()])
        model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    histogram = kmp.callbacks.GradientHistogram(reference=batch())
    histogram.set_model(model)
    histogram.on_train_begin()
    enabled_in_call.clear()
    histogram._measure_reference()
    assert enabled_in_call == [False]
    assert tf.config.experimental.tensor_float_32_execution_enabled()


def model_with_tiny_gradients():
    dense = keras.layers.Dense
    with kmp.enable(loss_scale=1.0):
        model = keras.Sequential(
            [keras.Input((4,)), dense(8), ScalesDown(), dense(8), ScalesDown(), dense(2), ScalesDown()]
        )
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_reference_measures_float32_gradients_and_restores_the_model():
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense
    with kmp.enable():
        layers = [dense(8, "relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), dense(2)]
        model = keras.Sequential([keras.Input((4,)), *layers, kmp.layers.Softmax()])
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    fit(model)
    before, policies = values(model.variables), [layer.dtype_policy for layer in model.layers]
    histogram = kmp.callbacks.GradientHistogram(reference=batch())
    histogram.set_model(model)
    histogram.on_train_begin()
    histogram._measure_reference()
    for old, new in zip(before, values(model.variables), strict=True):
        np.testing.assert_array_equal(old, new)
    assert [layer.dtype_policy for layer in model.layers] == policies
    sample = histogram.run.references[0]
    assert sample.loss_scale == 1.0
    assert set(sample.names) == {variable.path for variable in model.trainable_variables}
    assert sample.histogram.is_finite
    assert (sample.norm > 0).sum() >= 5


def test_mismatched_reference_raises_before_the_first_step(enabled):
    model, (x, y) = compiled_model(), batch()
    before = values(model.weights)
    with pytest.raises(ValueError, match="`reference` does not fit Sequential .* and its loss: "):
        fit(model, kmp.callbacks.defaults(reference=(x[:, :3], y)))
    for old, new in zip(before, values(model.weights), strict=True):
        np.testing.assert_array_equal(old, new)


def test_reference_is_checked_once_and_measured_after_the_first_step_and_each_epoch(enabled, monkeypatch):
    calls = []
    for name in ("check_batch", "float32_sample"):
        original = getattr(gradient_histogram, name)
        monkeypatch.setattr(
            gradient_histogram,
            name,
            lambda *args, name=name, original=original: calls.append(name) or original(*args),
        )
    fit(compiled_model(), [kmp.callbacks.GradientHistogram(reference=batch())], epochs=2)
    assert calls == ["check_batch", *["float32_sample"] * 3]


def test_reference_restores_the_states_of_stateful_rnns():
    with kmp.enable():
        rnn = keras.layers.LSTM(3, stateful=True)
        model = keras.Sequential([keras.Input(batch_shape=(8, 5, 2)), rnn, keras.layers.Dense(2), kmp.layers.Softmax()])
        model.compile("sgd", "sparse_categorical_crossentropy")
    x, y = np.ones((8, 5, 2), "float32"), np.ones(8, "int32")
    histogram = kmp.callbacks.GradientHistogram(reference=(x, y))
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[histogram])
    before = [state.numpy() for state in rnn.states]
    histogram._measure_reference()
    for state, old in zip(rnn.states, before, strict=True):
        np.testing.assert_array_equal(state, old)
        assert np.any(old)


def test_reference_distinguishes_flushed_values_from_true_zeros():
    model = model_with_tiny_gradients()
    histogram = kmp.callbacks.GradientHistogram(reference=batch())
    fit(model, [histogram])
    flushed, reference = histogram.run.samples[0].histogram, histogram.run.references[0].histogram
    assert flushed.zero_fraction > 0.5
    assert reference.zero_fraction < 0.1
    assert len(histogram.run.references) == 2
    curve = kmp.what_if(histogram.run)
    assert curve.is_measured
    assert curve.at(0)["underflow"] > 0.5
    assert kmp.advise(histogram.run)[0].cause in ("scale_too_small", "range")


def test_reference_uses_the_sample_weights(enabled):
    model = compiled_model()
    x, y = batch()
    norms = []
    for weight in (1.0, 3.0):
        histogram = kmp.callbacks.GradientHistogram(reference=(x, y, np.full(len(x), weight)))
        histogram.set_model(model)
        histogram.on_train_begin()
        model.optimizer.build(model.trainable_variables)
        histogram._measure_reference()
        norms.append(histogram.run.references[0].total_norm)
    assert norms[1] / norms[0] == pytest.approx(3.0, rel=2**-7)


@pytest.mark.parametrize("reference", [np.ones(3), (1,), (1, 2, 3, 4), "batch"])
def test_reference_that_is_not_a_batch_raises(reference):
    with pytest.raises(TypeError, match=r"`reference` must be a batch \(x, y\)"):
        kmp.callbacks.GradientHistogram(reference=reference)
