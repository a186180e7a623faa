"""A model that was compiled under `enable` trains alike after the block, after `disable` and after loading."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled_model

import kmp
from kmp.backend import defining_class

X, Y = np.ones((16, 4), "float32"), np.ones((16, 1), "float32")


@keras.saving.register_keras_serializable("tests")
class AddsLoss(keras.layers.Layer):
    """Adds a loss in its compute dtype; kmp sets a layer with an activity regularizer to float32."""

    def call(self, x):
        self.add_loss(keras.ops.mean(x))
        return x


def model_that_adds_losses():
    x = keras.Input((4,))
    model = keras.Model(x, keras.layers.Dense(1)(AddsLoss()(x)))
    model.compile("adam", "mse", jit_compile=False)
    return model


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_added_losses_are_cast_after_the_block_and_after_loading(policy, tmp_path):
    with kmp.enable(policy):
        model = model_that_adds_losses()
    assert np.isfinite(model.fit(X, Y, verbose=0).history["loss"]).all()
    if policy == "mixed_float16":  # a loaded model is known by kmp's optimizer
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        assert np.isfinite(loaded.fit(X, Y, verbose=0).history["loss"]).all()


def test_models_without_kmp_are_those_of_keras():
    keras.config.set_dtype_policy("mixed_float16")
    model = model_that_adds_losses()
    assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer
    model(X)
    assert {loss.dtype.name for loss in model.losses} == {"float16"}
    assert "train_step" not in vars(model)


@pytest.mark.parametrize("metric", ["top_k_categorical_accuracy", "mse"])
def test_metrics_of_float16_outputs_are_computed_in_float32(enabled, metric):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(10, kernel_initializer="ones")])
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=[metric], jit_compile=False)
    x, y = np.full((32, 8), 64.0), np.eye(10)[np.arange(32) % 10]
    value = model.evaluate(x, y, verbose=0, return_dict=True)[metric]
    assert np.isfinite(value)
    assert value > 65504 if metric == "mse" else value <= 1.0


def test_compile_works_where_another_library_has_wrapped_it(monkeypatch):
    owner = defining_class(keras.Model, "compile")
    original, calls = vars(owner)["compile"], []

    def compile(self, *args, **kwargs):
        calls.append(kwargs)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, "compile", compile)
    with kmp.enable():
        model = compiled_model("adam", metrics=["accuracy"])
    assert isinstance(model.optimizer, kmp.LossScaleOptimizer)
    assert calls[0]["metrics"] == ["accuracy"]


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")  # Keras, at the end of a generator
@pytest.mark.parametrize("mode", [{"run_eagerly": True}, {"jit_compile": False}], ids=["eager", "graph"])
def test_batch_without_rows_is_skipped_and_is_no_overflow(mode):
    kmp.enable(initial_scale=1024.0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", **mode)

    def batches():
        for rows in (8, 0, 8):
            yield np.ones((rows, 4), "float32"), np.ones((rows, 1), "float32")

    signature = (tf.TensorSpec((None, 4)), tf.TensorSpec((None, 1)))
    model.fit(tf.data.Dataset.from_generator(batches, output_signature=signature), shuffle=False, verbose=0)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    snapshot = model.optimizer.snapshot()
    assert (snapshot.step, snapshot.overflow_count, snapshot.nonfinite_loss_count) == (3, 0, 0)
    assert (snapshot.loss_scale, snapshot.overflows_by_variable) == (1024.0, {})
