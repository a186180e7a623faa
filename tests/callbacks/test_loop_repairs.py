"""Repairs of custom training loops, and what is said of harm that is not repaired."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import kmp

pytestmark = pytest.mark.usefixtures("enabled")
RANDOM = np.random.default_rng(0)
X = RANDOM.uniform(30, 60, (64, 4)).astype("float32")
Y = (X[:, :1] / X[:, 1:2]).astype("float32")


class Shrink(layers.Layer):
    """Overflows float16 inside, where the result is 0 in place of a normal number."""

    def call(self, x):
        return x / (1.0 + ops.sqrt(ops.mean(ops.square(x * 40.0), -1, keepdims=True)))


class OnlyFloat16(Shrink):
    """Code that does not take another dtype."""

    def call(self, x):
        if x.dtype != tf.float16:
            raise TypeError("only float16")
        return super().call(x)


class Loop:
    """A training loop with a layer that overflows.

    Args:
        layer: The layer.
        is_built: Whether the optimizer has its variables before the first step, which TensorFlow
            would otherwise trace twice.
    """

    def __init__(self, layer=None, is_built=True):
        keras.utils.set_random_seed(0)
        parts = layer or Shrink(name="shrink"), layers.Dense(8, "relu")
        head = layers.Dense(1, dtype="float32")
        self.model = keras.Sequential([keras.Input((4,)), *parts, head])
        self.optimizer = kmp.wrap(keras.optimizers.SGD(1e-3))
        self.model.compile(optimizer=self.optimizer)
        if is_built:
            self.optimizer.build(self.model.trainable_variables)

    @tf.function
    def step(self, x, y):
        model, optimizer = self.model, self.optimizer
        with kmp.guard(optimizer, model):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
                scaled_loss = optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled_loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function
    def steps(self, iterator, count):
        loss = 0.0
        for _ in tf.range(count):
            loss = self.step(*next(iterator))
        return loss

    def train(self, call, batches=4, **options):
        """Calls a step for each batch, under callbacks."""
        every = keras.callbacks.CallbackList(kmp.callbacks.defaults(**options), model=self.model)
        every.on_train_begin()
        every.on_epoch_begin(0)
        for index in range(batches):
            every.on_train_batch_begin(index)
            call()
            every.on_train_batch_end(index)
        every.on_epoch_end(0)
        every.on_train_end()


REPAIRED = "kmp set the layer 'sequential.*/shrink' to float32, and the training continues"


@pytest.mark.parametrize("kind", ["method", "XLA", "many steps"])
def test_a_loop_is_repaired_and_every_function_with_the_layer_is_traced_again(kind):
    loop = Loop(is_built=kind != "method")
    batch = tf.constant(X[:16]), tf.constant(Y[:16])
    iterator = iter(tf.data.Dataset.from_tensors(batch).repeat())
    in_xla = tf.function(loop.step.python_function, jit_compile=True)
    call = {
        "method": lambda: loop.step(*batch),
        "XLA": lambda: in_xla(*batch),
        "many steps": lambda: loop.steps(iterator, tf.constant(1)),
    }[kind]
    predict = tf.function(loop.model)
    predict(X[:16])
    with pytest.warns(UserWarning, match=REPAIRED):
        loop.train(call)
    assert loop.model.layers[0].compute_dtype == "float32"
    exact = loop.model(X[:16])
    assert float(ops.std(exact)) > 0.0  # in float16, x is shrunk to 0
    np.testing.assert_allclose(predict(X[:16]), exact, rtol=1e-2)
    assert float(call()) == pytest.approx(float(ops.mean((exact - Y[:16]) ** 2)), rel=1e-2)


def test_a_layer_that_a_loop_calls_beside_its_model_is_repaired():
    loop = Loop(layers.Rescaling(0.02))
    model, optimizer, shrink = loop.model, loop.optimizer, Shrink(name="shrink")

    @tf.function
    def step(x, y):
        with kmp.guard(optimizer, model):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(1e3 * shrink(x), training=True) - y) ** 2)
                scaled_loss = optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled_loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)

    batch = tf.constant(X[:16]), tf.constant(Y[:16])
    with pytest.warns(UserWarning, match="kmp set the layer 'shrink' to float32"):
        loop.train(lambda: step(*batch))
    assert shrink.compute_dtype == "float32"


def test_functions_that_cannot_be_traced_again_run_as_before():
    loop = Loop()
    model, shrink = loop.model, loop.model.layers[0]

    @tf.function
    def in_float16(x):
        s = tf.zeros((16, 4), tf.float16)
        for _ in tf.range(2):
            s = shrink(x)
        return s + tf.cast(model(x), tf.float16)

    batch = tf.constant(X[:16]), tf.constant(Y[:16])
    before = in_float16(batch[0])
    with pytest.warns(UserWarning, match="(?s)kmp set .*could not be traced .*in_float16"):
        loop.train(lambda: (loop.step(*batch), in_float16(batch[0])))
    assert shrink.compute_dtype == "float32"
    assert in_float16(batch[0]).dtype == before.dtype


def test_a_loop_whose_code_cannot_run_twice_goes_on():
    loop = Loop()
    model, optimizer, once = loop.model, loop.optimizer, {"scale": 1.0}

    @tf.function
    def step(x, y):
        with kmp.guard(optimizer, model):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(once["scale"] * x, training=True) - y) ** 2)
                scaled_loss = optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled_loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)

    batch = tf.constant(X[:16]), tf.constant(Y[:16])
    with pytest.warns(UserWarning, match="kmp cannot repair it.*KeyError"):
        loop.train(lambda: (step(*batch), once.clear()))
    assert optimizer.snapshot().step == 4


@pytest.mark.parametrize("kind", ["input_signature", "objects"])
def test_a_loop_is_repaired_whatever_its_function_gets(kind):
    loop = Loop()
    train = loop.step.python_function

    @tf.function(input_signature=[tf.TensorSpec((None, 4)), tf.TensorSpec((None, 1))])
    def of_signature(x, y):
        return train(x, y)

    @tf.function
    def of_objects(owner, batch, *, scale):
        return train(scale * batch["x"], batch["y"] if "y" in batch else batch["x"][:, :1])

    batch = tf.constant(X[:16]), tf.constant(Y[:16])
    structures = [{"x": batch[0], "y": batch[1]}, {"x": batch[0]}] * 2
    call = {
        "input_signature": lambda: of_signature(*batch),
        "objects": lambda: of_objects(loop, structures.pop(), scale=1.0),
    }[kind]
    with pytest.warns(UserWarning, match="kmp set the layers? 'sequential.*/shrink'"):
        loop.train(call)
    assert loop.model.layers[0].compute_dtype == "float32"


def test_code_that_refuses_float32_goes_on_as_before_and_the_warning_says_why():
    loop = Loop(OnlyFloat16(name="shrink"))
    batch = tf.constant(X[:16]), tf.constant(Y[:16])
    with pytest.warns(UserWarning, match="kmp cannot repair it.*only float16.*What to") as warned:
        loop.train(lambda: loop.step(*batch))
    assert len(warned) == 1
    assert loop.optimizer.snapshot().step == 4
    assert loop.model.layers[0].compute_dtype == "float16"


def test_a_loop_that_calls_a_concrete_function_is_told_to_call_the_function():
    loop = Loop()
    batch = tf.constant(X[:16]), tf.constant(Y[:16])
    function = loop.step
    concrete = []

    def call():
        if not concrete:
            concrete.append(function.get_concrete_function(*batch))
        return concrete[0](*batch)

    with (
        pytest.warns(UserWarning, match=REPAIRED),
        pytest.warns(UserWarning, match="still runs what was traced before kmp set"),
    ):
        loop.train(call, every_n_steps=2)


def test_harm_of_the_loop_itself_is_told_at_its_first_step_with_the_line():
    loop = Loop(layers.Rescaling(0.02, name="small"))
    model, optimizer = loop.model, loop.optimizer

    @tf.function
    def step(x, y):
        with kmp.guard(optimizer, model):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
                scaled_loss = optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled_loss, model.trainable_variables)
            gradients = [tf.clip_by_value(each, -1.0, 1.0) for each in gradients]
            optimizer.apply(gradients, model.trainable_variables)
        return loss

    batch = tf.constant(X[:16]), tf.constant(Y[:16])
    steps = []

    def call():
        steps.append(len(warned.list))
        return step(*batch)

    message = r"(?s)clips or normalizes gradients.*test_loop_repairs.py, line \d+.*What to change"
    with pytest.warns(UserWarning, match=message) as warned:
        loop.train(call)
    assert steps[1:] == [1] * 3  # after the first step, and once
