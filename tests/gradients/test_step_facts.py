"""What the graph of a training step says of its losses and gradients."""

import inspect
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import kmp
from kmp.gradients import step_facts
from kmp.guarding.guarded_step import guard_train_step, guarded_step_of

pytestmark = pytest.mark.usefixtures("enabled")
X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = np.ones((8, 1), "float32")


def loss_of(y, outputs):
    return tf.reduce_mean(tf.square(outputs - y))


def small_model():
    return keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.Dense(1, dtype="float32")])


def guarded(model):
    """Compiles a model with kmp's optimizer, whose variables exist, and guards its step."""
    optimizer = kmp.wrap("sgd")
    optimizer.build(model.trainable_variables)  # a step that creates variables is traced twice
    model.compile(optimizer=optimizer)
    guard_train_step(model)
    return optimizer


def same(optimizer, gradients):
    return gradients


def facts_of_loop(
    change=same, scaled=None, wanted="scaled", last="float32", mode="graph", call=None, **arguments
):
    """Returns the facts of a loop.

    Args:
        change: What it does to gradients, given the optimizer.
        scaled: The scaled loss, of the optimizer, the labels and the outputs.
        wanted: Which loss it differentiates: `"scaled"`, or `"plain"`.
        last: The dtype of the output layer.
        mode: `"graph"`, `"XLA"` or `"eager"`.
        call: What calls the model on a batch; the outputs and a term of the loss.
        **arguments: Of `apply`.
    """
    hidden = [layers.Dense(8, "tanh", name="hidden"), layers.BatchNormalization(name="norm")]
    model = keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(1, dtype=last, name="out")])
    optimizer = guarded(model)
    call = call or (lambda model, x: (model(x, training=True), 0.0))
    scaled = scaled or (lambda optimizer, loss, outputs: optimizer.scale_loss(loss))

    def step(x, y):
        with kmp.guard(optimizer, model):
            with tf.GradientTape() as tape:
                outputs, term = call(model, x)
                loss = tf.cast(loss_of(tf.cast(y, outputs.dtype), outputs), "float32") + term
                losses = {"plain": loss, "scaled": scaled(optimizer, loss, outputs)}
            gradients = tape.gradient(losses[wanted], model.trainable_variables)
            optimizer.apply(change(optimizer, gradients), model.trainable_variables, **arguments)

    if mode != "eager":
        function = tf.function(step, autograph=False, jit_compile=mode == "XLA")
        step = function.get_concrete_function  # traces it, which is all that the facts need
    step(tf.constant(X), tf.constant(Y))
    return guarded_step_of(model).facts_of(optimizer)


def penalized(model, x):
    """Calls a model, and returns a penalty on the gradient of its inputs."""
    with tf.GradientTape() as inner:
        inner.watch(x)
        outputs = model(x, training=True)
    norm = tf.sqrt(tf.reduce_sum(tf.square(inner.gradient(outputs, x)), -1) + 1e-6)
    return outputs, tf.reduce_mean(tf.square(norm - 1.0))


def clipped_after(optimizer, gradients):
    return tf.clip_by_global_norm(optimizer.unscale(gradients), 1.0)[0]


def clipped(optimizer, gradients):
    return tf.clip_by_global_norm(gradients, 1.0)[0]


def clipped_by_value(optimizer, gradients):
    return [tf.clip_by_value(each, -1.0, 1.0) for each in gradients]


def normalized(optimizer, gradients):
    return [each / tf.norm(each) for each in gradients]


def divided(optimizer, gradients):
    return [each / optimizer.loss_scale for each in gradients]


def divided_after(optimizer, gradients):
    return divided(optimizer, optimizer.unscale(gradients))


def noisy(optimizer, gradients):
    return [each + tf.random.normal(tf.shape(each)) for each in gradients]


def two_losses(optimizer, loss, outputs):
    return optimizer.scale_loss(loss) + optimizer.scale_loss(tf.reduce_mean(tf.abs(outputs)))


def one_of_two(optimizer, loss, outputs):
    return optimizer.scale_loss(loss) + tf.reduce_mean(tf.abs(outputs))


def twice(optimizer, loss, outputs):
    return optimizer.scale_loss(optimizer.scale_loss(loss))


