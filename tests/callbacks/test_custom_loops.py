"""What callbacks find in a custom training loop, from the gradients of the model's outputs."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import values
from keras import layers

import kmp

pytestmark = pytest.mark.usefixtures("enabled")
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(40, 4)).astype("float32")
Y = RANDOM.integers(0, 3, 40)


class Loop:
    """A training loop with a cross-entropy.

    Args:
        change: What it does to the gradients of the scaled loss, given the optimizer.
        loss_of: The loss of the labels and the outputs; `None` for a cross-entropy.
        calls: How often the model is called in a step.
        units: The width of the hidden layer.
        inner: The optimizer.
        settings: Of the loss scale.
    """

    def __init__(
        self,
        change=lambda optimizer, gradients: gradients,
        loss_of=None,
        calls=1,
        units=8,
        inner="sgd",
        **settings,
    ):
        keras.utils.set_random_seed(0)
        hidden = layers.Dense(units, "relu", name="hidden")
        self.model = keras.Sequential([keras.Input((4,)), hidden, layers.Dense(3, name="logits")])
        self.optimizer = kmp.wrap(inner, **settings)
        self.model.compile(optimizer=self.optimizer)
        self.loss_of = loss_of or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.change, self.calls = change, calls

    def step(self, x, y):
        model, optimizer = self.model, self.optimizer
        with kmp.guard(optimizer, model):
            with tf.GradientTape() as tape:
                losses = [self.loss_of(y, model(x, training=True)) for _ in range(self.calls)]
                scaled_loss = optimizer.scale_loss(tf.add_n(losses))
            gradients = tape.gradient(scaled_loss, model.trainable_variables)
            optimizer.apply(self.change(optimizer, gradients), model.trainable_variables)

    def train(self, steps=12, mode="graph", callbacks=None, rows=40, **options):
        """Trains on the same batch again and again, and returns the run."""
        step = self.step
        if mode != "eager":
            step = tf.function(step, autograph=False, jit_compile=mode == "XLA")
        options = {"repair": False, "on_nonfinite": "ignore", "every_n_steps": 2} | options
        own = kmp.callbacks.defaults(**options) if callbacks is None else callbacks
        every = keras.callbacks.CallbackList(own, model=self.model)
        every.on_train_begin()
        every.on_epoch_begin(0)
        for index in range(steps):
            every.on_train_batch_begin(index)
            step(tf.constant(X[:rows]), tf.constant(Y[:rows]))
            every.on_train_batch_end(index)
        every.on_epoch_end(0)
        every.on_train_end()
        return own[0].run if own else None


def divided(optimizer, gradients):
    return [each / optimizer.loss_scale for each in gradients]


def clipped(optimizer, gradients):
    return tf.clip_by_global_norm(gradients, 1.0)[0]


def clipped_by_value(optimizer, gradients):
    return [tf.clip_by_value(each, -1.0, 1.0) for each in gradients]


def clipped_in_turn(optimizer, gradients):
    return tf.clip_by_global_norm(optimizer.unscale(gradients), 1e-4)[0]


def averaged(optimizer, gradients):
    return [each / 4.0 for each in gradients]


@pytest.mark.parametrize("mode", ["graph", "XLA"])
def test_gradients_of_a_loop_are_compared_with_those_of_float32(mode):
    run = Loop().train(mode=mode)
    (step, first), *_ = run.comparisons
    assert (step, first.examples, first.is_forward_only, first.loss) == (1, 32, False, None)
    layers_of = {each.layer.rpartition("/")[2] for each in first.gradient_errors}
    assert layers_of == {"hidden", "logits"}
    assert max(each.error for each in first.gradient_errors) < 0.01
    # An estimate for the whole batch, from a part of it.
    (reference, *_), (sample, *_) = run.references, run.samples
    np.testing.assert_allclose(reference.total_norm, sample.total_norm, rtol=0.5)
    assert kmp.advise(run).verdict.startswith("float16 does not hurt this run: ")


def test_loss_of_a_loop_that_may_be_in_16_bits_is_not_known():
    def loss_of(y, outputs):
        return tf.cast(tf.reduce_mean(tf.square(outputs)), tf.float32)

    for loop, mode in [(Loop(loss_of=loss_of), "graph"), (Loop(), "eager")]:
        run = loop.train(mode=mode)
        assert all(replay.loop.reads_16_bits for _, replay in run.comparisons)
        advice = kmp.advise(run)
        assert advice.problems == ()
        unknown = "Not measured: what the loss of the training loop loses, which may be computed"
        assert unknown in advice.verdict, advice.verdict


@pytest.mark.parametrize(
    ("change", "mode", "times"),
    [
        (divided, "graph", pytest.approx(32768, rel=0.05)),
        (divided, "eager", pytest.approx(32768, rel=0.05)),
        (clipped, "graph", pytest.approx(20000, rel=0.9)),
        (clipped_by_value, "XLA", pytest.approx(5000, rel=0.9)),
    ],
)
def test_scaled_gradients_that_a_loop_makes_smaller_leave_a_doubt_with_the_factor(
    change, mode, times
):
    advice = kmp.advise(Loop(change).train(mode=mode, rows=32))
    assert advice.problems == ()
    doubt = "whether the training loop scales, clips and unscales gradients in the right order"
    assert doubt in advice.verdict
    pattern = r"([\d,]+) times smaller than those of the replay, and the loss scale is 32,768;"
    (found,) = re.findall(pattern, advice.verdict)
    assert int(found.replace(",", "")) == times


def test_gradients_that_a_loop_makes_zero_leave_a_doubt():
    run = Loop(lambda optimizer, gradients: [0.0 * each for each in gradients]).train()
    assert "gradients that are all zero, unlike those of the replay" in kmp.advise(run).verdict


@pytest.mark.parametrize("change", [clipped_in_turn, averaged])
def test_gradients_that_a_loop_may_change_are_no_doubt(change):
    advice = kmp.advise(Loop(change).train())
    assert advice.verdict.startswith("float16 does not hurt this run: "), advice.verdict


def test_gradients_that_do_not_come_through_the_outputs_leave_a_doubt():
    loop = Loop()
    other = layers.Dense(3, name="other")
    other.build((None, 4))

    def step(x, y):
        with kmp.guard(loop.optimizer, loop.model):
            with tf.GradientTape() as tape:
                loss = loop.loss_of(y, loop.model(x, training=True)) + loop.loss_of(y, other(x))
                scaled_loss = loop.optimizer.scale_loss(loss)
            variables = [*loop.model.trainable_variables, *other.trainable_variables]
            loop.optimizer.apply(tape.gradient(scaled_loss, variables), variables)

    loop.step = step
    advice = kmp.advise(loop.train())
    assert "gradients of layer 'other' that do not come through the outputs" in advice.verdict


def test_gradients_of_outputs_that_float16_flushes_are_no_reference():
    def small(y, outputs):
        crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return 1e-7 * crossentropy(y, outputs)

    run = Loop(loss_of=small, loss_scale=1.0).train()
    assert all(replay.is_forward_only for _, replay in run.comparisons)
    assert kmp.advise(run).verdict.startswith("It is not known"), kmp.advise(run).verdict


def test_logits_that_a_loss_reads_in_place_of_a_softmax_are_watched():
    loop = Loop(loss_of=keras.losses.SparseCategoricalCrossentropy())
    loop.model.add(layers.Softmax(dtype="float32"))
    run = loop.train()
    assert run.comparisons
    assert all(replay.gradient_errors for _, replay in run.comparisons)
    assert kmp.advise(run).verdict.startswith("float16 does not hurt this run: ")


class UpdatesOutside(Loop):
    """The update is in another function than the guard."""

    def train(self, **options):
        self.gradients_of = tf.function(self.gradients_of)
        self.update = tf.function(self.update)
        return super().train(mode="eager", **options)

    def gradients_of(self, x, y):
        with kmp.guard(self.optimizer, self.model), tf.GradientTape() as tape:
            scaled = self.optimizer.scale_loss(self.loss_of(y, self.model(x, training=True)))
        return tape.gradient(scaled, self.model.trainable_variables)

    def update(self, gradients):
        self.optimizer.apply(gradients, self.model.trainable_variables)

    def step(self, x, y):
        self.update(self.gradients_of(x, y))


def test_a_loop_that_updates_outside_of_the_guard_is_compared():
    loop = UpdatesOutside()
    loop.optimizer.build(loop.model.trainable_variables)
    run = loop.train(steps=20)
    assert run.comparisons
    assert run.last("replay_error") is None


class InnerFunction(Loop):
    """The guard is eager, the tape is in a function."""

    def train(self, **options):
        @tf.function
        def gradients_of(x, y):
            with tf.GradientTape() as tape:
                scaled = self.optimizer.scale_loss(self.loss_of(y, self.model(x, training=True)))
            return tape.gradient(scaled, self.model.trainable_variables)

        self.gradients_of = gradients_of
        return super().train(mode="eager", **options)

    def step(self, x, y):
        with kmp.guard(self.optimizer, self.model):
            self.optimizer.apply(self.gradients_of(x, y), self.model.trainable_variables)


class InBranch(Loop):
    """The model is called in a branch of the graph."""

    def step(self, x, y):
        model, optimizer = self.model, self.optimizer
        with kmp.guard(optimizer, model):
            with tf.GradientTape() as tape:
                is_large = tf.reduce_sum(x) > 1e9
                outputs = tf.cond(is_large, lambda: model(x) * 2, lambda: model(x, training=True))
                scaled_loss = optimizer.scale_loss(self.loss_of(y, outputs))
            gradients = tape.gradient(scaled_loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)


class Jacobian(Loop):
    """Differentiates each part of the loss."""

    def step(self, x, y):
        model, optimizer = self.model, self.optimizer
        with kmp.guard(optimizer, model):
            with tf.GradientTape(persistent=True) as tape:
                outputs = model(x, training=True)
                parts = tf.stack([self.loss_of(y, outputs), 0.1 * self.loss_of(y, outputs)])
                scaled = optimizer.scale_loss(parts)
            jacobians = tape.jacobian(scaled, model.trainable_variables)
            gradients = [tf.reduce_sum(each, 0) for each in jacobians]
            optimizer.apply(gradients, model.trainable_variables)


@pytest.mark.parametrize(
    ("kind", "options"), [(InnerFunction, {}), (InBranch, {}), (Jacobian, {"mode": "eager"})]
)
def test_outputs_of_another_graph_end_and_change_no_training(kind, options):
    weights = []
    for callbacks in (None, []):
        loop = kind()
        loop.train(callbacks=callbacks, steps=4, **options)
        weights.append(values(loop.model.variables))
    for watched, alone in zip(*weights, strict=True):
        np.testing.assert_array_equal(watched, alone)


def test_outputs_with_other_rows_than_the_inputs_are_compared_under_xla():
    def of_rows(y, outputs):
        return tf.reduce_mean(tf.square(tf.cast(outputs, "float32")))

    loop = Loop(loss_of=of_rows)
    loop.model.add(layers.Lambda(lambda x: tf.reshape(x, (-1,))))
    run = loop.train(mode="XLA")
    assert run.comparisons
    assert all(replay.is_forward_only for _, replay in run.comparisons)


def test_a_step_with_two_calls_is_compared_in_its_forward_pass():
    run = Loop(calls=2).train()
    assert run.comparisons
    assert all(replay.is_forward_only for _, replay in run.comparisons)
    assert run.last("replay_error") is None


def test_a_step_whose_loss_is_not_finite_is_replayed_in_its_forward_pass():
    run = Loop(loss_of=lambda y, outputs: tf.reduce_sum(tf.cast(outputs, "float32")) * np.inf)
    run = run.train()
    assert run.replays
    assert all(each.is_forward_only and each.is_finite for _, each in run.replays)


def test_gradients_that_overflow_in_a_loop_are_those_of_the_backward_pass():
    loop = Loop(loss_scale=2.0**20)
    loop.model.layers[-1].kernel.assign(200.0 * loop.model.layers[-1].kernel)
    run = loop.train()
    _, replay = run.replays[-1]
    assert (replay.is_finite_forward, replay.is_finite, replay.is_finite_in_float32) == (
        True,
        False,
        True,
    )
    assert kmp.advise(run)[0].cause == "scale_too_large"


@pytest.mark.parametrize("mode", ["eager", "graph", "XLA"])
def test_watching_the_outputs_changes_no_bit_of_a_training(mode):
    weights = []
    for callbacks in (None, []):
        loop = Loop(inner="adam")
        loop.train(mode=mode, callbacks=callbacks)
        weights.append(values(loop.model.variables))
    for watched, alone in zip(*weights, strict=True):
        np.testing.assert_array_equal(watched, alone)


def test_large_outputs_are_not_kept():
    keras.utils.set_random_seed(0)
    loop = Loop()
    wide = keras.Sequential([keras.Input((4,)), layers.Dense(2**18, name="wide")])
    wide.compile(optimizer=loop.optimizer)
    loop.model = wide
    run = loop.train(steps=2)
    assert run.comparisons
    assert all(replay.is_forward_only for _, replay in run.comparisons)
