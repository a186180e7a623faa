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


def told(caught):
    """The warnings that are kmp's: some versions of Keras cause NumPy's own."""
    return [warning for warning in caught if warning.category is UserWarning]


def the_one(caught):
    (warning,) = told(caught)
    assert warning.filename == __file__
    return str(warning.message)


def test_loop_without_scale_loss_is_told_once():
    optimizer, variable = kmp.LossScaleOptimizer("sgd"), keras.Variable([1.0])
    with pytest.warns(UserWarning, match="before any loss went through `scale_loss`") as caught:
        optimizer.apply([tf.constant([1.0])], [variable])
    the_one(caught)
    optimizer.apply([tf.constant([1.0])], [variable])


def test_loop_with_scale_loss_in_a_function_of_its_own_is_not_told(recwarn):
    optimizer, variable = kmp.LossScaleOptimizer("sgd"), keras.Variable([1.0])
    scale = tf.function(optimizer.scale_loss)
    step = tf.function(lambda gradient: optimizer.apply([gradient], [variable]))
    scale(tf.constant(1.0))
    step(tf.constant([1.0]))
    assert not told(recwarn)


def test_scale_of_one_needs_no_scale_loss(recwarn):
    kmp.LossScaleOptimizer("sgd", loss_scale=1.0).apply([tf.constant([1.0])], [keras.Variable([1.0])])
    assert not told(recwarn)


def unbuilt():
    return keras.Sequential([keras.layers.Dense(2), kmp.layers.Softmax()])


def nested():
    return keras.Sequential([keras.Input((4,)), small_model()])


@pytest.mark.parametrize("make", [small_model, unbuilt, nested])
@pytest.mark.parametrize("compiled_before", [True, False])
def test_model_built_before_enable_is_told_when_it_trains(make, compiled_before):
    model = make()
    if compiled_before:
        model.compile("sgd", "sparse_categorical_crossentropy")
    kmp.enable()
    if not compiled_before:
        model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.warns(
        UserWarning, match="'sequential.*no layer that computes in float16: it was built before"
    ) as caught:
        train(model)
    the_one(caught)
    train(model)


def test_model_built_and_compiled_before_enable_is_told_when_it_trains():
    model = compiled_model()
    kmp.enable()
    with pytest.warns(UserWarning, match="it was built before") as caught:
        model.train_on_batch(*small_data(1))
    the_one(caught)
    train(model)


def test_float32_model_that_is_loaded_or_cloned_under_enable_is_told_and_keeps_its_optimizer(tmp_path):
    model = compiled_model("adam")
    train(model)
    model.save(tmp_path / "model.keras")
    kmp.enable()
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is keras.optimizers.Adam
    assert int(loaded.optimizer.iterations) == 20
    with pytest.warns(UserWarning, match="no layer that computes in float16: .* loaded or made with dtype='float32'"):
        train(loaded)


def test_model_that_never_trains_or_was_compiled_for_float32_or_bfloat16_is_not_told(recwarn):
    evaluated, bfloat16 = small_model(), None
    with kmp.enable("mixed_bfloat16"):
        bfloat16 = compiled_model()
    with kmp.enable():
        evaluated.compile(loss="sparse_categorical_crossentropy")
        evaluated.evaluate(*small_data(), verbose=0)
        with kmp.enable("float32"):
            float32 = compiled_model()
        train(float32)
        train(bfloat16)
    assert not told(recwarn)


@pytest.mark.parametrize("scales_itself", [True, False])
def test_float16_model_compiled_before_enable_is_told_when_it_trains(scales_itself):
    keras.config.set_dtype_policy("mixed_float16")
    model = compiled_model(auto_scale_loss=scales_itself)
    kmp.enable()
    match = "Keras' own LossScaleOptimizer" if scales_itself else "compiled before kmp.enable.*its loss is not scaled"
    with pytest.warns(UserWarning, match=match) as caught:
        train(model)
    the_one(caught)
    model.compile("sgd", "sparse_categorical_crossentropy")
    train(model)
    assert isinstance(model.optimizer, kmp.LossScaleOptimizer)


def test_float16_model_without_loss_scale_is_told_once_however_often_it_is_compiled(enabled):
    model = compiled_model(auto_scale_loss=False)
    with pytest.warns(UserWarning, match="compiled with auto_scale_loss=False, so its loss is not scaled") as caught:
        train(model)
    the_one(caught)
    model.compile("sgd", "sparse_categorical_crossentropy", auto_scale_loss=False)
    train(model)


class BuildsLate(keras.Model):
    """Made before `enable`; its layers are made in its first step."""

    def build(self, shape):
        self.net = small_model()

    def call(self, x):
        return self.net(x)


