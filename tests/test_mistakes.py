import subprocess
import sys

import keras
import pytest
import tensorflow as tf
from conftest import compiled_model, small_data, small_model

import kmp


def train(model):
    x, y = small_data()
    model.fit(x, y, batch_size=8, verbose=0)


def the_one(caught):
    assert len(caught) == 1
    assert caught[0].filename == __file__
    return str(caught[0].message)


def test_loop_without_scale_loss_is_told_once():
    optimizer, variable = kmp.LossScaleOptimizer("sgd"), keras.Variable([1.0])
    with pytest.warns(UserWarning, match="before any loss went through `scale_loss`") as caught:
        optimizer.apply([tf.constant([1.0])], [variable])
    the_one(caught)
    optimizer.apply([tf.constant([1.0])], [variable])


def test_loop_with_scale_loss_in_a_function_of_its_own_is_not_told():
    optimizer, variable = kmp.LossScaleOptimizer("sgd"), keras.Variable([1.0])
    scale = tf.function(optimizer.scale_loss)
    step = tf.function(lambda gradient: optimizer.apply([gradient], [variable]))
    scale(tf.constant(1.0))
    step(tf.constant([1.0]))


def test_scale_of_one_needs_no_scale_loss():
    kmp.LossScaleOptimizer("sgd", loss_scale=1.0).apply([tf.constant([1.0])], [keras.Variable([1.0])])


def test_model_built_before_enable_is_told_at_compile():
    model = small_model()
    kmp.enable()
    with pytest.warns(
        UserWarning, match="'sequential.*no layer that computes in float16: it was built before"
    ) as caught:
        model.compile("sgd", "sparse_categorical_crossentropy")
    the_one(caught)
    train(model)


def test_model_built_and_compiled_before_enable_is_told_when_it_trains():
    model = compiled_model()
    kmp.enable()
    with pytest.warns(UserWarning, match="it was built before kmp.enable") as caught:
        train(model)
    assert len(caught) == 1
    train(model)


@pytest.mark.parametrize("scales_itself", [True, False])
def test_float16_model_compiled_before_enable_is_told_when_it_trains(scales_itself):
    keras.config.set_dtype_policy("mixed_float16")
    model = compiled_model(auto_scale_loss=scales_itself)
    kmp.enable()
    match = "Keras' own LossScaleOptimizer" if scales_itself else "compiled before kmp.enable.*its loss is not scaled"
    with pytest.warns(UserWarning, match=match) as caught:
        train(model)
    assert len(caught) == 1
    model.compile("sgd", "sparse_categorical_crossentropy")
    train(model)
    assert isinstance(model.optimizer, kmp.LossScaleOptimizer)


def test_float16_model_without_loss_scale_is_told_at_compile(enabled):
    model = small_model()
    with pytest.warns(UserWarning, match="compiled with auto_scale_loss=False, so its loss is not scaled") as caught:
        model.compile("sgd", "sparse_categorical_crossentropy", auto_scale_loss=False)
    the_one(caught)
    train(model)


def softmax_layer():
    return [keras.layers.Dense(2), keras.layers.Softmax()]


def softmax_activation():
    return [keras.layers.Dense(2, activation="softmax")]


def nested_softmax():
    return [keras.Sequential([keras.layers.Dense(2), keras.layers.Activation("softmax")])]


@pytest.mark.parametrize("head", [softmax_layer, softmax_activation, nested_softmax])
def test_softmax_in_float16_is_told_at_compile(enabled, head):
    model = keras.Sequential([keras.Input((4,)), *head()])
    with pytest.warns(UserWarning, match="Computed in float16: the softmax of layer '") as caught:
        model.compile("sgd", "sparse_categorical_crossentropy")
    assert "kmp.layers.Softmax()" in the_one(caught)


def test_softmax_in_float32_and_inside_attention_is_not_told(enabled):
    inputs = keras.Input((3, 4))
    x = keras.layers.MultiHeadAttention(2, 4)(inputs, inputs)
    model = keras.Model(inputs, keras.layers.Dense(2, activation="softmax", dtype="float32")(x))
    model.compile("sgd", "sparse_categorical_crossentropy")


