from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import (
    MODES,
    assert_trained_alike,
    compiled_model,
    fit,
    sequential,
    small_data,
    tensorboard,
    user_warnings,
    values,
)
from keras import layers, ops
from models import Cube, OwnStep

import kmp
from kmp.callbacks import replay_schedule, replay_time
from kmp.diagnosis.soundness import is_harmful
from kmp.guarding.guarded_step import guarded_step_of

pytestmark = pytest.mark.usefixtures("enabled")


def defaults(*arguments, **options):
    """Returns the default callbacks without the one that repairs a training."""
    return kmp.callbacks.defaults(*arguments, repair=False, **options)


def overflowing_model(**options):
    first = layers.Dense(4, kernel_initializer="ones")
    return sequential(first, Cube(name="cube"), layers.Dense(1, dtype="float32"), **options)


def train(model, callbacks, x=12.0, epochs=1):
    inputs = np.full((32, 4), x, "float32")
    return model.fit(
        inputs, np.zeros((32, 1)), batch_size=8, epochs=epochs, verbose=0, callbacks=callbacks
    )


def test_skipped_steps_are_replayed_and_logged(tmp_path):
    callbacks = defaults(tmp_path, every_n_steps=2, on_nonfinite="ignore")
    train(overflowing_model(optimizer="adam", run_eagerly=True), callbacks)  # SGD would diverge
    for run in (callbacks[0].run, kmp.load_run(tmp_path)):
        step, replay = run.replays[-1]
        assert step == 3
        assert (replay.is_finite, replay.is_finite_in_float32, replay.examples) == (False, True, 8)
        assert "cube" in replay.operations[0].layer
        assert "cube" in kmp.advise(run)[0].change
    assert run.replays == callbacks[0].run.replays


