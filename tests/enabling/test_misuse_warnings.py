"""Each mistake causes one warning.

A warning that a test does not expect is an error, so silence is tested too.
"""

import contextlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import small_data, small_model, take_step

import kmp


def compiled(model=None, optimizer="sgd", **arguments):
    model = model or small_model()
    model.compile(optimizer, "sparse_categorical_crossentropy", run_eagerly=True, **arguments)
    return model


def train(model):
    model.fit(*small_data(1), verbose=0)


@contextlib.contextmanager
def one_warning(match):
    """Checks that the block causes one warning of kmp, at a line of this file."""
    with pytest.warns(UserWarning, match=match) as caught:
        yield
    (warning,) = [
        warning for warning in caught if warning.category is UserWarning
    ]  # others are from NumPy
    assert warning.filename == __file__


def unbuilt_model():
    return keras.Sequential([keras.layers.Dense(2), kmp.layers.Softmax()])


def nested_model():
    return keras.Sequential([keras.Input((4,)), small_model()])


@pytest.mark.parametrize(
    ("make_model", "compiled_before", "step"),
    [
        (small_model, True, train),
        (unbuilt_model, False, train),
        (nested_model, False, train),
        (small_model, False, lambda model: model.train_on_batch(*small_data(1))),
    ],
)
def test_model_built_before_enable_warns_when_it_trains(make_model, compiled_before, step):
    model = make_model()
    if compiled_before:
        compiled(model)
    kmp.enable()
    if not compiled_before:
        compiled(model)
    with one_warning(
        "'sequential.*no layer that computes in float16. Its layers were created before"
    ):
        step(model)
    train(model)


def test_float32_model_loaded_under_enable_warns_and_keeps_the_state_of_its_optimizer(tmp_path):
    model = compiled(optimizer="adam")
    train(model)
    model.save(tmp_path / "model.keras")
    kmp.enable()
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer.inner_optimizer) is keras.optimizers.Adam
    assert loaded.optimizer.rule == kmp.scaling.FixedScale(1.0)
    assert int(loaded.optimizer.iterations) == 1
    with one_warning(
        "no layer that computes in float16. .* loaded or created with dtype='float32'"
    ):
        train(loaded)


def test_model_that_never_trains_or_was_compiled_for_float32_or_bfloat16_does_not_warn():
    evaluated = small_model()
    with kmp.enable("mixed_bfloat16"):
        bfloat16 = compiled()
    with kmp.enable():
        compiled(evaluated).evaluate(*small_data(1), verbose=0)
        with kmp.enable("float32"):
            float32 = compiled()
        train(float32)
        train(bfloat16)
    assert float32.optimizer.rule == bfloat16.optimizer.rule == kmp.scaling.FixedScale(1.0)


@pytest.mark.parametrize("auto_scale_loss", [True, False])
def test_float16_model_compiled_before_enable_warns_when_it_trains(auto_scale_loss):
    keras.config.set_dtype_policy("mixed_float16")
    model = compiled(auto_scale_loss=auto_scale_loss)
    kmp.enable()
    match = (
        "without kmp's loss scale, with"
        f" keras.{'LossScaleOptimizer' if auto_scale_loss else 'SGD'}. "
    )
    with one_warning(match):
        train(model)
    train(compiled(model))
    assert isinstance(model.optimizer, kmp.LossScaleOptimizer)


def test_float16_model_without_loss_scale_warns_once_even_if_recompiled(enabled):
    model = compiled(auto_scale_loss=False)
    with one_warning("without kmp's loss scale, with keras.SGD. .*without auto_scale"):
        train(model)
    train(compiled(model, auto_scale_loss=False))


class BuildsInFirstStep(keras.Model):
    def build(self, shape):
        self.hidden = keras.layers.Dense(8, "relu", dtype="mixed_float16")
        self.last = keras.layers.Dense(2, "softmax", dtype="float32")

    def call(self, x):
        return self.last(self.hidden(x))


def test_layers_built_in_the_first_step_warn_after_it_if_their_optimizer_does_not_scale():
    model = BuildsInFirstStep()
    kmp.enable()
    with one_warning(
        "'builds_in_first_step' computes in float16 and trains without a loss scale, because none"
    ):
        train(compiled(model))
    assert compiled(model).optimizer.rule == kmp.scaling.DynamicScale()


class Gan(keras.Model):
    """A model with its own optimizers and a `compile` like that of Keras' GAN examples."""

    def __init__(self):
        super().__init__()
        self.nets = [small_model(), small_model()]

    def compile(self, *optimizers, **arguments):
        super().compile(run_eagerly=True, **arguments)
        self.own = list(optimizers)

    def train_step(self, data):
        x, _ = data
        for net, optimizer in zip(self.nets, self.own, strict=True):
            loss = take_step(
                optimizer, net.trainable_variables, lambda net=net: tf.reduce_mean(net(x) ** 2)
            )
        return {"loss": loss}


@pytest.mark.parametrize("arguments", [{}, {"optimizer": None}, {"auto_scale_loss": False}])
def test_optimizers_in_attributes_are_wrapped(enabled, arguments):
    adam, wrapped = keras.optimizers.Adam(), kmp.wrap("sgd")
    model = Gan()
    model.compile(adam, wrapped, **arguments)
    train(model)
    assert model.own[0].inner_optimizer is adam
    assert model.own[1] is wrapped
    assert [optimizer.snapshot().step for optimizer in model.own] == [1, 1]


def test_model_with_optimizers_from_before_enable_warns_once_of_those_that_do_not_scale():
    keras.config.set_dtype_policy("mixed_float16")
    model = Gan()
    model.compile(keras.optimizers.Adam(), kmp.wrap("sgd"))
    kmp.enable()
    with one_warning(r"'gan.*without kmp's loss scale, with keras.Adam. .*kmp.wrap"):
        train(model)
    train(model)


