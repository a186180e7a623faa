import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled_model, small_data, small_model

import kmp


def train(model):
    x, y = small_data()
    model.fit(x, y, batch_size=8, verbose=0)


def kmp_warnings(caught):
    """Returns kmp's warnings; some versions of Keras cause other categories from NumPy."""
    return [warning for warning in caught if warning.category is UserWarning]


def only_message(caught):
    (warning,) = kmp_warnings(caught)
    assert warning.filename == __file__
    return str(warning.message)


def test_loop_without_scale_loss_warns_once():
    optimizer, variable = kmp.LossScaleOptimizer("sgd"), keras.Variable([1.0])
    with pytest.warns(UserWarning, match="scaled_loss = optimizer.scale_loss") as caught:
        optimizer.apply([tf.constant([1.0])], [variable])
    only_message(caught)
    optimizer.apply([tf.constant([1.0])], [variable])


def test_loop_with_scale_loss_in_a_separate_function_does_not_warn(recwarn):
    optimizer, variable = kmp.LossScaleOptimizer("sgd"), keras.Variable([1.0])
    scale = tf.function(optimizer.scale_loss)
    step = tf.function(lambda gradient: optimizer.apply([gradient], [variable]))
    scale(tf.constant(1.0))
    step(tf.constant([1.0]))
    assert not kmp_warnings(recwarn)


def test_loop_without_scale_loss_does_not_warn_at_loss_scale_one(recwarn):
    kmp.LossScaleOptimizer("sgd", loss_scale=1.0).apply([tf.constant([1.0])], [keras.Variable([1.0])])
    assert not kmp_warnings(recwarn)


def unbuilt_model():
    return keras.Sequential([keras.layers.Dense(2), kmp.layers.Softmax()])


def nested_model():
    return keras.Sequential([keras.Input((4,)), small_model()])


@pytest.mark.parametrize("make_model", [small_model, unbuilt_model, nested_model])
@pytest.mark.parametrize("compiled_before", [True, False])
def test_model_built_before_enable_warns_when_it_trains(make_model, compiled_before):
    model = make_model()
    if compiled_before:
        model.compile("sgd", "sparse_categorical_crossentropy")
    kmp.enable()
    if not compiled_before:
        model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.warns(
        UserWarning, match="'sequential.*no layer that computes in float16. Its layers were created before"
    ) as caught:
        train(model)
    only_message(caught)
    train(model)


def test_train_on_batch_of_a_model_compiled_before_enable_warns():
    model = compiled_model()
    kmp.enable()
    with pytest.warns(UserWarning, match="Its layers were created before") as caught:
        model.train_on_batch(*small_data(1))
    only_message(caught)
    train(model)


def test_float32_model_loaded_under_enable_warns_and_keeps_its_optimizer(tmp_path):
    model = compiled_model("adam")
    train(model)
    model.save(tmp_path / "model.keras")
    kmp.enable()
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is keras.optimizers.Adam
    assert int(loaded.optimizer.iterations) == 20
    with pytest.warns(
        UserWarning, match="no layer that computes in float16. .* loaded or created with dtype='float32'"
    ):
        train(loaded)


def test_model_that_never_trains_or_was_compiled_for_float32_or_bfloat16_does_not_warn(recwarn):
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
    assert not kmp_warnings(recwarn)


@pytest.mark.parametrize("auto_scale_loss", [True, False])
def test_float16_model_compiled_before_enable_warns_when_it_trains(auto_scale_loss):
    keras.config.set_dtype_policy("mixed_float16")
    model = compiled_model(auto_scale_loss=auto_scale_loss)
    kmp.enable()
    match = f"without kmp's loss scale, with keras.{'LossScaleOptimizer' if auto_scale_loss else 'SGD'}. "
    with pytest.warns(UserWarning, match=match) as caught:
        train(model)
    only_message(caught)
    model.compile("sgd", "sparse_categorical_crossentropy")
    train(model)
    assert isinstance(model.optimizer, kmp.LossScaleOptimizer)


def test_float16_model_without_loss_scale_warns_once_even_if_recompiled(enabled):
    model = compiled_model(auto_scale_loss=False)
    with pytest.warns(UserWarning, match="without kmp's loss scale, with keras.SGD. .*without auto_scale") as caught:
        train(model)
    only_message(caught)
    model.compile("sgd", "sparse_categorical_crossentropy", auto_scale_loss=False)
    train(model)


