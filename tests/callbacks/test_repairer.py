import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import HAS_GPU, MODES, Interrupt, sequential, tensorboard, user_warnings
from keras import layers, ops
from models import Cube, OwnStep

import kmp
from kmp.backend.keras_internals import is_passthrough, sublayers
from kmp.callbacks import LossScaleLogger, Monitor, StuckError, defaults, recorder
from kmp.diagnosis.soundness import is_harmful
from kmp.replay import replay_batch

pytestmark = pytest.mark.filterwarnings("ignore:.*kmp set")

ROWS = 64


class Mixed(keras.layers.Layer):
    """Adds the result of a sublayer, and raises an error if that has another dtype."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.cube = Cube(name="cube")

    def call(self, x):
        cubed = self.cube(x)
        if cubed.dtype != x.dtype:
            raise TypeError("two dtypes")
        return cubed + x


def overflowing(layer=None, mode="eager", build=None):
    with kmp.enable():
        parts = [
            layer or Cube(name="cube"),
            layers.BatchNormalization(name="norm"),
            layers.Dense(1, name="head"),
        ]
        model = build(*parts) if build else keras.Sequential([keras.Input((4,)), *parts])
        model.compile(keras.optimizers.Adam(1e-2), "mse", **MODES[mode])
    return model


def train(model, callbacks, epochs=1, height=1.0):
    x = np.random.default_rng(0).uniform(20, 60, (ROWS, 4)).astype("float32")
    y = height * (x[:, :1] > 40).astype("float32")
    model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, callbacks=callbacks)


def dtypes(model):
    return {
        layer.name: layer.compute_dtype
        for layer in model.layers
        if not isinstance(layer, keras.layers.InputLayer)
    }


def test_layer_that_overflows_is_set_to_float32_and_the_training_continues(tmp_path):
    model = overflowing(mode="steps_per_execution")
    message = r"cube.* to float32, and the training continues at the loss scale 8192\. The output"
    with pytest.warns(UserWarning, match=message) as seen:
        train(model, defaults(tmp_path / "run"), epochs=2)
    # The cubes are beyond float16's maximum, so the layer that takes them has to compute in float32
    # too.
    assert dtypes(model) == {"cube": "float32", "norm": "float32", "head": "float16"}
    warning = next(str(each.message) for each in seen if "permanent" in str(each.message))
    assert "kmp.layers.Float32(Cube(..., name='cube'))" in warning
    run = kmp.load_run(tmp_path / "run")
    (index,) = [index for index, row in enumerate(run.rows) if row.fallback]
    assert [path.rpartition("/")[2] for path in run.rows[index].fallback] == ["cube", "norm"]
    assert run.rows[index + 1].replay.is_finite  # the proof: the same batch with the change
    assert run.last("overflow_count") == 8  # in the first execution
    assert model.optimizer.snapshot().overflows_in_a_row == 0
    advice = kmp.advise(run)
    assert advice.problems == ()
    assert advice[0].cause == "float32_fallback"
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert dtypes(loaded) == dtypes(model)
    x = np.full((2, 4), 55.0, "float32")
    np.testing.assert_array_equal(loaded(x), model(x))
    assert np.isfinite(model(x)).all()


class QuantizedCube(Cube):
    """Has a part whose weights are integers."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.gate = layers.Dense(4, kernel_initializer="identity")
        self.gate.build((None, 4))
        self.gate.quantize("int4")

    def call(self, x):
        return super().call(self.gate(x))


def test_quantized_part_of_a_repaired_layer_stays_quantized():
    with kmp.enable():
        layer = QuantizedCube(name="cube")
    model = overflowing(layer)
    train(model, defaults())
    assert dtypes(model)["cube"] == "float32"
    assert (layer.gate.quantization_mode, layer.gate.compute_dtype) == ("int4", "float32")
    x = np.full((2, 4), 8.0, "float32")
    np.testing.assert_allclose(layer(x), x**3, rtol=0.1)


class Shrink(keras.layers.Layer):
    """Overflows float16 inside, where the result is 0 in place of a normal number."""

    def call(self, x):
        return x / (1.0 + ops.sqrt(ops.mean(ops.square(x * 40.0), -1, keepdims=True)))


