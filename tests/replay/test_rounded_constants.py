"""Constants that a program makes in 16 bits, so that float32 has no more of them."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from passes import passes_of

import kmp
from kmp.callbacks import StuckError, defaults
from kmp.callbacks.batch_replayer import CRITERIA
from kmp.replay import StepContext, replay_batch

pytestmark = pytest.mark.usefixtures("enabled")
X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
X[::4] = 0.0
Y = X[:, :1] + 1.0
KEPT = np.cumprod(1.0 - np.linspace(0.006, 0.14, 1000) ** 2)


class With(keras.layers.Layer):
    """Computes with a constant of its own."""

    def __init__(self, constant, function):
        super().__init__(name="own")
        self.constant, self.function = constant, function

    def call(self, x):
        return self.function(x, self.constant)


class Denoiser(keras.Sequential):
    """Divides by the square root of what noise levels leave of it."""

    kept = None

    def train_step(self, data):
        x, levels = data
        kept = tf.gather(self.kept, levels)[:, None]
        x = tf.cast(x, self.compute_dtype)
        with tf.GradientTape() as tape:
            guess = (x - self(x, training=True)) / tf.sqrt(1.0 - kept)
            loss = self.optimizer.scale_loss(tf.reduce_mean(tf.square(tf.cast(guess, "float32"))))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


def line_with(text, function):
    lines, first = inspect.getsourcelines(function)
    return first + next(index for index, line in enumerate(lines) if text in line)


def replayed(constant, function):
    keras.utils.set_random_seed(0)
    hidden, head = keras.layers.Dense(4, use_bias=False), keras.layers.Dense(1)
    model = keras.Sequential(
        [keras.Input((4,)), hidden, With(constant, function), head], name="model"
    )
    model.compile("sgd", "mse")
    return replay_batch(passes_of(model, (X, Y)), StepContext(1, 1024.0), CRITERIA)[0]


def small(*values):
    return tf.constant([1e-8 * each for each in values] or 1e-8, "float16")


def divided(x, constant):
    return x / (keras.ops.sum(x * x, axis=-1, keepdims=True) + constant)


def first_of(x, constant):
    return x / tf.gather(constant, tf.zeros(tf.shape(x)[:1], tf.int32))[:, None]


def in_loop(x, constant):
    step = lambda index, y: (index + 1, y / constant[0])  # noqa: E731
    return tf.while_loop(lambda index, y: index < 2, step, [0, x])[1]


@pytest.mark.parametrize(
    ("constant", "function", "operation", "use"),
    [
        (small(), divided, "RealDiv", "AddV2"),
        (small(), lambda x, c: tf.math.log(x * x + c), "Log", "AddV2"),
        (small(), lambda x, c: tf.sqrt(x * x + c), "SqrtGrad", "AddV2"),
        (np.zeros(4, "float16"), divided, "RealDiv", "AddV2"),
        (tf.cast(np.linspace(1e-9, 1.0, 1000), "float16"), first_of, "RealDiv", "GatherV2"),
        (
            tf.cast(np.linspace(1e-9, 1.0, 1000), "float16"),
            in_loop,
            "StatelessWhile",
            "StatelessWhile",
        ),
    ],
)
def test_rounded_constant_of_a_layer_is_found(constant, function, operation, use):
    result = replayed(constant, function)
    assert not result.is_finite_in_float32
    (found,) = result.rounded.constants
    name = "own.constant" if isinstance(constant, tf.Tensor) else ""
    assert (found.dtype, found.shape, found.name) == ("float16", list(constant.shape), name)
    assert (found.smallest, found.largest, found.nonfinite) == (0.0, float(np.max(constant)), "")
    assert found.use.operation == use
    assert (result.rounded.operation.layer, result.rounded.operation.operation) == (
        "model/own",
        operation,
    )


@pytest.mark.parametrize("shape", [(), (4,), (64, 4)])
def test_constant_that_is_infinite_is_found(shape):
    with np.errstate(over="ignore"):
        constant = tf.constant(np.full(shape, 1e5).astype("float16"))
    result = replayed(constant, lambda x, c: x * (c[0] if len(shape) == 2 else c))
    (found,) = result.rounded.constants
    assert (found.smallest, found.largest, found.nonfinite) == (None, None, "Inf")
    assert (found.shape, found.use.file) == (list(shape), __file__)


def test_only_the_constants_that_are_needed_are_named():
    constants = [small(1, 1, 1, 1), tf.constant(0.3, "float16"), small()]
    result = replayed(constants, lambda x, c: c[1] * x / (x * x + c[2]) + x / c[0])
    assert [found.shape for found in result.rounded.constants] == [[], [4]]


MASK = np.where(np.eye(4), 0.0, -np.inf).astype("float16")


@pytest.mark.parametrize(
    ("constant", "function"),
    [
        (tf.constant(0.3, "float16"), lambda x, c: tf.math.log(tf.nn.relu(x * 0.0 - c)) + c),
        (tf.constant(MASK), lambda x, c: tf.math.log(0.0 * tf.nn.softmax(x[:, None] + c)[:, 0])),
        # Zeros and ones, such as a mask, are exact.
        (tf.constant([0, 1, 0, 0], "float16"), lambda x, c: x / tf.reduce_sum(c * c[::-1])),
        (tf.constant(1.0, "float16"), lambda x, c: tf.math.log(c - tf.ones_like(x))),
        # A constant that the step rounds has its exact value in float32.
        (1e-8, lambda x, c: tf.math.log(x * 0.0)),
    ],
)
def test_constant_without_harm_is_not_named(constant, function):
    result = replayed(constant, function)
    assert not result.is_finite_in_float32
    assert result.operations
    assert result.rounded is None


@pytest.mark.filterwarnings("ignore:Step 1 was skipped")
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_training_with_a_rounded_schedule_ends_with_its_name_and_line(policy, tmp_path):
    kmp.enable(policy)
    model = Denoiser([keras.Input((4,)), keras.layers.Dense(4)], name="denoiser")
    model.kept = tf.cast(KEPT, model.compute_dtype)
    model.compile("sgd")
    levels = np.zeros((32,), "int32")
    with pytest.raises(StuckError) as caught:
        model.fit(
            np.tile(X, (4, 1)),
            np.tile(levels, 4),
            batch_size=32,
            epochs=5,
            verbose=0,
            callbacks=defaults(log_dir=tmp_path, patience=10),
        )
    line = line_with("1.0 - kept", Denoiser)
    dtype = model.compute_dtype
    title = (
        f"RealDiv in {__file__}, line {line}, divides by 0: the program makes the constant"
        f" 'denoiser.kept' in {dtype}, before the training step gets it."
    )
    assert title in str(caught.value)
    (problem,) = kmp.advise(kmp.load_run(tmp_path)).problems
    assert (problem.cause, problem.severity, problem.title) == ("constant", "error", title)
    assert problem.location == "the loss function"
    gets = f"GatherV2 in {__file__}, line {line_with('tf.gather', Denoiser)}, gets the constant"
    smallest = float(np.min(model.kept))
    assert f"{gets} 'denoiser.kept' (shape (1000,), {smallest:.3g} to 1)" in problem.evidence
    assert "dtype='float32'" in problem.note

    model = Denoiser([keras.Input((4,)), keras.layers.Dense(4)])
    model.kept = tf.cast(KEPT, "float32")
    model.compile("sgd")
    history = model.fit(X, levels, batch_size=32, verbose=0).history
    assert np.isfinite(history["loss"]).all()