def test_layers_made_in_the_first_step_are_told_of_after_it():
    model = BuildsLate()
    kmp.enable()
    model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.warns(UserWarning, match="'builds_late' computes in float16 .* its loss is not scaled") as caught:
        train(model)
    the_one(caught)


class Gan(keras.Model):
    """Holds optimizers of its own, and compiles in the form that Keras' examples have."""

    def __init__(self):
        super().__init__()
        self.nets = [small_model(), small_model()]

    def compile(self, *optimizers, **arguments):
        super().compile(**arguments)
        self.own = list(optimizers)

    def train_step(self, data):
        x, _ = data
        for net, optimizer in zip(self.nets, self.own, strict=True):
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(tf.reduce_mean(net(x) ** 2))
            optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("arguments", [{}, {"optimizer": None}, {"auto_scale_loss": False}])
def test_model_that_holds_optimizers_of_its_own_is_told_of_those_that_do_not_scale(enabled, arguments):
    model = Gan()
    model.compile(keras.optimizers.Adam(), kmp.wrap("sgd"), **arguments)
    with pytest.warns(
        UserWarning, match=r"'gan.*optimizers of its own that do not scale their loss: Adam.*kmp.wrap"
    ) as caught:
        train(model)
    the_one(caught)
    train(model)


@pytest.mark.parametrize("arguments", [{}, {"optimizer": None}, {"auto_scale_loss": False}])
def test_model_whose_own_optimizers_all_scale_is_not_told(enabled, arguments):
    model = Gan()
    model.compile(kmp.wrap("adam"), kmp.wrap("sgd"), **arguments)
    train(model)
    assert [optimizer.snapshot().step for optimizer in model.own] == [20, 20]


def test_traced_loop_is_told_at_the_line_that_calls_it():
    optimizer, variable = kmp.LossScaleOptimizer("sgd"), keras.Variable([1.0])
    optimizer.build([variable])

    @tf.function
    def step(gradient):
        if tf.reduce_sum(gradient) > 0:
            optimizer.apply_gradients([(gradient, variable)])

    with pytest.warns(UserWarning, match="before any loss went through") as caught:
        step(tf.constant([1.0]))
    the_one(caught)


def softmax_layer():
    return [keras.layers.Dense(2), keras.layers.Softmax()]


def softmax_activation():
    return [keras.layers.Dense(2, activation="softmax")]


def nested_softmax():
    return [keras.Sequential([keras.layers.Dense(2), keras.layers.Activation("softmax")])]


@keras.saving.register_keras_serializable("tests")
class Block(keras.Layer):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2, activation=tf.nn.softmax)

    def call(self, x):
        return self.dense(x)


def softmax_in_a_layer_of_ones_own():
    return [Block()]


def logarithm():
    return [keras.layers.Dense(2, activation="log_softmax")]


@pytest.mark.parametrize(
    "head", [softmax_layer, softmax_activation, nested_softmax, softmax_in_a_layer_of_ones_own, logarithm]
)
def test_softmax_in_float16_is_told_at_compile(enabled, head):
    model = keras.Sequential([keras.Input((4,)), *head()])
    with pytest.warns(UserWarning, match="computes in float16: the softmax of layer '") as caught:
        model.compile("sgd", "sparse_categorical_crossentropy")
    assert "kmp.layers.Softmax()" in the_one(caught)
    model.compile("adam", "sparse_categorical_crossentropy")


def test_softmax_in_float32_and_inside_attention_is_not_told(enabled, recwarn):
    inputs = keras.Input((3, 4))
    x = keras.layers.MultiHeadAttention(2, 4)(inputs, inputs)
    model = keras.Model(inputs, keras.layers.Dense(2, activation="softmax", dtype="float32")(x))
    model.compile("sgd", "sparse_categorical_crossentropy")
    assert not told(recwarn)


def test_loss_in_float16_is_told_at_compile_and_in_a_loop(enabled):
    model = small_model()
    with pytest.warns(UserWarning, match="computes in float16: the loss 'mean_squared_error'") as caught:
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
def test_nothing_is_told_where_float16_is_not_asked_for(policy, recwarn):
    model = small_model()
    with kmp.enable(policy):
        model.compile("sgd", "sparse_categorical_crossentropy")
        train(model)
    assert not told(recwarn)


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
        ({"jit_compile": True}, "cannot compile a step of several replicas with XLA .MirroredStrategy.. Leave out"),
        (
            {"steps_per_execution": 4},
            "`steps_per_execution` above 1 with several replicas.*steps_per_execution=4",
        ),
        ({"optimizer": accumulating}, "fail on `gradient_accumulation_steps` under a mirrored.*`run_eagerly=True`"),
        ({"optimizer": averaging}, "fail on `ema_overwrite_frequency` under a mirrored.*ema_overwrite_frequency=5"),
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
def test_one_replica_can(enabled, arguments, one_replica):
    with one_replica.scope():
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