def test_all_models_with_a_repaired_layer_compute_with_it(recwarn):
    with kmp.enable():
        encoder = keras.Sequential([keras.Input((4,)), layers.Dense(4, "relu"), Shrink()])
        model, other = (
            keras.Sequential([encoder, layers.Dense(1, dtype="float32")]) for _ in range(2)
        )
        model.compile(keras.optimizers.Adam(1e-2), "mse", jit_compile=False)
        other.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
        unrelated = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
        unrelated.compile("sgd", "mse")
    x = np.random.default_rng(0).uniform(100, 300, (ROWS, 4)).astype("float32")
    y = (x[:, :1] / x[:, 1:2]).astype("float32")

    @tf.function
    def encode(x):
        return encoder(x)

    @tf.function(input_signature=[tf.TensorSpec([], "float32")])
    def untraced(x):
        raise AssertionError

    # Traces all other functions.
    encoder.predict(x, verbose=0)
    other.fit(x, y, verbose=0)
    other.evaluate(x, y, verbose=0)
    unrelated.predict(x, verbose=0)
    before = unrelated.predict_function
    encode(x)
    model.fit(x, y, batch_size=8, epochs=4, verbose=0, callbacks=defaults())
    assert encoder.layers[-1].compute_dtype == "float32"
    assert len([text for text in map(str, recwarn) if "kmp set" in text]) == 1

    exact = other(x)
    np.testing.assert_allclose(encode(x), encoder(x), rtol=0.02)  # a function of the user's
    np.testing.assert_allclose(encoder.predict(x, verbose=0), encoder(x), rtol=0.02)
    np.testing.assert_allclose(other.predict(x, verbose=0), exact, rtol=0.02)
    loss = pytest.approx(float(ops.mean((exact - y) ** 2)), rel=0.02)
    assert other.evaluate(x, y, verbose=0) == loss
    assert other.fit(x, y, verbose=0).history["loss"][0] == loss
    assert unrelated.predict_function is before


def test_training_that_is_stuck_is_replayed_and_repaired_before_it_ends(monkeypatch):
    # Those of earlier overflows are used up.
    monkeypatch.setattr("kmp.callbacks.replay_schedule._MOST_REPLAYS", 0)
    model, callbacks = overflowing(), [Monitor(patience=6)]
    with pytest.warns(
        UserWarning,
        match="At step 6 kmp set the layers 'sequential.*/cube', 'sequential.*/norm' to float32",
    ):
        train(model, callbacks, epochs=2, height=1e4)  # such targets have large gradients
    snapshot = model.optimizer.snapshot()
    assert snapshot.step == 16
    assert 6 <= snapshot.overflow_count < 12


def test_training_without_repairs_ends_with_the_advice_and_a_complete_report(tmp_path):
    report = tmp_path / "report.html"
    monitor = Monitor(every_n_steps=100, repair=False, patience=6, report=report)
    with pytest.raises(StuckError, match="Cause: The output of layer 'cube' overflows") as error:
        train(overflowing(), [monitor])
    assert str(kmp.advise(monitor.run)[0]).splitlines()[-1] in str(error.value)
    assert "cube" in report.read_text(encoding="utf-8")


def test_scale_that_overflows_of_a_layer_have_lowered_returns_after_its_repair():
    with kmp.enable(initial_scale=2.0):
        # The slope at 0 is infinite in float16, where the constant is 0.
        root = layers.Lambda(lambda x: ops.sqrt(x + 1e-8), name="root")
        parts = layers.Dense(4, name="before"), root, layers.Dense(1, name="head")
        model = sequential(*parts, optimizer=keras.optimizers.SGD(0.0), run_eagerly=True)
    message = r"'sequential.*/root' to float32, and the training continues at the loss scale 2\."
    with pytest.warns(UserWarning, match=message):
        model.fit(
            np.zeros((160, 4)), np.ones((160, 1)), batch_size=8, verbose=0, callbacks=defaults()
        )
    snapshot = model.optimizer.snapshot()
    assert 4 <= snapshot.overflow_count < 12
    assert snapshot.loss_scale == 2.0