RIGHT = {
    "plain": {},
    "XLA": {"mode": "XLA"},
    "clip after unscale": {"change": clipped_after},
    "two scaled losses": {"scaled": two_losses},
    "gradient penalty": {"call": penalized},
    "divided, and said so": {"change": divided, "unscaled": True},
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_sound_loop_is_known_to_be_sound(name):
    assert facts_of_loop(**RIGHT[name]) == step_facts.StepFacts(
        scaling="right", operations_in_16_bits=[]
    )


FAULTS = {
    "clip": (clipped, {"change": clipped}, "nonlinear", "Minimum"),
    "clip by value": (clipped_by_value, {"change": clipped_by_value}, "nonlinear", "Minimum"),
    "clip under XLA": (clipped, {"change": clipped, "mode": "XLA"}, "nonlinear", "Minimum"),
    "norm": (normalized, {"change": normalized}, "nonlinear", "RealDiv"),
    "division": (divided, {"change": divided}, "divided", "RealDiv"),
    "division after unscale": (divided, {"change": divided_after}, "divided", "RealDiv"),
    "noise": (noisy, {"change": noisy}, "added", "AddV2"),
    "one of two losses": (one_of_two, {"scaled": one_of_two}, "unscaled", "AddV2"),
    "twice": (twice, {"scaled": twice}, "multiplied", "Mul"),
    "not divided": (None, {"unscaled": True}, "multiplied", "Mul"),
    "another loss": (None, {"wanted": "plain"}, "unscaled", "Mul"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_operation_and_line(name):
    function, arguments, scaling, operation = FAULTS[name]
    facts = facts_of_loop(**arguments)
    assert (facts.scaling, facts.operation.operation, facts.are_all) == (scaling, operation, True)
    assert Path(facts.operation.file) == Path(__file__)
    lines, first = inspect.getsourcelines(function or facts_of_loop)
    assert first <= facts.operation.line < first + len(lines)
    assert {path.split("/")[-2] for path in facts.variables} == {"hidden", "norm", "out"}


def test_variables_of_a_part_of_the_loss_that_is_not_scaled_are_named():
    def scaled(optimizer, loss, outputs):
        return optimizer.scale_loss(loss) + tf.reduce_sum(tf.square(kernels[0]))

    def call(model, x):
        kernels.append(model.get_layer("out").kernel)
        return model(x, training=True), 0.0

    kernels = []
    facts = facts_of_loop(scaled=scaled, call=call)
    assert (facts.scaling, facts.are_all) == ("unscaled", False)
    assert [path.split("/")[-2:] for path in facts.variables] == [["out", "kernel"]]


def test_operations_between_outputs_and_loss_in_16_bits_are_named():
    found = facts_of_loop(last="float16").operations_in_16_bits
    lines, first = inspect.getsourcelines(loss_of)
    assert {(each.operation, each.dtype) for each in found} >= {
        ("Sub", "float16"),
        ("Square", "float16"),
    }
    assert all(first <= each.line < first + len(lines) for each in found)


@pytest.mark.parametrize("is_traced_before", [False, True])
def test_the_loss_of_a_model_that_a_function_of_the_step_calls_is_not_known(is_traced_before):
    functions = []

    def call(model, x):
        if not functions:
            functions.append(tf.function(lambda x: model(x, training=True)))
        if is_traced_before:
            with tf.init_scope():
                functions[0](tf.constant(X))
        return functions[0](x), 0.0

    facts = facts_of_loop(call=call, last="float16")
    assert (facts.scaling, facts.operations_in_16_bits) == ("right", None)


def sums_of(gradients, sums=[]):  # noqa: B006 (the variables of the loop)
    if not sums:
        with tf.init_scope():
            sums += [tf.Variable(tf.zeros(each.shape), trainable=False) for each in gradients]
    return sums


def summed(optimizer, gradients):
    sums = sums_of(gradients)
    for total, each in zip(sums, gradients, strict=True):
        total.assign_add(each)
    return [tf.identity(total) for total in sums]


def added_to_sums(optimizer, gradients):
    """Sums gradients over steps; the variables are assigned after they are read."""
    sums = sums_of(gradients)
    totals = [total + each for total, each in zip(sums, gradients, strict=True)]
    for total, value in zip(sums, totals, strict=True):
        total.assign(value)
    return totals


def unscaled_sums(optimizer, gradients):
    return optimizer.unscale([tf.identity(total) for total in sums_of(gradients)])


@pytest.mark.parametrize("change", [summed, added_to_sums, unscaled_sums])
def test_gradients_that_a_loop_sums_over_steps_are_not_known(change):
    assert facts_of_loop(change=change).scaling == "unknown"


def test_an_eager_loop_has_no_facts():
    assert facts_of_loop(mode="eager") is None


def test_gradients_from_a_function_of_the_step_are_not_known():
    model = small_model()
    optimizer = guarded(model)

    @tf.function
    def gradients_of(x, y):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(loss_of(y, model(x, training=True)))
        return tape.gradient(scaled, model.trainable_variables)

    @tf.function
    def step(x, y):
        with kmp.guard(optimizer, model):
            optimizer.apply(gradients_of(x, y), model.trainable_variables)

    step.get_concrete_function(tf.constant(X), tf.constant(Y))
    assert guarded_step_of(model).facts_of(optimizer) is None


def test_the_batch_of_a_loop_is_what_its_function_gets():
    model = small_model()
    optimizer = guarded(model)

    def train(x, y):
        with kmp.guard(optimizer, model):
            with tf.GradientTape() as tape:
                scaled = optimizer.scale_loss(loss_of(y, model(x, training=True)))
            gradients = tape.gradient(scaled, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)

    @tf.function
    def of_iterator(iterator):
        train(*next(iterator))

    iterator = iter(tf.data.Dataset.from_tensors((X, Y)).repeat())
    for step, arguments in [(tf.function(train), (X, Y)), (of_iterator, (iterator,))]:
        step.get_concrete_function(*arguments)
        graph = guarded_step_of(model).graphs_of(optimizer)[0]
        assert [tuple(each.shape) for each in graph.data] == [X.shape, Y.shape]


def test_each_of_two_guards_in_a_function_has_the_facts_of_its_optimizer():
    models = [small_model(), small_model()]
    optimizers = [guarded(model) for model in models]

    @tf.function
    def step(x, y):
        with kmp.guard(optimizers[0], models[0]), kmp.guard(optimizers[1], models[1]):
            for model, optimizer in zip(models, optimizers, strict=True):
                with tf.GradientTape() as tape:
                    scaled = optimizer.scale_loss(loss_of(y, model(x, training=True)))
                gradients = tape.gradient(scaled, model.trainable_variables)
                if optimizer is optimizers[1]:
                    gradients = clipped(optimizer, gradients)
                optimizer.apply(gradients, model.trainable_variables)

    step.get_concrete_function(tf.constant(X), tf.constant(Y))
    pairs = zip(models, optimizers, strict=True)
    found = [guarded_step_of(model).facts_of(optimizer).scaling for model, optimizer in pairs]
    assert found == ["right", "nonlinear"]


class Gan(keras.Model):
    """Two optimizers, each with its own loss scale."""

    def __init__(self, mistake):
        super().__init__()
        self.mistake = mistake
        self.generator = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="made")])
        self.critic = keras.Sequential([keras.Input((4,)), layers.Dense(1, dtype="float32")])

    def compile(self, g_optimizer, c_optimizer, **options):
        super().compile(**options)
        self.g_optimizer, self.c_optimizer = g_optimizer, c_optimizer

    def train_step(self, real):
        with tf.GradientTape(persistent=True) as tape:
            fake = self.critic(self.generator(real))
            g_scaled = self.g_optimizer.scale_loss(-tf.reduce_mean(fake))
            c_scaled = self.c_optimizer.scale_loss(tf.reduce_mean(fake - self.critic(real)))
        of_critic = g_scaled if self.mistake else c_scaled
        weights = self.generator.trainable_variables
        self.g_optimizer.apply(tape.gradient(g_scaled, weights), weights)
        weights = self.critic.trainable_variables
        self.c_optimizer.apply(tape.gradient(of_critic, weights), weights)
        return {"loss": tf.reduce_mean(fake)}


