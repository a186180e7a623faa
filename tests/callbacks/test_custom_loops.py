"""What callbacks find in a custom training loop."""

import inspect
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
        is_built: Whether the optimizer has its variables before the first step, which TensorFlow
            would otherwise trace twice.
        settings: Of the loss scale.
    """

    def __init__(
        self,
        change=lambda optimizer, gradients: gradients,
        loss_of=None,
        calls=1,
        units=8,
        inner="sgd",
        is_built=True,
        **settings,
    ):
        keras.utils.set_random_seed(0)
        hidden = layers.Dense(units, "relu", name="hidden")
        self.model = keras.Sequential([keras.Input((4,)), hidden, layers.Dense(3, name="logits")])
        self.optimizer = kmp.wrap(inner, **settings)
        self.model.compile(optimizer=self.optimizer)
        if is_built:
            self.optimizer.build(self.model.trainable_variables)
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

    def train(self, steps=4, mode="graph", callbacks=None, rows=40, **options):
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


def assert_trains_alike(make, **options):
    """Trains two loops, one of them with callbacks; returns the run of that one."""
    watched, alone = make(), make()
    run = watched.train(**options)
    alone.train(callbacks=[], **options)
    for value, other in zip(
        *(values(each.model.variables) for each in (watched, alone)), strict=True
    ):
        np.testing.assert_array_equal(value, other)
    return run


def test_loss_and_gradients_of_a_loop_are_compared_with_those_of_float32_and_no_bit_changes():
    run = assert_trains_alike(lambda: Loop(inner="adam", is_built=False), steps=12)
    (step, first), *_ = run.comparisons
    assert (step, first.examples, first.is_forward_only) == (1, 32, False)
    assert first.loss != first.float32_loss
    assert first.loss == pytest.approx(first.float32_loss, rel=1e-3)
    layers_of = {each.layer.rpartition("/")[2] for each in first.gradient_errors}
    assert layers_of == {"hidden", "logits"}
    assert max(each.error for each in first.gradient_errors) < 0.01
    # An estimate for the whole batch, from a part of it.
    (reference, *_), (sample, *_) = run.references, run.samples
    np.testing.assert_allclose(reference.total_norm, sample.total_norm, rtol=0.5)
    assert kmp.advise(run).verdict.startswith("float16 does not hurt this run: ")


def test_loss_of_a_loop_in_16_bits_is_compared():
    def loss_of(y, outputs):
        return tf.cast(tf.reduce_mean(tf.square(outputs)), tf.float32)

    run = Loop(loss_of=loss_of).train()
    for _, replay in run.comparisons:
        assert replay.loss == float(np.float16(replay.loss)) != replay.float32_loss
    assert kmp.advise(run).verdict.startswith("float16 does not hurt this run: ")


def test_an_eager_loop_is_not_compared_and_the_verdict_says_why():
    run = Loop(divided).train(mode="eager")
    assert not run.replays
    advice = kmp.advise(run)
    assert advice.problems == ()
    assert advice.verdict.startswith("It is not known whether float16 hurts this run. ")
    why = "none was captured: kmp sees the training step of a loop only in a `tf.function`"
    assert why in advice.verdict


UNSCALES = "gradients = optimizer.unscale(gradients)"


@pytest.mark.parametrize(
    ("change", "times", "operation", "edit"),
    [
        (divided, pytest.approx(32768), "RealDiv", "optimizer.apply(unscaled=True)"),
        (clipped, pytest.approx(20000, rel=0.9), "Minimum", UNSCALES),
        pytest.param(
            *(clipped_by_value, pytest.approx(5000, rel=0.9), "Minimum", UNSCALES),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_what_a_loop_does_to_scaled_gradients_is_named_with_its_line(
    change, times, operation, edit
):
    line = inspect.getsourcelines(change)[1] + 1
    with pytest.warns(UserWarning, match=f"{operation} in .*, line {line} "):
        run = Loop(change).train(rows=32)
    (problem,) = kmp.advise(run).problems
    assert (problem.cause, problem.severity, problem.change) == ("unscaled_loss", "error", edit)
    assert f"{operation} in {__file__}, line {line}" in problem.evidence
    (found,) = re.findall(r"are ([\d,]+) times too small", problem.evidence)
    assert int(found.replace(",", "")) == times


@pytest.mark.exhaustive
def test_a_clip_of_scaled_gradients_that_changes_none_is_a_warning():
    def clipped_high(optimizer, gradients):
        return tf.clip_by_global_norm(gradients, 1e9)[0]

    (problem,) = kmp.advise(Loop(clipped_high).train(rows=32)).problems
    assert (problem.cause, problem.severity) == ("unscaled_loss", "warning")
    assert "in the step that was replayed it changed nothing" in problem.evidence


def test_a_loop_that_scales_one_of_two_losses_is_told_so():
    loop = Loop()

    def step(x, y):
        with kmp.guard(loop.optimizer, loop.model):
            with tf.GradientTape() as tape:
                loss = loop.loss_of(y, loop.model(x, training=True))
                scaled_loss = loop.optimizer.scale_loss(1e-3 * loss) + loss
            variables = loop.model.trainable_variables
            loop.optimizer.apply(tape.gradient(scaled_loss, variables), variables)

    loop.step = step
    with pytest.warns(UserWarning, match="A part of the loss is not multiplied"):
        run = loop.train()
    (problem,) = kmp.advise(run).problems
    line = inspect.getsourcelines(step)[1] + 4
    assert problem.title == (
        "A part of the loss is not multiplied by the loss scale: the gradients of layer 'hidden',"
        " layer 'logits' do not grow with it, and the optimizer divides them by it."
    )
    assert f"AddV2 in {__file__}, line {line} adds it to the scaled one" in problem.evidence
    assert "optimizer.scale_loss" in problem.note


def test_gradients_of_a_loss_with_gradients_in_it_are_compared():
    loop = Loop()

    def step(x, y):
        model, optimizer = loop.model, loop.optimizer
        with kmp.guard(optimizer, model):
            with tf.GradientTape() as tape:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    energy = tf.reduce_sum(tf.cast(model(x, training=True), "float32"))
                force = inner.gradient(energy, x)
                scaled_loss = optimizer.scale_loss(tf.reduce_mean(tf.square(force - 1.0)))
            variables = [each for each in model.trainable_variables if "kernel" in each.path]
            optimizer.apply(tape.gradient(scaled_loss, variables), variables)

    loop.step = step
    run = loop.train()
    assert run.settings.step_facts.scaling == "right"
    assert run.comparisons
    for _, replay in run.comparisons:
        layers_of = {each.layer.rpartition("/")[2] for each in replay.gradient_errors}
        assert layers_of == {"hidden", "logits"}
        assert 0 < max(each.error for each in replay.gradient_errors) < 0.01
        assert replay.loss == pytest.approx(replay.float32_loss, rel=1e-3)


def test_what_computes_a_nonfinite_loss_in_float16_is_named():
    def loss_of(y, outputs):
        energy = tf.pow(1e-4 + outputs, -12)
        return 1e-30 * tf.reduce_mean(tf.cast(energy, "float32"))

    (problem,) = kmp.advise(Loop(loss_of=loss_of).train()).problems
    line = inspect.getsourcelines(loss_of)[1] + 1
    assert (problem.cause, problem.location) == ("loss_overflow", "the loss function")
    named = f"Pow in the loss function ({__file__}, line {line}) is the first to return inf"
    assert named in problem.evidence
    assert "in float32 the loss is 0.000" in problem.evidence
    assert problem.change == "kmp.layers.Float32(Dense(..., name='logits'))"


def test_gradients_that_a_loop_makes_zero_are_zero_in_float32_too():
    run = Loop(lambda optimizer, gradients: [0.0 * each for each in gradients]).train()
    (finding,) = kmp.advise(run)
    assert (finding.cause, finding.severity) == ("dead", "info")
    assert finding.title.endswith("is zero, in float32 too.")


@pytest.mark.parametrize("change", [clipped_in_turn, averaged])
def test_gradients_that_a_loop_may_change_are_no_doubt(change):
    advice = kmp.advise(Loop(change).train())
    assert advice.verdict.startswith("float16 does not hurt this run: "), advice.verdict


def test_gradients_of_a_layer_beside_the_model_are_compared():
    loop = Loop(is_built=False)
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
    run = loop.train()
    assert run.comparisons
    for _, replay in run.comparisons:
        errors = {each.layer.rpartition("/")[2]: each.error for each in replay.gradient_errors}
        assert errors.keys() == {"hidden", "logits", "other"}
        assert 0 < errors["other"] < 0.01


def test_gradients_of_outputs_that_float16_flushes_are_known_in_float32():
    def small(y, outputs):
        crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return 1e-7 * crossentropy(y, outputs)

    run = Loop(loss_of=small, loss_scale=1.0).train()
    _, last = run.comparisons[-1]
    assert len(last.gradients.flushed) == 4
    (problem,) = kmp.advise(run).problems
    assert (problem.cause, problem.severity) == ("scale_too_small", "error")
    assert "100.0% of the elements of a gradient are zero in float16" in problem.evidence


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
    run = UpdatesOutside().train()
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
    assert_trains_alike(kind, **options)


def test_outputs_with_other_rows_than_the_inputs_are_compared_under_xla_and_no_bit_changes():
    def of_rows(y, outputs):
        return tf.reduce_mean(tf.square(tf.cast(outputs, "float32")))

    def make():
        loop = Loop(loss_of=of_rows, inner="adam")
        loop.model.add(layers.Lambda(lambda x: tf.reshape(x, (-1,))))
        return loop

    run = assert_trains_alike(make, mode="XLA")
    assert run.comparisons
    assert all(replay.gradient_errors for _, replay in run.comparisons)


def test_a_step_with_two_calls_is_compared():
    loop = Loop(calls=2, inner=keras.optimizers.SGD(0.0))
    run = loop.train(rows=32)
    (_, twice), *_ = run.comparisons
    exact = kmp.to_float32(loop.model)
    with tf.GradientTape() as tape:
        loss = 2.0 * loop.loss_of(Y[:32], exact(X[:32], training=True))
    assert twice.float32_loss == pytest.approx(float(loss), rel=1e-6)
    gradients = tape.gradient(loss, [layer.trainable_variables for layer in exact.layers])
    norms = {
        layer.name: float(tf.linalg.global_norm(of_layer))
        for layer, of_layer in zip(exact.layers, gradients, strict=True)
    }
    for each in twice.gradient_errors:
        assert each.norm == pytest.approx(norms[each.layer.rpartition("/")[2]], rel=1e-4)
    assert run.last("replay_error") is None


def test_what_makes_a_loss_infinite_in_float32_too_is_named():
    def loss_of(y, outputs):
        return tf.reduce_sum(tf.cast(outputs, "float32")) * np.inf

    run = Loop(loss_of=loss_of).train()
    assert run.replays
    assert not any(each.is_finite or each.is_finite_in_float32 for _, each in run.replays)
    (problem,) = kmp.advise(run).problems
    assert problem.title == "The loss is NaN or Inf in float32 too."
    line = inspect.getsourcelines(loss_of)[1] + 1
    named = f"Mul in the loss function ({__file__}, line {line}) is the first to return inf"
    assert named in problem.evidence


@pytest.mark.parametrize("mode", ["graph", pytest.param("XLA", marks=pytest.mark.exhaustive)])
def test_constant_in_float16_that_a_loop_divides_by_is_named(mode):
    kept = tf.cast(1.0 - np.linspace(0.0, 0.1, 1000) ** 2, "float16")

    def loss_of(y, outputs):
        noise = tf.sqrt(1.0 - tf.gather(kept, y))
        return tf.reduce_mean(tf.cast(outputs / noise[:, None], "float32"))

    (problem,) = kmp.advise(Loop(loss_of=loss_of).train(mode=mode)).problems
    line = inspect.getsourcelines(loss_of)[1] + 2
    assert (problem.cause, problem.location) == ("constant", "the loss function")
    assert problem.title == (
        f"RealDiv in {__file__}, line {line}, divides by 0: the program makes a constant in"
        " float16, before the training step gets it."
    )
    gets = f"GatherV2 in {__file__}, line {line - 1}, gets a constant (shape (1000,), 0.99 to 1)"
    assert gets in problem.evidence


def test_gradients_that_overflow_in_a_loop_are_those_of_the_backward_pass():
    loop = Loop(loss_scale=2.0**20)
    loop.model.layers[-1].kernel.assign(200.0 * loop.model.layers[-1].kernel)
    run = loop.train(steps=8)
    _, replay = run.replays[-1]
    assert (replay.is_finite_forward, replay.is_finite, replay.is_finite_in_float32) == (
        True,
        False,
        True,
    )
    assert kmp.advise(run)[0].cause == "scale_too_large"


def test_watching_changes_no_bit_of_an_eager_training():
    assert_trains_alike(lambda: Loop(inner="adam"), mode="eager")


def test_large_outputs_are_compared():
    keras.utils.set_random_seed(0)
    loop = Loop(is_built=False)
    wide = keras.Sequential([keras.Input((4,)), layers.Dense(2**13, name="wide")])
    wide.compile(optimizer=loop.optimizer)
    loop.model = wide
    run = loop.train(steps=2)
    assert run.comparisons
    assert all(replay.gradient_errors for _, replay in run.comparisons)