def test_training_that_suits_a_loss_scale_below_1_is_not_repaired():
    with kmp.enable(initial_scale=2.0**8):
        to_units = layers.Lambda(lambda x: x * 30, dtype="float32", name="to_units")
        parts = layers.Dense(4, name="before"), layers.Dense(1, name="raw"), to_units
        model = sequential(*parts, optimizer=keras.optimizers.SGD(1e-9), run_eagerly=True)
    callbacks = defaults()
    x, y = np.ones((160, 4)), np.full((160, 1), 1e5)
    model.fit(x, y, batch_size=8, verbose=0, callbacks=callbacks)
    snapshot, run = model.optimizer.snapshot(), callbacks[0].run
    assert snapshot.loss_scale < 1.0
    assert any(not replay.is_finite for _, replay in run.replays)
    assert run.last("fallback") is None


def test_training_whose_gradients_inside_of_a_layer_suit_a_lower_scale_is_not_repaired():
    with kmp.enable(initial_scale=2.0**8):
        # Inside, the gradients are 1000 times as large as those of the outputs.
        in_meters = layers.Lambda(lambda x: 1000.0 * ops.tanh(x / 1000.0), name="in_meters")
        parts = layers.Dense(4, name="before"), in_meters, layers.Dense(1, name="depth")
        model = sequential(*parts, optimizer=keras.optimizers.SGD(1e-9), run_eagerly=True)
    (monitor,) = callbacks = defaults()
    x, y = np.ones((240, 4)), np.full((240, 1), 3e3)
    model.fit(x, y, batch_size=8, verbose=0, callbacks=callbacks)
    failed = [replay for _, replay in monitor.run.replays if not replay.is_finite]
    assert failed[0].search.is_found
    assert failed[0].float32_layers == []
    assert monitor.run.last("fallback") is None
    # The training goes on near the scale at which the replay was finite.
    assert failed[0].gradients.usable_scale <= model.optimizer.snapshot().loss_scale < 4.0
    causes = [finding.cause for finding in kmp.advise(monitor.run).problems]
    assert causes == ["initial_scale"]  # 11 steps of 30 were skipped


def test_layers_that_are_sound_only_below_a_fixed_loss_scale_keep_their_dtype():
    with kmp.enable(loss_scale=2.0**60):
        parts = Cube(name="cube"), layers.BatchNormalization(name="norm"), layers.Dense(1)
        model = sequential(*parts, optimizer="adam", run_eagerly=True)
    (monitor,) = callbacks = defaults(on_nonfinite="ignore")
    train(model, callbacks)
    assert len(monitor.run.replays[0][1].float32_layers) == 2  # sound at a smaller scale
    assert monitor.run.last("fallback") is None
    assert dtypes(model)["cube"] == "float16"


@pytest.mark.parametrize("second", [Monitor, LossScaleLogger], ids=["Monitor", "logger"])
def test_repair_of_one_callback_is_in_the_records_of_another_one(second, tmp_path):
    model, callbacks = overflowing(), [Monitor(tmp_path / "a"), second(tmp_path / "b")]
    with pytest.warns(
        UserWarning, match="set the layers 'sequential.*/cube'.* to float32"
    ) as warned:
        train(model, callbacks)
    assert sum("kmp set" in str(each.message) for each in warned) == 1
    first, other = (kmp.load_run(tmp_path / name) for name in "ab")
    for key in ("fallback", "fallback_reason"):
        assert first.last(key) == other.last(key) == callbacks[1].run.last(key) is not None
    assert [found.cause for found in kmp.advise(other)][:1] == ["float32_fallback"]


