import json
import random
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import kmp
import kmp_bench
from kmp_bench.model_variants import POLICIES, as_dataset, made_batch, source_of

QUICK = {"steps": 1, "rounds": 2}
EVERY_STEP = [(policy, mode) for policy in POLICIES for mode in ("graph", "XLA")]


class WithOwnStep(keras.Model):
    """A model with a `train_step` of its own, as a user may write it."""

    def __init__(self):
        super().__init__(name="own")
        self.hidden, self.last = keras.layers.Dense(8, "relu"), keras.layers.Dense(3)
        self.dtypes = set()

    def call(self, x):
        return self.last(self.hidden(x))

    def train_step(self, data):
        x, y = data
        x = tf.ensure_shape(tf.numpy_function(lambda value: value, [x], x.dtype), x.shape)
        with tf.GradientTape() as tape:
            outputs = self(x)
            self.dtypes.add(outputs.dtype.name)
            loss = keras.ops.mean(keras.ops.square(keras.ops.cast(outputs, "float32") - y))
            scaled = self.optimizer.scale_loss(loss)
        variables = self.trainable_variables
        gradients = tape.gradient(scaled, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"loss": loss}


def compiled(*layers, loss="mse", inputs=(6,), **options):
    model = keras.Sequential([keras.Input(inputs), *layers], name="small")
    model.compile("adam", loss, **options)
    return model


def with_own_policy():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, dtype="mixed_float16")])
    model.compile("sgd", "mse")
    return model, np.zeros((2, 2))


_SHARED = keras.layers.Dense(3, dtype="float32")


def with_shared_layer():
    return compiled(keras.layers.Dense(3), _SHARED), np.zeros((2, 6))


class StateOfTheProgram:
    """Seeds all random numbers; `read` returns what a program reads of the global state."""

    def __init__(self):
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        keras.random.normal((2,))

    def read(self):
        drawn = random.random(), np.random.rand(), float(tf.random.uniform(()))
        seed = keras.layers.Dropout(0.5).seed_generator.state.numpy().tolist()
        name, policy = keras.layers.Dense(1).name, keras.config.dtype_policy().name
        return *drawn, float(keras.random.uniform(())), seed, name, policy


def test_function_is_called_under_each_policy_and_changes_nothing_of_the_program():
    models, element = [], (np.ones((4, 6), "float32"), np.ones((4, 3), "float32"))

    def function():
        keras.utils.set_random_seed(7)
        model = WithOwnStep()
        model.compile("sgd", jit_compile=False)
        models.append((keras.config.dtype_policy().name, model))
        return model, tf.data.Dataset.from_tensors(element).repeat(9)

    expected = StateOfTheProgram().read()
    state = StateOfTheProgram()
    compared = kmp_bench.compare(function, **QUICK)
    assert state.read() == expected

    assert [policy for policy, _ in models] == list(POLICIES)
    assert [model.dtypes for _, model in models] == [{"float32"}, {"float16"}, {"bfloat16"}]
    assert [type(model.optimizer) for _, model in models] == [kmp.LossScaleOptimizer] * 3
    weights = [model.hidden.kernel for _, model in models]
    assert np.isfinite(weights).all()
    assert [(step.policy, step.mode) for step in compared.steps] == EVERY_STEP
    assert [len(step.seconds) for step in compared.steps] == [2, 0] * 3
    errors = [step.error for step in compared.steps]
    assert errors == ["", "it does not support PyFunc"] * 3
    assert compared.xla_off == errors[1]
    assert (compared.model, compared.batch) == ("own", "4 x 6 float32, 4 x 3 float32")
    assert compared.data_seconds > 0
    assert compared.tensor_core_layers == 2
    assert [*compared.unaligned.values()] == [("inputs 6 -> 8",), ("units 3 -> 8",)]
    assert set(compared.traffic["mixed_float16"].by_owner) >= {"Dense", ""}


# XLA takes longest to measure: only the example in the docstring of `compare` has it.
def test_model_under_a_strategy_is_copied_and_its_steps_are_timed_and_counted(one_replica):
    normalized = keras.layers.Dense(8), keras.layers.BatchNormalization()
    with one_replica.scope():
        model = compiled(*normalized, keras.layers.Dense(8), inputs=(8,))
    weights = model.get_weights()
    expected = StateOfTheProgram().read()
    state = StateOfTheProgram()
    compared = kmp_bench.compare(model, **QUICK)
    assert state.read() == expected
    for weight, now in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, now)
    assert model.optimizer.iterations == 0

    assert [(step.policy, step.mode) for step in compared.steps] == EVERY_STEP
    errors = [step.error for step in compared.steps]
    assert errors == [""] * 6
    in_float32, in_float16 = (compared.traffic[policy] for policy in POLICIES[:2])
    normalization = [each.by_owner["BatchNormalization"] for each in (in_float32, in_float16)]
    assert normalization[0].float32_bytes > 0.99 * normalization[0].bytes
    assert normalization[0].bytes > 4 * normalization[1].bytes
    assert in_float16.host_decisions == 0  # counted as on a GPU, whose host waits for none
    assert not compared.unaligned
    results = compared.measurements()
    steps = [(each.variant, each.mode) for each in results if each.section == "step"]
    assert steps == EVERY_STEP
    assert [each.ratio is None for each in results[:6]] == [True, *[False] * 5]
    assert {each.section for each in results} >= {"kernels", "bytes", "float32 bytes"}
    assert json.loads(json.dumps(compared.to_dict()))["limit"] == compared.limit
    assert "XLA is off" not in compared.limit
    assert ("memory" in {each.section for each in results}) == bool(kmp.gpus())
    shown = str(compared)
    for line in ("small: a training step, batch 32 x 8 float32", "The batch was made: 32"):
        assert line in shown
    assert compared.limit in " ".join(shown.split())