def test_examples_of_a_large_batch_that_made_the_step_fail_are_replayed():
    x = np.ones((100, 4), "float32")
    x[70] = 12.0  # only its cube is beyond float16's maximum
    model, callbacks = (
        overflowing_model(run_eagerly=True),
        defaults(every_n_steps=1, on_nonfinite="ignore"),
    )
    model.fit(
        x,
        np.zeros((100, 1)),
        batch_size=100,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    replay = callbacks[0].run.replays[-1][1]
    assert (replay.is_finite, replay.is_finite_in_float32, replay.examples) == (False, True, 32)
    assert "cube" in replay.operations[0].layer


def test_invalid_labels_in_a_large_batch_are_found():
    model = sequential(
        layers.Dense(2),
        kmp.layers.Softmax(),
        loss="sparse_categorical_crossentropy",
        jit_compile=True,
    )
    y = np.zeros(64)
    y[50] = -1.0
    callbacks = defaults(every_n_steps=1, on_nonfinite="ignore")
    model.fit(np.ones((64, 4)), y, batch_size=64, epochs=2, verbose=0, callbacks=callbacks)
    assert [finding.cause for finding in kmp.advise(callbacks[0].run).problems] == ["targets"]


def test_overflow_at_the_minimum_scale_is_replayed_at_once_and_the_verdict_written_before_the_error(
    tmp_path,
):
    model = compiled_model(
        kmp.wrap("sgd", initial_scale=2.0**40, min_scale=2.0**40), run_eagerly=True
    )
    with pytest.raises(
        kmp.callbacks.StuckError, match=r"The minimum loss scale of 2\^40 is too large"
    ):
        fit(model, defaults(tmp_path))
    assert len(tensorboard(tmp_path, "kmp/verdict")) == 1


def test_batch_of_a_skipped_step_does_not_take_the_place_of_the_one_to_compare():
    rule = {
        "initial_scale": 2.0**10,
        "growth_interval": 8,
        "growth_factor": 2.0**10,
        "backoff_factor": 2.0**-10,
    }
    optimizer = kmp.wrap("sgd", **rule)
    callbacks = defaults(every_n_steps=1)
    fit(sequential(layers.Dense(1), optimizer=optimizer, run_eagerly=True), callbacks, batches=14)
    assert optimizer.snapshot().overflow_count == 1
    assert [step for step, _ in callbacks[0].run.comparisons] == [1, 4, 7, 14]  # 7 is the middle


def test_healthy_training_is_compared_at_a_few_steps_and_is_traced_once():
    model, callbacks = compiled_model(), kmp.callbacks.defaults(every_n_steps=2)
    fit(model, callbacks, batches=12, epochs=3)  # 36 steps, and 18 are the middle
    replays = callbacks[0].run.replays
    assert [step for step, _ in replays] == [1, 4, 16, 18, 36]
    assert [step for step, found in replays if found.other_format] == [1, 18]
    assert all((found.comparison is not None) and not is_harmful(found) for _, found in replays)
    assert callbacks[0].run.last("fallback") is None
    traced = model.train_function
    fit(model, callbacks)
    assert model.train_function is traced


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_formats_are_compared_at_the_end_of_a_training_of_unknown_length(tmp_path):
    with kmp.enable("mixed_bfloat16"):
        model = sequential(layers.Dense(4), layers.Dense(1, dtype="float32"))
    data = tf.data.Dataset.from_tensor_slices(small_data()).batch(8)
    unknown = data.filter(lambda x, y: True)
    callbacks = kmp.callbacks.defaults(tmp_path, every_n_steps=1)
    model.fit(unknown, shuffle=False, verbose=0, callbacks=callbacks)
    replays = kmp.load_run(tmp_path).replays
    assert [step for step, _ in replays] == [1, 4, 16, 20]
    compared = [found.other_format for _, found in replays]
    assert [bool(found) for found in compared] == [True, False, False, True]
    assert (compared[-1].format, compared[-1].is_finite) == ("float16", True)


def cancelled(x):
    """Returns the inputs; in float16, rounded to a multiple of 4."""
    return (x + 4096.0) - 4096.0


def test_while_the_precisions_agree_comparisons_end_when_their_time_is_spent(monkeypatch):
    monkeypatch.setattr(replay_time, "_FREE_SECONDS", 0.0)
    monkeypatch.setattr(replay_time, "_MIDDLE_SHARE", 0.0)
    agreeing, differing = kmp.callbacks.Monitor(), kmp.callbacks.Monitor(repair=False)
    fit(compiled_model(), [agreeing], batches=1, epochs=20)
    assert [step for step, _ in agreeing.run.comparisons] == [1, 20]
    with kmp.enable():
        model = sequential(layers.Lambda(cancelled), layers.Dense(1))
    fit(model, [differing], batches=1, epochs=20)
    assert all(is_harmful(replay) for _, replay in differing.run.comparisons)
    assert [step for step, _ in differing.run.comparisons] == [2, 8, 10, 20]


def test_comparison_that_takes_much_of_a_training_is_followed_by_a_smaller_one(monkeypatch):
    def compared(free_seconds):
        monkeypatch.setattr(replay_time, "_FREE_SECONDS", free_seconds)
        monkeypatch.setattr(replay_time, "_FREE_SHARE", 0.0)
        monkeypatch.setattr(replay_time, "_MIDDLE_SHARE", 0.0)
        monitor = kmp.callbacks.Monitor()
        # Of 8. The step is traced for batches of any size.
        data = tf.data.Dataset.from_tensor_slices(small_data(batches=8)).batch(32)
        compiled_model().fit(data, epochs=2, shuffle=False, verbose=0, callbacks=[monitor])
        replays = [found for _, found in monitor.run.replays]
        return [(found.examples, bool(found.other_format)) for found in replays]

    assert compared(0.0) == [(32, True), (8, False)]
    assert compared(600.0) == [(32, True), (32, True), (32, False)]


def test_large_examples_of_a_short_training_are_not_all_compared(monkeypatch):
    monkeypatch.setattr(replay_schedule, "_MANY_NUMBERS", 4)

    def compared(epochs):
        monitor = kmp.callbacks.Monitor()
        data = tf.data.Dataset.from_tensor_slices(small_data(batches=1)).batch(8)  # of any size
        model = sequential(layers.Dense(2), layers.Dense(1, dtype="float32"))
        model.fit(data, epochs=epochs, shuffle=False, verbose=0, callbacks=[monitor])
        return monitor.run.replays[0][1].examples

    assert [compared(epochs) for epochs in (1, 8)] == [2, 4]


def test_fit_for_each_batch_is_compared_as_one_training():
    monitor, other = kmp.callbacks.Monitor(), kmp.callbacks.Monitor()
    model = sequential(layers.Dense(1))
    for _ in range(8):
        fit(model, [monitor], batches=1)
    assert [step for step, _ in monitor.run.comparisons] == [1, 2, 3, 5, 8]
    fit(model, [other], batches=1)  # has seen nothing yet
    fit(model, [monitor], batches=1)  # others have trained in between
    assert [step for step, _ in other.run.comparisons] == [9]
    assert [step for step, _ in monitor.run.comparisons][-1] == 10


def test_training_that_converges_to_the_resolution_of_float16_is_not_hurt():
    model = sequential(
        layers.Dense(8), layers.Dense(1, dtype="float32"), optimizer=keras.optimizers.SGD(0.1)
    )
    x = np.tile(np.random.default_rng(0).normal(size=(32, 4)).astype("float32"), (100, 1))
    callbacks = defaults()
    model.fit(x, x[:, :1], batch_size=32, shuffle=False, verbose=0, callbacks=callbacks)
    _, last = callbacks[0].run.replays[-1]
    assert max(error.error for error in last.gradient_errors) > 0.3
    assert not any(is_harmful(replay) for _, replay in callbacks[0].run.replays)
    assert (
        "until they nearly vanish; 0 of 100 steps were skipped"
        in kmp.advise(callbacks[0].run).verdict
    )


def test_later_fit_with_batches_of_another_structure_trains_and_is_compared():
    model, callbacks = sequential(layers.Dense(1)), defaults()
    fit(model, callbacks, batches=2)
    x, y = np.ones((16, 4), "float32"), np.zeros(16)
    model.fit(x, y, sample_weight=np.ones(16), batch_size=8, verbose=0)
    model.train_on_batch(x[:8], y[:8].astype("float32"))
    model.fit(x, y, sample_weight=np.ones(16), batch_size=8, verbose=0, callbacks=callbacks)
    assert callbacks[0].run.replays[-1][1].batch.has_sample_weight


def test_training_with_augmentation_is_compared():
    augmentation = [layers.RandomTranslation(0.1, 0.1), layers.GaussianNoise(0.1), layers.Flatten()]
    model = sequential(*augmentation, layers.Dropout(0.5), layers.Dense(1), shape=(6, 6, 1))
    callbacks = defaults()
    x = 0.1 * np.random.default_rng(0).normal(size=(32, 6, 6, 1)).astype("float32")
    model.fit(x, x[:, 0, 0], batch_size=8, verbose=0, callbacks=callbacks)
    assert {
        ((each.comparison is not None), is_harmful(each)) for _, each in callbacks[0].run.replays
    } == {(True, False)}


class Own(OwnStep, keras.Sequential):
    """Has a loss that kmp does not know."""

    def loss_of(self, x, y):
        errors = ops.cast(self(x, training=True), "float32") - ops.cast(y, "float32")
        return ops.mean(ops.square(errors) / self.divisor)


def own_model(divisor, **options):
    first = layers.Dense(4, kernel_initializer="ones")
    model = Own([keras.Input((4,)), first, Cube(name="cube"), layers.Dense(1, dtype="float32")])
    model.compile("sgd", **options)
    model.divisor = divisor
    return model


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_own_training_step_is_replayed_also_where_it_runs_eagerly(tmp_path, run_eagerly):
    model, callbacks = (
        own_model(1e9, run_eagerly=run_eagerly),
        defaults(tmp_path, every_n_steps=2, on_nonfinite="ignore"),
    )
    before, cube = values(model.variables), f"{model.name}/cube"
    train(model, callbacks, x=12.0)
    run = kmp.load_run(tmp_path)
    replay = run.replays[0][1]
    assert (replay.is_forward_only, replay.is_finite, replay.is_finite_in_float32) == (
        False,
        False,
        True,
    )
    assert replay.float32_layers == [cube]
    finding = kmp.advise(run)[0]
    assert (finding.cause, finding.location) == ("forward_overflow", cube)
    # Every step was skipped, and a replay assigns nothing.
    np.testing.assert_equal(values(model.variables), before)


class Averaged(OwnStep, keras.Sequential):
    """Keeps averages of a weight in 16 bits, one where Keras does not see it."""

    def average(self, dtype):
        kernel = self.layers[0].kernel
        self.hidden = [tf.Variable(tf.cast(kernel, dtype), trainable=False)]

    def loss_of(self, x, y):
        return ops.mean(ops.square(ops.cast(self(x, training=True), "float32")))

    def train_step(self, data):
        result = super().train_step(data)
        kernel = tf.cast(self.layers[0].kernel, self.hidden[0].dtype)
        self.hidden[0].assign(0.99 * self.hidden[0] + 0.01 * kernel)
        return result


def test_layers_in_float8_are_compared_in_their_forward_pass():
    model = sequential(layers.Dense(16), layers.Dense(16), shape=(16,), optimizer="adam")
    for layer in model.layers:
        layer.quantize("float8")
    callbacks = defaults()
    x = np.random.default_rng(0).normal(size=(64, 16))
    model.compile("adam", "mse")
    model.fit(x, x, batch_size=16, verbose=0, callbacks=callbacks)
    replays = [replay for _, replay in callbacks[0].run.replays]
    assert len(replays) >= 2
    assert all(replay.is_forward_only for replay in replays)
    assert "only the forward pass could be replayed" in str(kmp.advise(callbacks[0].run))


def test_variable_in_16_bits_that_no_pass_compares_is_named(tmp_path):
    model = Averaged([keras.Input((4,)), layers.Dense(1)], name="averaged")
    model.average("float16")
    model.compile("sgd")
    train(model, defaults(tmp_path, every_n_steps=1), x=0.1)
    run = kmp.load_run(tmp_path)
    batch = run.replays[0][1].batch
    assert (batch.states_in_16_bits, batch.names_of_states) == (1, ["averaged.hidden"])
    assert "what 1 variable in 16 bits, of averaged.hidden, loses" in kmp.advise(run).verdict


@pytest.mark.parametrize(
    ("divisor", "target", "title"),
    [
        (0.0, 1.0, "The loss is NaN or Inf in float32 too."),
        (1.0, np.nan, "The batch's y contains NaN or Inf."),
    ],
)
def test_nan_in_an_own_training_step_is_found_in_the_loss_or_the_batch(divisor, target, title):
    model = own_model(divisor, run_eagerly=True)
    callbacks = defaults(every_n_steps=1, on_nonfinite="ignore")
    y = np.ones((32, 1), "float32")
    y[5] = target
    model.fit(np.ones((32, 4)), y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    assert kmp.advise(callbacks[0].run)[0].title == title


def test_replay_that_fails_does_not_stop_the_training_which_warns_once():
    class Gamma(keras.layers.Layer):
        def call(self, x):
            return x * tf.cast(tf.random.gamma([4], 2.0), x.dtype)

    callbacks = defaults(every_n_steps=2, on_nonfinite="ignore")
    model = sequential(Gamma(), layers.Dense(1), jit_compile=False)
    with pytest.warns(UserWarning, match="RandomGamma .* draws other numbers each time") as warned:
        train(model, callbacks, x=0.01)
    assert len(user_warnings(warned)) == 1
    assert callbacks[0].run.replays == []
    assert "draws other numbers" in callbacks[0].run.last("replay_error")
    assert model.optimizer.snapshot().step == 4


def test_batch_of_texts_is_not_replayed_and_the_verdict_says_why():
    texts = keras.Input((1,), dtype="string")
    vectors = layers.Embedding(8, 2)(layers.Hashing(8)(texts))
    model = keras.Model(texts, layers.Dense(1)(layers.Flatten()(vectors)))
    model.compile("sgd", "mse", jit_compile=False)
    x, y = tf.constant([["a"], ["b"]] * 64), np.ones((128, 1), "float32")
    (monitor,) = callbacks = defaults(every_n_steps=2)
    with pytest.warns(UserWarning, match="captured .TypeError: it has a tensor of string"):
        model.fit(x, y, verbose=0, callbacks=callbacks)
    reason = "none could be replayed: a batch cannot be captured (TypeError: it has a tensor of str"
    assert reason in kmp.advise(monitor.run).verdict
    assert "replay=True" not in kmp.advise(monitor.run).verdict


def test_zeros_are_replayed_at_the_end_with_each_optimizer():
    dead = layers.Dense(4, activation="relu", bias_initializer=keras.initializers.Constant(-100))
    model = sequential(dead, layers.Dense(1, dtype="float32"), run_eagerly=True)
    for _ in range(2):
        callbacks = defaults()
        train(model, callbacks, x=1.0)
        assert [step for step, _ in callbacks[0].run.replays] == [1, 2, 4]
        assert [finding.cause for finding in kmp.advise(callbacks[0].run)] == ["dead"]
        (capture,) = guarded_step_of(model).captures
        assert capture.optimizer is model.optimizer
        model.compile("sgd", "mse", run_eagerly=True)


def test_overflows_of_an_earlier_training_are_not_replayed():
    model = sequential(layers.Dense(1), run_eagerly=True)
    train(model, defaults(every_n_steps=2, on_nonfinite="ignore"), x=np.inf)
    assert model.optimizer.snapshot().overflow_count == 4
    callbacks = defaults(every_n_steps=2, on_nonfinite="ignore")
    train(model, callbacks, x=0.01)
    assert [(step, found.is_finite) for step, found in callbacks[0].run.replays] == [
        (5, True),
        (6, True),
        (8, True),
    ]
    callbacks = defaults(every_n_steps=2, on_nonfinite="ignore")
    train(model, callbacks, x=np.inf)  # 4 overflows: as many as before, in a training of their own
    step, found = callbacks[0].run.replays[0]
    assert (step, found.is_finite) == (9, False)


@pytest.mark.parametrize("y", [np.inf, 1.0 + 1e-6])
def test_targets_that_are_not_finite_or_rounded_do_no_harm(tmp_path, y):
    head = layers.Dense(1, "sigmoid", dtype="float32")
    model = sequential(Cube(), head, loss="binary_crossentropy", run_eagerly=True)
    targets = np.ones((16, 1), "float32")
    targets[3] = y
    callbacks = defaults(tmp_path, every_n_steps=1, on_nonfinite="ignore")
    model.fit(np.ones((16, 4)), targets, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    run = kmp.load_run(tmp_path)
    assert run.last("replay_error") is None
    assert {replay.batch.invalid_targets for _, replay in run.replays} == {None}


class Counts(keras.layers.Layer):
    """Counts its calls where Keras does not find it."""

    def __init__(self):
        super().__init__()
        self.count = [tf.Variable(0.0, trainable=False)]

    def call(self, x, training=False):
        if training:
            self.count[0].assign_add(1.0)
        return x * tf.cast(1.0 + 0.01 * self.count[0], x.dtype)


class CountsInAttribute(Counts):
    """Counts where a replay without a trace finds it, and draws noise of a generator of its own."""

    def __init__(self):
        super().__init__()
        self.found, self.generator = self.count[0], tf.random.Generator.from_seed(1)

    def call(self, x, training=False):
        return super().call(x, training) + tf.cast(
            self.generator.normal(tf.shape(x), stddev=0.01), x.dtype
        )


class Draws(keras.layers.Layer):
    """Adds noise of TensorFlow's global generator."""

    def call(self, x):
        return x + tf.cast(
            tf.random.get_global_generator().normal(tf.shape(x), stddev=0.01), x.dtype
        )


class ChangingLoss(keras.losses.Loss):
    """Has a weight that changes with each call."""

    def __init__(self):
        super().__init__()
        self.count = keras.Variable(0.0, trainable=False)

    def call(self, y_true, y_pred):
        self.count.assign_add(1.0)
        return ops.square(y_true - y_pred) * (1.0 + 0.01 * ops.cast(self.count, "float32"))


class InPython(keras.layers.Layer):
    """Has a state that TensorFlow does not know."""

    def __init__(self):
        super().__init__()
        self.generator = np.random.default_rng(0)

    def call(self, x):
        noise = tf.numpy_function(
            lambda v: self.generator.normal(size=v.shape).astype("f") * 0.01, [x], tf.float32
        )
        return tf.ensure_shape(x + tf.cast(noise, x.dtype), x.shape)


def known_to_keras():
    return layers.Dropout(0.5), layers.BatchNormalization(), layers.GaussianNoise(0.1)


@pytest.mark.parametrize(
    ("hidden", "loss", "mode", "error"),
    [
        (lambda: [*known_to_keras(), Counts(), Draws()], ChangingLoss, "graph", None),
        (lambda: [*known_to_keras(), CountsInAttribute()], ChangingLoss, "eager", None),
        (
            lambda: [InPython()],
            keras.losses.MeanSquaredError,
            "graph",
            "a replay would change tf.numpy_function",
        ),
    ],
)
def test_training_with_replays_is_bitwise_identical_whatever_the_step_changes(
    hidden, loss, mode, error
):
    x = np.random.default_rng(1).normal(size=(48, 4)).astype("float32")
    x[[16, 24]] = np.inf
    states = []
    for has_replays in (False, True):
        keras.utils.clear_session()  # `set_random_seed` of Keras 3.12 keeps the global generator
        keras.utils.set_random_seed(0)
        tf.random.set_global_generator(tf.random.Generator.from_seed(3))
        parts = layers.Dense(4), *hidden(), layers.Dense(1, dtype="float32")
        model = sequential(*parts, loss=loss(), metrics=["mae"], **MODES[mode])
        callbacks = defaults(every_n_steps=2, on_nonfinite="ignore", replay=has_replays)
        expects = pytest.warns(UserWarning, match=error) if error and has_replays else nullcontext()
        with expects:
            history = model.fit(
                x, np.ones((48, 1)), batch_size=8, shuffle=False, verbose=0, callbacks=callbacks
            ).history
        draws = keras.random.normal((2,)), np.random.rand()
        states.append([*values(model.variables), history["mae"], *draws])
    assert_trained_alike(*states)
    if error:
        assert callbacks[0].run.last("replay_error") == error
    else:
        assert callbacks[0].run.replays


def test_replay_of_a_model_with_a_policy_map_leaves_its_config():
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="mixed_float16")
    policies["dense_a"] = "mixed_float16"
    mapped = [layers.Dense(4, dtype=policies, name=name) for name in ("dense_a", "dense_b")]
    model = sequential(*mapped, layers.Dense(1, dtype="float32"), run_eagerly=True)
    before = [layer.get_config() for layer in mapped]
    callbacks = defaults(every_n_steps=2, on_nonfinite="ignore")
    train(model, callbacks, x=np.inf)
    assert callbacks[0].run.replays
    assert [layer.get_config() for layer in mapped] == before
    assert [layer.compute_dtype for layer in mapped] == ["float16", "float16"]


def test_replay_that_takes_too_long_ends_and_the_last_one_has_fewer_examples(monkeypatch):
    monkeypatch.setattr(replay_time, "_MOST_SECONDS", 0.0)
    callbacks = defaults(every_n_steps=1, on_nonfinite="ignore")
    fit(compiled_model(run_eagerly=True), callbacks, batches=4)
    errors = [row.replay_error for row in callbacks[0].run.rows if row.replay_error]
    assert errors[:2] == [
        f"TimeoutError: {count} examples take longer than 0 s" for count in (8, 2)
    ]


def test_gradients_that_a_training_step_divides_twice_are_reported_with_the_cure():
    class Twice(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
                scaled = self.optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled, self.trainable_variables)
            gradients = [each / self.optimizer.loss_scale for each in gradients]
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    with kmp.enable():
        model = Twice([keras.Input((4,)), layers.Dense(1, name="head")])
        model.compile("sgd", "mse")
    callbacks = defaults()
    with pytest.warns(UserWarning, match="divides the gradients by the loss scale, and `apply`"):
        fit(model, callbacks, batches=4)
    (problem,) = kmp.advise(callbacks[0].run).problems
    assert (problem.cause, problem.change) == (
        "unscaled_loss",
        "self.optimizer.apply(unscaled=True)",
    )
    assert (
        "divides the gradients by the loss scale, and `apply` divides them again" in problem.title
    )
    _, last = callbacks[0].run.replays[-1]
    assert f"are {last.loss_scale:,.0f} times too small" in problem.evidence
    assert callbacks[0].run.last("fallback") is None


def test_operation_that_loses_bits_in_a_custom_loop_under_guard_is_named(tmp_path):
    offset = 20000.0  # near it float16 has few bits
    optimizer = kmp.wrap(keras.optimizers.SGD(1e-9), loss_scale=64.0)
    lossy = layers.Lambda(lambda x: x + offset, name="lossy")
    model = sequential(
        layers.Dense(4), lossy, layers.Dense(1, dtype="float32"), optimizer=optimizer
    )
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x):
        with kmp.guard(optimizer, model):
            with tf.GradientTape() as tape:
                center = offset * tf.stop_gradient(tf.reduce_sum(model.layers[-1].kernel))
                errors = model(x, training=True) - center
                loss = optimizer.scale_loss(tf.reduce_mean(tf.square(errors)))
            optimizer.apply(
                tape.gradient(loss, model.trainable_variables), model.trainable_variables
            )

    callbacks = keras.callbacks.CallbackList(
        kmp.callbacks.defaults(tmp_path, every_n_steps=2, repair=False), model=model
    )
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    for index in range(4):
        callbacks.on_train_batch_begin(index)
        step(tf.constant(x))
        callbacks.on_train_batch_end(index)
    callbacks.on_epoch_end(0)
    callbacks.on_train_end()
    run = kmp.load_run(tmp_path)
    assert run.comparisons
    for _, replay in run.comparisons:
        assert replay.gradient_errors
        assert replay.examples == 8
        assert is_harmful(replay)
    assert run.last("fallback") is None  # the function of the loop would not be traced again
    finding = kmp.advise(run)[0]
    assert (finding.cause, finding.location.rpartition("/")[2]) == ("precision_loss", "lossy")