def test_repair_of_one_tower_keeps_the_gradients_of_the_other(tmp_path):
    with kmp.enable():
        inputs, outputs = keras.Input((4,)), []
        for name in ("large", "small"):
            hidden = layers.Dense(4, kernel_initializer="ones", name=f"{name}_hidden")(inputs)
            head = layers.Dense(1, kernel_initializer="ones", dtype="float32", name=name)
            outputs.append(head(hidden))
        model = keras.Model(inputs, outputs)
        loss_weights = {"loss_weights": [1.0, 1e-11]}
        model.compile(keras.optimizers.SGD(0.0), ["mse"] * 2, run_eagerly=True, **loss_weights)
    x = np.random.default_rng(0).uniform(1, 2, (80, 4)).astype("float32")
    y = [np.full((80, 1), 1e3, "float32"), np.ones((80, 1), "float32")]
    callbacks = defaults(tmp_path / "run", every_n_steps=2)
    expected = "kmp set the layer 'large_hidden' to float32, .* 'large_hidden' overflows"
    with pytest.warns(UserWarning, match=expected):
        model.fit(x, y, batch_size=4, verbose=0, callbacks=callbacks)
    assert dtypes(model)["large_hidden"] == "float32"
    assert dtypes(model)["small_hidden"] == "float16"
    run = kmp.load_run(tmp_path / "run")
    flushed = run.replays[-1][1].gradients.flushed
    assert max(flushed.get(f"small_hidden/{name}", 0.0) for name in ("kernel", "bias")) < 0.5
    advice = kmp.advise(run)
    assert advice.problems == ()
    assert "with layer 'large_hidden' in float32 the results on 4 examples" in advice[0].tried


def test_callback_with_the_same_patience_does_not_stop_what_another_one_has_repaired(monkeypatch):
    monkeypatch.setattr("kmp.callbacks.replay_schedule._MOST_REPLAYS", 0)
    callbacks = [Monitor(patience=6), Monitor(patience=6, replay=False)]
    with pytest.warns(UserWarning, match="At step 6 kmp set the layers 'sequential.*/cube'"):
        train(overflowing(), callbacks, epochs=2, height=1e4)


class Detour(keras.layers.Layer):
    """Returns its inputs, after a product that exceeds 65504."""

    def call(self, x):
        return (x * 3e4) / 3e4


def test_overflow_in_more_layers_than_are_repaired_is_a_warning_while_the_training_runs(
    monkeypatch,
):
    monkeypatch.setattr("kmp.callbacks.replay_schedule._MOST_REPLAYS", 1)
    with kmp.enable():
        scaled = [Detour(name=f"times_{index}") for index in range(14)]
        head = layers.Dense(1, dtype="float32")
        model = sequential(*scaled, head, optimizer="adam", run_eagerly=True)
    expected = (
        r"^The output of layer 'times_\d+' overflows .* steps were skipped, and kmp found no few"
        r" layers to repair. What to change:\n  kmp.enable"
    )
    with pytest.warns(UserWarning, match=expected) as warned:
        train(model, defaults(on_nonfinite="ignore"), epochs=2)
    assert len(user_warnings(warned)) == 1
    assert {dtype for name, dtype in dtypes(model).items() if "times" in name} == {"float16"}


def test_network_that_explodes_in_float32_too_is_told_to_start_smaller(tmp_path, monkeypatch):
    monkeypatch.setattr("kmp.callbacks.replay_schedule._MOST_REPLAYS", 1)
    with kmp.enable():
        large = keras.initializers.Constant(4.0)
        chain = [layers.Dense(1, kernel_initializer=large, name=f"d{each}") for each in range(26)]
        model = sequential(*chain, optimizer=keras.optimizers.SGD(0.0), run_eagerly=True)
    message = (
        "grow from layer to layer, and reach .* kmp found no few layers.*\n  a smaller scale of"
    )
    callbacks = defaults(tmp_path / "run", on_nonfinite="ignore")
    with pytest.warns(UserWarning, match=message):
        model.fit(
            np.ones((160, 4)), np.ones((160, 1)), batch_size=8, verbose=0, callbacks=callbacks
        )
    run = kmp.load_run(tmp_path / "run")
    magnitudes = [*run.replays[-1][1].overflow.magnitudes.values()]
    np.testing.assert_allclose(magnitudes[:26], 4.0 ** np.arange(2, 28), rtol=0.01)
    (finding,) = kmp.advise(run).problems
    assert (finding.cause, finding.change) == ("exploding", "")
    assert "26 layers enlarge inputs up to 1, by 4.2 times on average" in finding.evidence