class BuildsInFirstStep(keras.Model):
    """A model whose layers are created in its first step."""

    def build(self, shape):
        self.net = small_model()

    def call(self, x):
        return self.net(x)


def test_layers_built_in_the_first_step_warn_after_it():
    model = BuildsInFirstStep()
    kmp.enable()
    model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.warns(
        UserWarning, match="'builds_in_first_step' computes in float16 and trains without kmp's loss scale"
    ) as caught:
        train(model)
    only_message(caught)


class Gan(keras.Model):
    """A model with its own optimizers and a `compile` like that of Keras' GAN examples."""

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
def test_model_with_its_own_optimizers_warns_of_those_that_do_not_scale(enabled, arguments):
    model = Gan()
    model.compile(keras.optimizers.Adam(), kmp.wrap("sgd"), **arguments)
    with pytest.warns(
        UserWarning,
        match=r"'gan.*without kmp's loss scale, with keras.Adam. .*kmp.wrap",
    ) as caught:
        train(model)
    only_message(caught)
    train(model)


@pytest.mark.parametrize("arguments", [{}, {"optimizer": None}, {"auto_scale_loss": False}])
def test_model_whose_own_optimizers_all_scale_does_not_warn(enabled, arguments):
    model = Gan()
    model.compile(kmp.wrap("adam"), kmp.wrap("sgd"), **arguments)
    train(model)
    assert [optimizer.snapshot().step for optimizer in model.own] == [20, 20]


def test_warning_of_a_traced_loop_points_to_the_line_that_calls_it():
    optimizer, variable = kmp.LossScaleOptimizer("sgd"), keras.Variable([1.0])
    optimizer.build([variable])

    @tf.function
    def step(gradient):
        if tf.reduce_sum(gradient) > 0:
            optimizer.apply_gradients([(gradient, variable)])

    with pytest.warns(UserWarning, match=r"did not go through `scale_loss`") as caught:
        step(tf.constant([1.0]))
    only_message(caught)


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


def softmax_in_custom_layer():
    return [Block()]


def log_softmax_activation():
    return [keras.layers.Dense(2, activation="log_softmax")]


@pytest.mark.parametrize(
    "make_head", [softmax_layer, softmax_activation, nested_softmax, softmax_in_custom_layer, log_softmax_activation]
)
def test_softmax_in_float16_warns_at_compile(enabled, make_head):
    model = keras.Sequential([keras.Input((4,)), *make_head()])
    with pytest.warns(UserWarning, match="computes in float16: the softmax of output layer '") as caught:
        model.compile("sgd", "sparse_categorical_crossentropy")
    assert "kmp.layers.Softmax()" in only_message(caught)
    model.compile("adam", "sparse_categorical_crossentropy")


def test_softmax_in_float32_or_inside_attention_does_not_warn(enabled, recwarn):
    inputs = keras.Input((3, 4))
    x = keras.layers.MultiHeadAttention(2, 4)(inputs, inputs)
    model = keras.Model(inputs, keras.layers.Dense(2, activation="softmax", dtype="float32")(x))
    model.compile("sgd", "sparse_categorical_crossentropy")
    assert not kmp_warnings(recwarn)


@pytest.mark.parametrize(
    ("make_head", "remedy"),
    [(softmax_layer, "Write kmp.layers.Softmax() instead"), (softmax_activation, "Write Dense(..., dtype='float32')")],
)
def test_warning_of_a_softmax_says_what_to_write(enabled, make_head, remedy):
    with pytest.warns(UserWarning, match=re.escape(remedy)):
        keras.Sequential([keras.Input((4,)), *make_head()]).compile("sgd", "mse")


def test_sigmoid_output_in_float16_warns_at_compile(enabled):
    inputs = keras.Input((4,))
    head = keras.Sequential([keras.layers.Dense(3), keras.layers.Activation("sigmoid")], name="head")
    outputs = [keras.layers.Dense(1, "sigmoid", name="mask")(inputs), head(inputs)]
    with pytest.warns(UserWarning, match=r"the sigmoid of output layer 'mask', the sigmoid of output layer") as caught:
        keras.Model(inputs, outputs).compile("sgd", [keras.losses.BinaryCrossentropy(), "bce"])
    assert "Write Dense(..., dtype='float32'), Activation(..., dtype='float32') instead" in only_message(caught)