@pytest.mark.parametrize("mistake", [False, True])
def test_each_optimizer_of_a_gan_has_its_own_loss_scale(mistake):
    gan = Gan(mistake)
    gan.compile(keras.optimizers.SGD(0.01), keras.optimizers.SGD(0.01), jit_compile=False)
    gan.g_optimizer.build(gan.generator.trainable_variables)
    gan.c_optimizer.build(gan.critic.trainable_variables)
    gan.fit(X, verbose=0)
    step = guarded_step_of(gan)
    found = [step.facts_of(each).scaling for each in (gan.g_optimizer, gan.c_optimizer)]
    assert found == ["right", "unscaled" if mistake else "right"]


def convolutions():
    x = inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, padding="same")(x)
    x = layers.Add()([x, layers.ReLU()(layers.BatchNormalization()(x))])
    x = layers.GlobalAveragePooling2D()(layers.MaxPooling2D()(x))
    return keras.Model(inputs, layers.Dense(1, dtype="float32")(layers.Dropout(0.2)(x)))


def recurrent():
    hidden = [layers.LSTM(4, return_sequences=True), layers.Bidirectional(layers.GRU(4))]
    return keras.Sequential([keras.Input((5, 3)), *hidden, layers.Dense(1, dtype="float32")])


def attention():
    inputs = keras.Input((5, 8))
    x = layers.LayerNormalization()(inputs + layers.MultiHeadAttention(2, 4)(inputs, inputs))
    x = layers.GlobalAveragePooling1D()(layers.Dense(8, "gelu")(x))
    return keras.Model(inputs, layers.Dense(1, dtype="float32")(x))


def regularized():
    hidden = [
        layers.Dense(8, "swish", kernel_regularizer="l2"),
        layers.Dense(8, activity_regularizer="l2"),
    ]
    return keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(1, dtype="float32")])


@pytest.mark.parametrize(
    ("make", "options", "settings"),
    [
        (convolutions, {}, {}),
        (recurrent, {"jit_compile": False}, {"clipnorm": 1.0}),
        (attention, {"steps_per_execution": 2}, {"gradient_accumulation_steps": 2}),
        (regularized, {"jit_compile": True}, {"global_clipnorm": 1.0}),
    ],
)
def test_the_training_step_of_keras_scales_right(make, options, settings):
    model = make()
    model.compile(keras.optimizers.SGD(**settings), "mse", **options)
    x = np.zeros((8, *model.input_shape[1:]), "float32")
    model.fit(x, Y, batch_size=4, verbose=0)
    facts = guarded_step_of(model).facts_of(model.optimizer)
    assert (facts.scaling, facts.operations_in_16_bits) == ("right", [])


def test_what_fails_while_the_graph_is_read_is_not_known(monkeypatch):
    monkeypatch.setattr(step_facts, "powers_of", None)  # not callable
    assert facts_of_loop() is None