class Curve(OwnStep):
    """Fits its second difference.

    The rounding of its inputs and outputs in float16 makes that noise.
    """

    def __init__(self):
        super().__init__(name="curve")
        self.hidden, self.head = (
            layers.Dense(16, "tanh", name="hidden"),
            layers.Dense(1, dtype="float32", name="head"),
        )

    def call(self, x):
        return self.head(self.hidden(4 * x - 2))

    def loss_of(self, x, y):
        left, middle, right = (self(x + shift, training=True) for shift in (-0.01, 0.0, 0.01))
        return tf.reduce_mean(tf.square((left - 2 * middle + right) / 1e-4 - y))


@pytest.mark.parametrize(("height", "comparisons"), [(1.0, 1), (20.0, 2 if HAS_GPU else 3)])
def test_model_that_computes_outside_its_layers_is_repaired_if_loss_or_thrice_gradients_differ(
    height, comparisons
):
    with kmp.enable(initial_scale=2.0**-4):
        model = Curve()
        model.compile(keras.optimizers.Adam(1e-3), jit_compile=False)
    x = np.random.default_rng(0).uniform(0, 1, (512, 1)).astype("float32")
    callbacks = defaults(every_n_steps=1)
    with pytest.warns(UserWarning, match="kmp set the layer 'curve") as warned:
        model.fit(x, height * np.sin(3 * x), batch_size=32, verbose=0, callbacks=callbacks)
    rows = callbacks[0].run.rows
    repair = next(index for index, row in enumerate(rows) if row.fallback)
    assert sum(is_harmful(row.replay) for row in rows[:repair] if row.replay) == comparisons
    if height == 1.0:  # no single layer is enough
        assert rows[repair].fallback == ["curve"]
        assert "kmp.enable(policy='float32')" in str(warned[0].message)
        assert {layer.compute_dtype for layer in sublayers(model)} == {"float32"}


def test_comparisons_that_may_prove_a_cure_do_not_wait_for_the_next_record(monkeypatch):
    class Weighted(keras.layers.Layer):
        """Adds a loss whose weight is 0 in float16."""

        def call(self, inputs):
            x, other = inputs
            self.add_loss(1e-8 * ops.mean(ops.square(other)))
            return x

    with kmp.enable():
        inputs = keras.Input((4,))
        other = layers.Dense(4, name="other")(inputs)
        x = Weighted(name="weighted")([layers.Dense(4, name="main")(inputs), other])
        model = keras.Model(inputs, layers.Dense(1, dtype="float32", name="head")(x))
        model.compile(keras.optimizers.SGD(1e-3), "mse", loss_weights=[1e-4])
    # Of the 64 steps, the first and the last are recorded: the records are too large for others.
    monkeypatch.setattr(recorder, "BUDGET", 1)
    callbacks = defaults()
    x = np.tile(INPUTS, (8, 1))
    with pytest.warns(UserWarning, match="At step 33 kmp set the layer 'weighted'"):
        model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=callbacks)
    compared = [step for step, replay in callbacks[0].run.replays if is_harmful(replay)]
    assert compared == [1, 17, 33]


def test_model_nested_in_a_subclassed_one_is_repaired_once():
    class Outer(keras.Model):
        def __init__(self, cube, norm, head):
            super().__init__()
            self.inner = keras.Sequential([keras.Input((4,)), cube], name="inner")
            self.norm, self.head = norm, head

        def call(self, x, training=None):
            return self.head(self.norm(self.inner(x), training=training))

    model, callbacks = overflowing(build=Outer), defaults()
    train(model, callbacks)
    repaired = model.optimizer.snapshot()
    assert repaired.overflows_in_a_row == 0
    names = {path.rpartition("/")[2] for path in callbacks[0].run.last("fallback")}
    assert names == {"cube", "norm"}  # the layer in the inner model is enough
    train(model, callbacks)
    assert model.optimizer.snapshot().overflow_count == repaired.overflow_count