def test_float32_layers_of_a_mixed_model_are_float32_in_each_format():
    with kmp.enable():
        kept = keras.layers.Dense(6, dtype="float32", name="kept")
        model = compiled(keras.layers.Dense(6), kept, keras.layers.Dense(3))
    source = source_of(model, (np.ones((4, 6)), np.ones((4, 3))))
    dtypes = {}
    for policy in POLICIES:
        with kmp.enable(policy):
            copy, _ = source.build(policy)
        assert isinstance(copy.optimizer, kmp.LossScaleOptimizer)
        assert copy is not model
        dtypes[policy] = [layer.compute_dtype for layer in copy.layers]
    assert dtypes == {
        "float32": ["float32"] * 3,
        "mixed_float16": ["float16", "float32", "float16"],
        "mixed_bfloat16": ["bfloat16", "float32", "bfloat16"],
    }


_INPUT = keras.Input((2,))


def branches(loss):
    inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((2,), dtype="int32", name="b")}
    joined = keras.layers.Concatenate()(
        [inputs["a"], keras.layers.Embedding(5, 1)(inputs["b"])[:, 0]]
    )
    first, second = (keras.layers.Dense(3, name=name)(joined) for name in ("first", "second"))
    model = keras.Model(inputs, [first, second])
    model.compile("sgd", loss)
    return model


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: compiled(keras.layers.Dense(3)), [((2, 6), "float32"), ((2, 3), "float32")]),
        (
            lambda: compiled(keras.layers.Dense(3), loss="sparse_categorical_crossentropy"),
            [((2, 6), "float32"), ((2,), "int32")],
        ),
        (lambda: compiled(keras.layers.Dense(3), loss=None), [((2, 6), "float32")]),
        (
            lambda: branches(["mse", keras.losses.SparseCategoricalCrossentropy(True)]),
            [((2, 4), "float32"), ((2, 2), "int32"), ((2, 3), "float32"), ((2,), "int32")],
        ),
        (
            lambda: branches({"second": "mse", "first": "mae"}),
            [((2, 4), "float32"), ((2, 2), "int32"), ((2, 3), "float32"), ((2, 3), "float32")],
        ),
    ],
    ids=["dense", "sparse", "no loss", "two outputs", "losses by name"],
)
def test_made_batch_has_the_shapes_of_inputs_and_targets_and_trains(model, expected):
    model = model()
    batch, note = made_batch(model, 2)
    assert note.startswith("The batch was made: 2 examples")
    arrays = keras.tree.flatten(batch)
    assert [(array.shape, array.dtype.name) for array in arrays] == expected
    if model.loss is not None:
        assert np.isfinite(model.train_on_batch(*batch)).all()


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("model", {}, "`model` must be a keras.Model or a function. Received: model='model'"),
        (lambda x: x, {}, "The function must take no arguments: missing a required argument: 'x'"),
        (lambda: None, {}, "The function returned NoneType. It must return (model, batch)"),
        (lambda: (1, 2, 3), {}, "The function returned (int, int, int). It must return"),
        (lambda: (keras.Sequential(name="s"), 1), {}, "'s' is not compiled. Compile it in the"),
        (with_own_policy, {}, "under kmp.enable('float32'), but its model computes in float16"),
        (with_shared_layer, {}, "The function returned models that share variables. It must"),
        (with_own_policy, {"batch": 1}, "A function returns the batch, too: omit `batch`"),
        (
            keras.Model(_INPUT, keras.layers.Dense(1)(_INPUT), name="s"),
            {},
            "The model 's' is not compiled.",
        ),
        (
            compiled(keras.layers.Dense(1)),
            {},
            "No layer of 'small' would compute in 16 bits: see kmp.audit(model).",
        ),
        (compiled, {"steps": 0}, "`steps` must be"),
    ],
)
def test_what_cannot_be_measured_is_an_error_before_anything_trains(model, options, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        kmp_bench.compare(model, **options)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((), "Received a tuple of 0."),
        ((np.ones((4, 2)), np.ones(3)), "must have one batch size. Their shapes: (4, 2), (3,)"),
        (2.0, "must have one batch size. Their shapes: ()"),
        (object(), "must have arrays or tensors. Received: object"),
    ],
    ids=["empty", "sizes", "number", "object"],
)
def test_batch_of_another_form_is_an_error_that_shows_it(batch, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        as_dataset(batch)


def test_model_whose_inputs_are_not_known_needs_a_batch():
    model = compiled(keras.layers.Dense(3), inputs=(None, 6))
    with pytest.raises(ValueError, match="No batch can be made for 'small'.*Pass a batch"):
        kmp_bench.compare(model)


def test_model_that_does_not_train_in_float32_is_a_measurement_error():
    model = compiled(keras.layers.Dense(3), keras.layers.Dense(3))
    with pytest.raises(kmp_bench.MeasurementError, match="does not train in float32. .*Error: "):
        kmp_bench.compare(model, (np.ones((4, 5)), np.ones((4, 3))), **QUICK)