def test_warning_of_a_traced_loop_points_to_the_line_that_calls_it():
    optimizer, variable = kmp.LossScaleOptimizer("sgd"), keras.Variable([1.0])
    optimizer.build([variable])

    @tf.function
    def step(gradient):
        if tf.reduce_sum(gradient) > 0:
            optimizer.apply_gradients([(gradient, variable)])

    with one_warning(r"did not go through `scale_loss`"):
        step(tf.constant([1.0]))


class Block(keras.Layer):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2, activation=tf.nn.softmax)

    def call(self, x):
        return self.dense(x)


SOFTMAXES = {
    "layer": (lambda: [keras.layers.Dense(2), keras.layers.Softmax()], "kmp.layers.Softmax()"),
    "activation": (
        lambda: [keras.layers.Dense(2, activation="softmax")],
        "Dense(..., dtype='float32')",
    ),
    "layer as activation": (
        lambda: [keras.layers.Dense(2, activation=keras.layers.Softmax())],
        "Dense(..., dtype='float32')",
    ),
    "log_softmax": (
        lambda: [keras.layers.Dense(2, activation="log_softmax")],
        "Dense(..., dtype='float32')",
    ),
    "nested": (
        lambda: [keras.Sequential([keras.layers.Dense(2), keras.layers.Activation("softmax")])],
        "kmp.layers.Softmax()",
    ),
    "custom layer": (lambda: [Block()], "Dense(..., dtype='float32')"),
}


@pytest.mark.parametrize("name", SOFTMAXES)
def test_softmax_in_float16_warns_at_compile(enabled, name):
    make_head, remedy = SOFTMAXES[name]
    model = keras.Sequential([keras.Input((4,)), *make_head()])
    remedy = re.escape(f"Write {remedy} instead. kmp.layers.Softmax() computes")
    function = "the logarithm of the softmax" if name == "log_softmax" else "the softmax"
    with one_warning(f"computes in float16: {function} of output layer '.*{remedy}"):
        model.compile("sgd", "sparse_categorical_crossentropy")
    model.compile("adam", "sparse_categorical_crossentropy")


def test_softmax_and_sigmoid_in_float32_or_inside_the_model_do_not_warn(enabled):
    inputs = keras.Input((3, 4))
    head = keras.layers.Dense(2, activation=kmp.layers.Softmax())(inputs)
    keras.Model(inputs, head).compile("sgd", "sparse_categorical_crossentropy")
    x = keras.layers.MultiHeadAttention(2, 4)(inputs, inputs)
    x = x * keras.layers.Dense(4, "sigmoid")(inputs)
    for activation, loss in (
        ("softmax", "sparse_categorical_crossentropy"),
        ("sigmoid", "binary_crossentropy"),
    ):
        outputs = keras.layers.Dense(2, activation, dtype="float32")(x)
        keras.Model(inputs, outputs).compile("sgd", loss)
    pixels = keras.layers.Dense(1, "sigmoid")(
        inputs
    )  # mean squared error has a gradient where a sigmoid is 0 or 1
    keras.Model(inputs, pixels).compile("sgd", "mse")


def test_sigmoid_output_in_float16_warns_at_compile(enabled):
    inputs = keras.Input((4,))
    head = keras.Sequential(
        [keras.layers.Dense(3), keras.layers.Activation("sigmoid")], name="head"
    )
    outputs = [keras.layers.Dense(1, "sigmoid", name="mask")(inputs), head(inputs)]
    remedy = re.escape(
        "Write Dense(..., dtype='float32'), Activation(..., dtype='float32') instead"
    )
    with one_warning(f"the sigmoid of output layer 'mask', the sigmoid of output layer.*{remedy}"):
        keras.Model(inputs, outputs).compile("sgd", [keras.losses.BinaryCrossentropy(), "bce"])


def test_sigmoid_of_a_gate_that_is_defined_last_does_not_warn(enabled):
    class Gated(keras.Model):
        def __init__(self):
            super().__init__()
            self.head, self.gate = keras.layers.Dense(1), keras.layers.Dense(4, "sigmoid")

        def call(self, x):
            return self.head(x * self.gate(x))

    Gated().compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True))


def test_softmax_in_float16_does_not_warn_again_when_the_model_is_loaded(enabled, tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, activation="softmax")])
    with pytest.warns(UserWarning, match="computes in float16"):
        model.compile("sgd", "sparse_categorical_crossentropy")
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    assert keras.models.load_model(tmp_path / "model.keras").compiled


def test_softmax_in_float16_warns_again_after_disable():
    for _ in range(2):
        with kmp.enable():
            head = keras.layers.Dense(2, activation="softmax", name="head")
            model = keras.Sequential([keras.Input((4,)), head], name="same")
            with pytest.warns(
                UserWarning, match="'same' computes in float16: the softmax of output layer 'head'"
            ):
                model.compile("sgd", "mse")


def test_loss_in_float16_warns_at_compile(enabled):
    with one_warning("computes in float16: the loss 'mean_squared_error'"):
        small_model().compile("sgd", keras.losses.MeanSquaredError(dtype="float16"))


def test_train_function_of_a_model_with_an_unbuilt_layer_is_wrapped_once(enabled):
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.unused = keras.layers.Dense(1)
    model.compile("sgd", "mse", run_eagerly=True)
    x, y = np.ones((8, 4)), np.ones((8, 1))
    model.train_on_batch(x, y)
    train_function = model.train_function
    model.train_on_batch(x, y)
    assert model.train_function is train_function