def test_layer_whose_float32_raises_in_the_users_code_is_set_with_the_layer_that_contains_it():
    with kmp.enable():
        layer = Mixed(name="mixed")
    model = overflowing(layer)
    with pytest.warns(
        UserWarning,
        match="A saved file keeps this for 'cube' only if the config of Mixed contains it",
    ):
        train(model, defaults())
    assert dtypes(model)["mixed"] == "float32"
    assert model.optimizer.snapshot().overflows_in_a_row == 0


def kernel(value):
    return {"kernel_initializer": keras.initializers.Constant(value)}


@keras.saving.register_keras_serializable("tests.callbacks")
class Shifted(keras.layers.Layer):
    """Adds a weight in its first compute dtype: float16, also after a repair."""

    def build(self, shape):
        self.shift = self.add_weight(
            shape=(), initializer="zeros", dtype=self.compute_dtype, name="shift"
        )

    def call(self, x):
        return tf.add(x * x * x, self.shift)


def model_of_repaired_layers():
    """Returns a model in which several layers overflow.

    They are a shared layer, one with a weight in float16, and layers that contain others.
    """
    inputs, shared = keras.Input((4, 4)), Cube(name="shared")
    options = {
        "recurrent_initializer": "ones",
        "return_sequences": True,
        "unroll": True,
        **kernel(10.0),
    }
    overflowing = [
        *(shared(inputs), shared(inputs), Shifted(name="shifted")(inputs)),
        layers.MultiHeadAttention(2, 4, name="attention", **kernel(9.0))(inputs, inputs),
        layers.Bidirectional(layers.SimpleRNN(8, "relu", **options), name="both_ways")(inputs),
        layers.TimeDistributed(layers.Dense(4, **kernel(1e3)), name="each_time")(inputs),
    ]
    outputs = layers.LayerNormalization(name="norm")(layers.Concatenate(name="all")(overflowing))
    return keras.Model(inputs, layers.GlobalAveragePooling1D()(outputs))


def test_files_clones_and_conversions_of_a_repaired_model_compute_as_it_does(tmp_path):
    with kmp.enable():
        body = model_of_repaired_layers()
        model = sequential(
            body, layers.Dense(1, name="head"), shape=(4, 4), optimizer="adam", run_eagerly=True
        )
    x = np.random.default_rng(0).uniform(20, 60, (ROWS, 4, 4)).astype("float32")
    callbacks = [*defaults(), keras.callbacks.ModelCheckpoint(tmp_path / "model.keras")]
    model.fit(x, np.ones((ROWS, 1)), batch_size=8, verbose=0, callbacks=callbacks)
    expected = all_dtypes(model)
    names = {path.rpartition("/")[2] for path in callbacks[0].run.last("fallback")}
    assert names == {"shared", "shifted", "attention", "both_ways", "each_time", "all"}
    assert body.get_layer("shifted").shift.dtype == "float16"
    assert set(expected) == {"float16", "float32"}
    loaded = keras.models.load_model(tmp_path / "model.keras")
    # Loaded without `enable`: its normalization is that of Keras, which rounds once less.
    np.testing.assert_allclose(loaded(x), model(x), rtol=2e-3, atol=1e-4)
    for other in (loaded, keras.models.clone_model(model), kmp.convert(model)):
        assert all_dtypes(other) == expected
    assert set(all_dtypes(kmp.to_float32(model))) == {"float32"}
    assert "float32" in str(kmp.audit(model))


def all_dtypes(model):
    """Returns the compute dtypes of all layers, with those in wrappers and nested models."""
    return [layer.compute_dtype for layer in sublayers(model) if not is_passthrough(layer)]


def test_model_without_a_float16_layer_after_its_repair_trains_again_without_a_warning():
    with kmp.enable():
        model = sequential(
            layers.Dense(1, name="only", **kernel(1e4)), optimizer="adam", run_eagerly=True
        )
        train(model, defaults())
        assert dtypes(model) == {"only": "float32"}
        model.compile("adam", "mse", run_eagerly=True)
        train(model, [], epochs=1)  # a warning is an error