def test_loss_in_float16_is_told_at_compile_and_in_a_loop(enabled):
    model = small_model()
    with pytest.warns(UserWarning, match="Computed in float16: the loss 'mean_squared_error'") as caught:
        model.compile("sgd", keras.losses.MeanSquaredError(dtype="float16"))
    the_one(caught)
    optimizer = kmp.wrap("sgd")
    with pytest.warns(UserWarning, match="The loss was computed in float16") as caught:
        optimizer.scale_loss(tf.constant(1.0, tf.float16))
    the_one(caught)
    optimizer.scale_loss(tf.constant(1.0, tf.float16))


def test_optimizer_wrapped_twice_is_an_error():
    with pytest.raises(TypeError, match="would be scaled twice"):
        kmp.LossScaleOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    with pytest.raises(TypeError, match="would be scaled twice"):
        kmp.LossScaleOptimizer(kmp.LossScaleOptimizer("sgd"))


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_nothing_is_told_where_float16_is_not_asked_for(policy):
    model = small_model()
    with kmp.enable(policy):
        model.compile("sgd", "sparse_categorical_crossentropy")
        train(model)


def test_subclassed_model_is_not_taken_for_float32_before_it_is_built(enabled):
    class Own(keras.Model):
        def build(self, shape):
            self.net = small_model()

        def call(self, x):
            return self.net(x)

    model = Own()
    model.compile("sgd", "sparse_categorical_crossentropy")
    train(model)
    assert isinstance(model.optimizer, kmp.LossScaleOptimizer)
    assert model.optimizer.snapshot().step == 20


def accumulating():
    return keras.optimizers.SGD(gradient_accumulation_steps=2)


def averaging():
    return kmp.LossScaleOptimizer(keras.optimizers.SGD(use_ema=True, ema_overwrite_frequency=5))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"jit_compile": True}, "cannot compile a step with XLA under MirroredStrategy with 2 replicas. Leave out"),
        ({"steps_per_execution": 4}, "`steps_per_execution` above 1 under MirroredStrategy.*steps_per_execution=4"),
        ({"optimizer": accumulating}, "fail on `gradient_accumulation_steps` under Mirrored.*`run_eagerly=True`"),
        ({"optimizer": averaging}, "fail on `ema_overwrite_frequency` under Mirrored.*ema_overwrite_frequency=5"),
    ],
)
def test_what_replicas_cannot_is_an_error_at_compile(enabled, arguments, match, two_replicas):
    with two_replicas.scope():
        model = small_model()
        arguments = {"optimizer": arguments.pop("optimizer", lambda: "sgd")()} | arguments
        with pytest.raises(ValueError, match=match):
            model.compile(loss="sparse_categorical_crossentropy", **arguments)
        assert not model.compiled


@pytest.mark.parametrize("arguments", [{"jit_compile": True}, {"steps_per_execution": 4}])
def test_one_replica_can(enabled, arguments):
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = compiled_model(**arguments)
    train(model)
    assert model.optimizer.snapshot().step == 20


STOCK = """
import os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"], os.environ["CUDA_VISIBLE_DEVICES"] = "3", ""
import keras, numpy as np, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
of_compile, of_optimizer = eval(sys.argv[1])
with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(**of_optimizer), "mse", **of_compile)
try:
    model.fit(np.ones((32, 4)), np.ones((32, 1)), batch_size=8, verbose=0)
except (tf.errors.InvalidArgumentError, RuntimeError):
    sys.exit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ({"jit_compile": True}, {}),
        ({"steps_per_execution": 4}, {}),
        ({}, {"gradient_accumulation_steps": 2}),
        ({}, {"use_ema": True, "ema_overwrite_frequency": 2}),
    ],
    ids=str,
)
def test_tensorflow_and_keras_still_fail_on_what_is_refused(arguments):
    """When this fails, they have mended it: take the refusal out. In processes of their own, which they break."""
    assert subprocess.run([sys.executable, "-c", STOCK, repr(arguments)], check=False).returncode == 3