def test_sigmoid_in_float32_or_inside_the_model_does_not_warn(enabled, recwarn):
    inputs = keras.Input((4,))
    x = inputs * keras.layers.Dense(4, "sigmoid")(inputs)
    outputs = keras.layers.Dense(1, "sigmoid", dtype="float32")(x)
    keras.Model(inputs, outputs).compile("sgd", "binary_crossentropy")
    pixels = keras.layers.Dense(1, "sigmoid")(inputs)  # mean squared error has a gradient where a sigmoid is 0 or 1
    keras.Model(inputs, pixels).compile("sgd", "mse")
    assert not kmp_warnings(recwarn)


def test_sigmoid_of_a_gate_that_is_defined_last_does_not_warn(enabled, recwarn):
    class Gated(keras.Model):
        def __init__(self):
            super().__init__()
            self.head, self.gate = keras.layers.Dense(1), keras.layers.Dense(4, "sigmoid")

        def call(self, x):
            return self.head(x * self.gate(x))

    Gated().compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True))
    assert not kmp_warnings(recwarn)


def test_argument_of_compile_that_is_given_twice_raises(enabled):
    with pytest.raises(TypeError, match="multiple values for argument 'loss'"):
        small_model().compile("sgd", "mse", loss="mae")


def test_softmax_in_float16_does_not_warn_again_when_the_model_is_loaded(enabled, tmp_path, recwarn):
    model = keras.Sequential([keras.Input((4,)), *softmax_activation()])
    model.compile("sgd", "sparse_categorical_crossentropy")
    assert "computes in float16" in str(recwarn.pop(UserWarning).message)
    model.save(tmp_path / "model.keras")
    assert keras.models.load_model(tmp_path / "model.keras").compiled
    assert not [warning for warning in recwarn if "computes in float16" in str(warning.message)]


def test_softmax_in_float16_warns_again_after_disable():
    for _ in range(2):
        with kmp.enable():
            head = keras.layers.Dense(2, activation="softmax", name="head")
            model = keras.Sequential([keras.Input((4,)), head], name="same")
            with pytest.warns(UserWarning, match="'same' computes in float16: the softmax of output layer 'head'"):
                model.compile("sgd", "mse")


def test_loss_in_float16_warns_at_compile_and_in_a_loop(enabled):
    model = small_model()
    with pytest.warns(UserWarning, match="computes in float16: the loss 'mean_squared_error'") as caught:
        model.compile("sgd", keras.losses.MeanSquaredError(dtype="float16"))
    only_message(caught)
    optimizer = kmp.wrap("sgd")
    with pytest.warns(UserWarning, match="The loss was computed in float16") as caught:
        optimizer.scale_loss(tf.constant(1.0, tf.float16))
    only_message(caught)
    optimizer.scale_loss(tf.constant(1.0, tf.float16))


def test_wrapping_an_optimizer_twice_raises():
    with pytest.raises(TypeError, match="would be scaled twice"):
        kmp.LossScaleOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    with pytest.raises(TypeError, match="would be scaled twice"):
        kmp.LossScaleOptimizer(kmp.LossScaleOptimizer("sgd"))


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_float32_and_bfloat16_policies_do_not_warn(policy, recwarn):
    model = small_model()
    with kmp.enable(policy):
        model.compile("sgd", "sparse_categorical_crossentropy")
        train(model)
    assert not kmp_warnings(recwarn)


def test_subclassed_model_is_not_mistaken_for_float32_before_it_is_built(enabled):
    class Subclassed(keras.Model):
        def build(self, shape):
            self.net = small_model()

        def call(self, x):
            return self.net(x)

    model = Subclassed()
    model.compile("sgd", "sparse_categorical_crossentropy")
    train(model)
    assert isinstance(model.optimizer, kmp.LossScaleOptimizer)
    assert model.optimizer.snapshot().step == 20


def test_train_function_of_a_model_with_an_unbuilt_layer_is_wrapped_once(enabled):
    class Partly(keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.unused = keras.layers.Dense(1), keras.layers.Dense(1)

        def build(self, shape):
            self.used.build(shape)

        def call(self, x):
            return self.used(x)

    model = Partly()
    model.compile("sgd", "mse")
    x, y = np.ones((8, 4)), np.ones((8, 1))
    model.train_on_batch(x, y)
    train_function = model.train_function
    model.train_on_batch(x, y)
    assert model.train_function is train_function