def test_interrupted_training_resumes_with_the_layers_of_its_log_before_its_first_step(tmp_path):
    def interrupted_or_resumed(stops):
        keras.utils.clear_session()  # the same names, as in a new process
        model, callbacks = overflowing(), defaults(tmp_path / "run")
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", double_checkpoint=True)
        train(model, [*callbacks, backup, *stops], epochs=2)
        return model, callbacks[0].run

    with pytest.raises(KeyboardInterrupt):
        interrupted_or_resumed([Interrupt(epoch=1)])
    skipped = kmp.load_run(tmp_path / "run").last("overflow_count")
    with pytest.warns(
        UserWarning,
        match=r"As at step \d+, before the training was resumed, kmp set the .* 'sequential/cube'",
    ):
        model, run = interrupted_or_resumed([])
    assert dtypes(model) == {"cube": "float32", "norm": "float32", "head": "float16"}
    assert (model.optimizer.snapshot().step, model.optimizer.snapshot().overflow_count) == (
        16,
        skipped,
    )
    for each in (run, kmp.load_run(tmp_path / "run")):
        assert kmp.advise(each).problems == ()
        assert kmp.advise(each)[0].cause == "float32_fallback"
        assert len([row for row in each.rows if row.fallback]) == 1
    # A training that begins at step 0 is another one: its log replaces the earlier one.
    new = overflowing()
    train(new, defaults(tmp_path / "run"))
    assert new.optimizer.snapshot().overflow_count


def test_repair_without_a_reason_in_the_log_is_repeated_without_one(tmp_path):
    lines = {"schema": 1, "kind": "header"}, {"step": 0, "fallback": ["sequential/cube"]}
    (tmp_path / "kmp.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    keras.utils.clear_session()
    with pytest.warns(
        UserWarning, match="^As at step 0, before .* set the layer 'sequential/cube' to float"
    ):
        train(overflowing(), defaults(tmp_path))


def test_overflow_that_the_compiled_step_does_not_have_changes_no_layer():
    class Small(keras.layers.Layer):
        """Overflows, unless TensorFlow's optimizations multiply the two constants first."""

        def call(self, x):
            return x * 1e3 * 1e-3

    with kmp.enable():
        parts = Small(name="small"), layers.Dropout(0.5), layers.Dense(1, name="head")
        optimizer = kmp.wrap(keras.optimizers.SGD(1e-6), initial_scale=1.0)
        model = sequential(*parts, optimizer=optimizer, jit_compile=False)
    x = np.random.default_rng(0).uniform(80, 100, (ROWS, 4)).astype("float32")
    callbacks = defaults(on_nonfinite="ignore")
    model.fit(x, x[:, :1] > 90, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    replays = [replay for _, replay in callbacks[0].run.replays]
    assert [replay.is_finite for replay in replays] == [True] * len(replays)
    run = callbacks[0].run
    assert run.last("fallback") is None
    assert not kmp.advise(run).problems
    assert not np.isfinite(model(x)).all()


INPUTS = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
SOME = np.arange(ROWS)[:, None] % 8 == 0
NOT_OF_FLOAT16 = {
    "inputs beyond float16": ("data", {"x": np.where(SOME, 1e6, INPUTS)}),
    "NaN in the labels": ("targets", {"y": np.where(SOME, np.nan, INPUTS[:, :1])}),
    "NaN in the weights": ("loss", {"weights": np.nan}),
    "first update far too large": ("exploding", {"optimizer": keras.optimizers.Adam(10.0)}),
}


@pytest.mark.parametrize(("cause", "fault"), NOT_OF_FLOAT16.values(), ids=NOT_OF_FLOAT16)
def test_training_that_fails_for_another_cause_keeps_its_layers(cause, fault):
    with kmp.enable():
        parts = layers.Dense(32, "relu", name="a"), layers.Dense(1, name="b")
        model = sequential(*parts, optimizer=fault.get("optimizer", "sgd"), run_eagerly=True)
    if "weights" in fault:
        model.layers[0].kernel.assign(np.full((4, 32), fault["weights"]))
    callbacks = defaults(on_nonfinite="ignore")
    x, y = fault.get("x", INPUTS), fault.get("y", INPUTS[:, :1])
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    assert [found.cause for found in kmp.advise(callbacks[0].run).problems] == [cause]
    assert callbacks[0].run.last("fallback") is None
    assert dtypes(model) == {"a": "float16", "b": "float16"}


def test_model_whose_loss_exploded_before_it_overflowed_keeps_its_layers():
    """Each step's learning rate is larger.

    BatchNormalization keeps the loss finite until the weights overflow.
    """
    x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
    rate = keras.optimizers.schedules.ExponentialDecay(1e-3, 4, 4.0)
    with kmp.enable():
        hidden = (
            layers.Dense(32),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dense(32, "relu"),
        )
        options = {"optimizer": keras.optimizers.SGD(rate), "jit_compile": False}
        model = sequential(*hidden, layers.Dense(1), shape=(8,), **options)
    callbacks = defaults(on_nonfinite="ignore")
    model.fit(x, x.sum(1, keepdims=True), batch_size=16, epochs=3, verbose=0, callbacks=callbacks)
    assert model.optimizer.snapshot().nonfinite_loss_count
    assert callbacks[0].run.last("fallback") is None


def test_change_whose_replay_fails_is_taken_back_and_that_of_a_later_batch_is_made(monkeypatch):
    replays = []

    def second_fails(*args, **kwargs):
        replays.append(args)
        if len(replays) == 2:
            raise ValueError("no")
        return replay_batch(*args, **kwargs)

    monkeypatch.setattr("kmp.callbacks.batch_replayer.replay_batch", second_fails)
    model, callbacks = overflowing(), defaults()
    train(model, callbacks, epochs=2)
    first, second, *_ = (step for step, found in callbacks[0].run.replays if not found.is_finite)
    (repaired_at,) = (row.step for row in callbacks[0].run.rows if row.fallback)
    assert first < second == repaired_at
    assert dtypes(model) == {"cube": "float32", "norm": "float32", "head": "float16"}


def test_harm_without_overflow_is_repaired_and_shown_in_tensorboard(tmp_path):
    with kmp.enable():
        phase = layers.Lambda(lambda x: ops.sin(x * (2 * np.pi / 24)), name="phase")
        model = sequential(phase, layers.Dense(1, name="head"), shape=(1,), run_eagerly=True)
    hours = np.random.default_rng(0).uniform(48_000, 49_000, (ROWS, 1))
    with pytest.warns(UserWarning, match="The outputs of layer 'phase' are not those of float32"):
        model.fit(hours, np.sin(hours), batch_size=8, verbose=0, callbacks=defaults(tmp_path))
    assert dtypes(model) == {"phase": "float32", "head": "float16"}
    (row,) = [row for row in kmp.load_run(tmp_path).rows if row.fallback]
    (event,) = tensorboard(tmp_path, "kmp/fallback")
    text = tf.make_ndarray(event.tensor_proto).item().decode()
    assert event.step == row.step
    assert text == f"```\nSet to float32: {row.fallback[0]!r}\n{row.fallback_reason}\n```"


def test_without_replays_nothing_is_repaired():
    assert not Monitor(replay=False).repair
    with pytest.raises(TypeError, match="`repair` must be True or False"):
        Monitor(repair=3)


def test_model_with_a_converted_function_is_repaired():
    """Code of a `tf.function` may have an `if` on a tensor, which TensorFlow converts."""

    class Checked(keras.layers.Layer):
        @tf.function
        def call(self, x):
            if tf.reduce_sum(x) > 6e4:
                x = x * 0.5
            return x

    with kmp.enable():
        parts = [Checked(name="checked"), Cube(name="cube"), keras.layers.Dense(1, name="head")]
    model = keras.Sequential([keras.Input((4,)), *parts])
    model.compile(kmp.wrap(keras.optimizers.SGD(1e-9)), "mse", jit_compile=False)
    with pytest.warns(UserWarning, match="kmp set the layer.* to float32"):
        train(model, defaults())
    assert model.optimizer.snapshot().overflows_in_a_row == 0
