import logging
import re

import keras
import models
import numpy as np
import pytest
from keras import layers, ops

import kmp
from kmp.backend.layer_traversal import is_passthrough
from kmp.conversion.model_parts import parts_of

EVERY = pytest.mark.parametrize("make", models.ALL, ids=lambda make: make.__name__)


def outputs_of(model, batch):
    return [np.asarray(one) for one in keras.tree.flatten(model(batch, training=False))]


def dtypes_of(model):
    computing = [part for part in parts_of(model) if part.is_layer and not is_passthrough(part.operation)]
    return {part.path: part.operation.compute_dtype for part in computing}


@EVERY
def test_converted_model_has_the_same_weights_and_nearly_the_same_outputs(make):
    model, batch = make()
    config, before = model.get_config(), outputs_of(model, batch)
    converted = kmp.convert(model)
    assert "float16" in dtypes_of(converted).values()
    for mine, its in zip(converted.variables, model.variables, strict=True):
        np.testing.assert_array_equal(mine, its)
        assert mine is not its
    for mine, its in zip(outputs_of(converted, batch), before, strict=True):
        assert mine.dtype == its.dtype or make is models.gan  # what a subclassed model puts out is its own affair
        np.testing.assert_allclose(mine, its, rtol=1e-2, atol=1e-2)
    assert model.get_config() == config
    assert set(dtypes_of(model).values()) <= {"float32", "string", "int64"}
    for now, then in zip(outputs_of(model, batch), before, strict=True):
        np.testing.assert_array_equal(now, then)


@EVERY
def test_way_back_is_the_original_made_of_keras_layers_only(make):
    model, batch = make()
    back = kmp.to_float32(kmp.convert(model))
    for mine, its in zip(outputs_of(back, batch), outputs_of(model, batch), strict=True):
        np.testing.assert_array_equal(mine, its)
    assert [type(part.operation) for part in parts_of(back)] == [type(part.operation) for part in parts_of(model)]
    assert [v.dtype for v in back.variables] == [v.dtype for v in model.variables]


@EVERY
@pytest.mark.filterwarnings("ignore:.*is not compiled:UserWarning")  # the GAN's `compile` is its own
def test_converted_model_trains_and_comes_back_from_a_file_equal(make, tmp_path):
    model, batch = make()
    converted = kmp.convert(model)
    if make is models.gan:
        converted.compile(generator=kmp.wrap("adam"), discriminator=kmp.wrap("adam"))
        history = converted.fit(batch, np.zeros((4, 6), "float32"), verbose=0).history
    else:
        converted.compile(kmp.wrap("adam", initial_scale=64.0), "mse", jit_compile=False)
        targets = keras.tree.map_structure(lambda one: np.zeros(one.shape, "float32"), converted(batch))
        history = converted.fit(batch, targets, verbose=0).history
    assert np.isfinite(history["loss"]).all()
    pairs = zip(converted.trainable_variables, model.trainable_variables, strict=True)
    assert any(np.any(np.asarray(mine) != np.asarray(its)) for mine, its in pairs)
    converted.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", compile=False, safe_mode=False)
    assert list(dtypes_of(loaded).values()) == list(dtypes_of(converted).values())
    for mine, its in zip(outputs_of(loaded, batch), outputs_of(converted, batch), strict=True):
        np.testing.assert_array_equal(mine, its)


def test_softmax_and_the_outputs_stay_float32_and_batch_normalization_becomes_kmps():
    model, _ = models.classifier()
    converted = kmp.convert(model)
    kinds = [type(layer) for layer in converted.layers]
    assert kinds == [layers.Dense, kmp.layers.BatchNormalization, layers.Dropout, layers.Dense]
    assert [layer.compute_dtype for layer in converted.layers] == ["float16"] * 3 + ["float32"]


def test_operations_that_float16_endangers_run_in_float32():
    model, _ = models.operations()
    dtypes = {part.operation.name: part.operation for part in parts_of(kmp.convert(model)) if not part.is_layer}
    for start, dtype in {
        "power": "float32",
        "exp": "float32",
        "sum": "float32",
        "add": "float16",
        "relu": "float16",
    }.items():
        operation = next(operation for name, operation in dtypes.items() if name.startswith(start))
        assert operation.output.dtype == dtype, start


def test_symbolic_outputs_tell_the_dtype_that_comes_out():
    model, batch = models.u_net()
    converted = kmp.convert(model)
    for layer in converted.layers[1:]:
        inner = keras.Model(converted.input, layer.output)
        assert inner(batch).dtype == layer.output.dtype


@pytest.mark.parametrize(
    "choice", ["dense", "den*", layers.Dense, lambda layer: layer.name == "dense", ["dense", layers.Dropout]]
)
def test_what_is_asked_for_stays_float32(choice):
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(4, name="dense"),
            layers.Dropout(0.1),
            layers.PReLU(name="middle"),
            layers.ReLU(),
        ]
    )
    dtypes = dtypes_of(kmp.convert(model, keep_float32=choice))
    assert (dtypes["dense"], dtypes["middle"]) == ("float32", "float16")


def test_layer_itself_and_a_path_that_is_whole_mean_that_layer_alone_and_a_name_all_that_have_it():
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="one"), layers.Dense(4, name="two")], name="in")
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.ReLU()(layers.Dense(4, name="last")(inner(layers.Dense(4, name="one")(inputs)))))
    for choice in ("one", model.get_layer("one")):
        dtypes = dtypes_of(kmp.convert(model, keep_float32=choice))
        assert (dtypes["one"], dtypes["in/one"]) == ("float32", "float16")
    assert dtypes_of(kmp.convert(model, keep_float32="two"))["in/two"] == "float32"
    with pytest.raises(ValueError, match="no layer matches <Dense"):
        kmp.convert(model, keep_float32=layers.Dense(4))


def test_holder_asked_for_keeps_what_is_inside_in_float32():
    model, batch = models.autoencoder()
    converted = kmp.convert(model, keep_float32="encoder")
    dtypes = dtypes_of(converted)
    assert {dtype for path, dtype in dtypes.items() if path.startswith("encoder/")} == {"float32"}
    assert "float16" not in {one.dtype for one in outputs_of(converted, batch)}


def test_what_overflows_with_the_batch_stays_float32_and_is_told(caplog):
    big = keras.initializers.Constant(3e3)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(8, name="small"),
            layers.Dense(8, kernel_initializer=big, name="big"),
            layers.LayerNormalization(name="normalized"),
            layers.Dense(8, name="later"),
            layers.Dense(2, name="end"),
        ]
    )
    batch = np.full((2, 8), 100.0, "float32")
    assert not np.isfinite(outputs_of(kmp.convert(model), batch)[0]).all()
    with caplog.at_level(logging.WARNING, "kmp"):
        converted = kmp.convert(model, batch=batch)
    assert np.isfinite(outputs_of(converted, batch)[0]).all()
    assert "big stays float32: it overflowed with the batch" in caplog.text
    dtypes = dtypes_of(converted)
    assert (dtypes["small"], dtypes["big"], dtypes["later"]) == ("float16", "float32", "float16")


def test_layer_that_cannot_be_told_a_dtype_is_told(caplog):
    kmp.convert(models.custom_layers()[0])
    assert "without stays float32: its config has no dtype, so it cannot be told one." in caplog.text


def test_model_of_several_replicas_becomes_one(two_replicas):
    with two_replicas.scope():
        model, batch = models.classifier()
    converted = kmp.convert(model)
    assert type(converted.weights[0].value).__name__ == "MirroredVariable"
    np.testing.assert_allclose(outputs_of(converted, batch)[0], outputs_of(model, batch)[0], atol=1e-2)


def test_function_that_nobody_registered_survives():
    offset = 3.0
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(4, activation=lambda x: ops.maximum(x, 0.0)),
            layers.Lambda(lambda x: x + offset),
            layers.Dense(2),
        ]
    )
    batch = np.ones((2, 4), "float32")
    np.testing.assert_allclose(outputs_of(kmp.convert(model), batch)[0], outputs_of(model, batch)[0], atol=1e-2)


def test_layer_shared_by_two_nested_models_stays_shared():
    shared = layers.Dense(4, name="shared")
    first = keras.Sequential([keras.Input((4,)), shared], name="first")
    second = keras.Sequential([keras.Input((4,)), shared, layers.ReLU()], name="second")
    inputs = keras.Input((4,))
    converted = kmp.convert(keras.Model(inputs, second(first(inputs))))
    assert converted.get_layer("first").layers[0] is converted.get_layer("second").layers[0]
    assert len(converted.weights) == 2


def test_frozen_layers_stay_frozen_also_where_a_layer_made_them():
    model, _ = models.custom_layers()
    model.get_layer("block").dense.trainable = False
    converted = kmp.convert(model)
    assert not converted.get_layer("block").dense.trainable
    assert converted.get_layer("block").normalize.trainable


@pytest.mark.parametrize(
    ("level", "dtypes"),
    [
        ("O0", ["float32", "float32", "float32", "float32"]),
        ("O1", ["float16", "float16", "float16", "float32"]),
        ("O2", ["float16", "float32", "float16", "float16"]),
        ("O3", ["float16", "float16", "float16", "float16"]),
    ],
)
def test_levels_of_apex(level, dtypes):
    model, batch = models.classifier()
    recipes = {
        "O0": lambda: kmp.to_float32(model),
        "O1": lambda: kmp.convert(model),
        "O2": lambda: kmp.convert(model, keep_float32=layers.BatchNormalization, float32_layers=False),
        "O3": lambda: kmp.convert(model, "float16", float32_layers=False),
    }
    converted = recipes[level]()
    assert [layer.compute_dtype for layer in converted.layers] == dtypes
    in_half = {variable.dtype for variable in converted.weights} == {"float16"}
    assert in_half == (level == "O3")
    np.testing.assert_allclose(outputs_of(converted, batch)[0], outputs_of(model, batch)[0], atol=1e-2)


def test_plan_can_be_saved_edited_and_applied(tmp_path):
    model, _ = models.classifier()
    plan = kmp.audit(model).plan
    plan.float32["dropout"] = "I say so"
    plan.save(tmp_path / "plan.json")
    converted = kmp.convert(models.classifier()[0], kmp.Plan.load(tmp_path / "plan.json"))
    assert [layer.compute_dtype for layer in converted.layers] == ["float16", "float16", "float32", "float32"]


def test_plan_that_names_a_holder_keeps_what_is_inside():
    model, _ = models.autoencoder()
    dtypes = dtypes_of(kmp.convert(model, kmp.Plan("mixed_float16", {"encoder": "why"})))
    assert {path.split("/")[0]: dtype for path, dtype in dtypes.items()} == {"encoder": "float32", "decoder": "float16"}


def test_plan_for_another_model_is_an_error():
    with pytest.raises(ValueError, match="The plan names 'typo', and there is no such layer.*The layers are: dense, "):
        kmp.convert(models.classifier()[0], kmp.Plan("mixed_float16", {"typo": "why"}))


@pytest.mark.parametrize("options", [{"keep_float32": "dense"}, {"float32_layers": False}])
def test_plan_beside_what_makes_one_is_an_error(options):
    with pytest.raises(ValueError, match="one that is given says all"):
        kmp.convert(models.classifier()[0], kmp.Plan("mixed_float16"), **options)


def test_function_in_float32_goes_over_and_comes_back_without_kmp():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4), kmp.layers.Float32(ops.exp), layers.Dense(2)])
    batch = np.ones((2, 4), "float32")
    converted = kmp.convert(model)
    assert [layer.compute_dtype for layer in converted.layers] == ["float16", "float32", "float32"]
    back = kmp.to_float32(converted)
    assert {type(layer).__module__.split(".")[0] for layer in back.layers} == {"keras"}
    np.testing.assert_array_equal(outputs_of(back, batch)[0], outputs_of(model, batch)[0])


def test_model_in_float16_already_is_returned_and_told(caplog):
    converted = kmp.convert(models.classifier()[0])
    assert kmp.convert(converted) is converted
    assert "computes in float16 and float32 already" in caplog.text


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")  # Keras' own quantize
def test_quantized_model_is_left_alone_and_told(caplog):
    model, _ = models.classifier()
    model.quantize("int8")
    assert kmp.convert(model) is model
    assert kmp.to_float32(model) is model
    assert "is quantized" in caplog.text
    assert len(kmp.audit(model).rows) == 5
    with pytest.raises(ValueError, match="is quantized and has no float32"):
        kmp.audit(model, np.zeros((1, 8), "float32"))


@pytest.mark.parametrize("function", [kmp.convert, kmp.to_float32, kmp.audit])
def test_model_that_is_not_built_is_an_error(function):
    with pytest.raises(ValueError, match="is not built: call it on a batch first"):
        function(keras.Sequential([layers.Dense(2, name="one")]))


@pytest.mark.parametrize("function", [kmp.convert, kmp.to_float32, kmp.audit])
def test_what_is_no_model_is_an_error(function):
    with pytest.raises(
        TypeError, match="`model` must be a keras.Model, such as .* returns. Received: model='model.keras'"
    ):
        function("model.keras")


@pytest.mark.parametrize("choice", ["nosuch*", layers.Conv2D, ["dense", "nosuch*"]])
def test_pattern_that_matches_no_layer_is_an_error(choice):
    with pytest.raises(ValueError, match="no layer matches ('nosuch.*'|Conv2D). The layers are: dense, "):
        kmp.convert(models.classifier()[0], keep_float32=choice)


def test_keep_float32_of_another_type_is_an_error():
    with pytest.raises(TypeError, match="`float32_layers` must be True or False"):
        kmp.convert(models.operations()[0], float32_layers="no")
    with pytest.raises(TypeError, match="`keep_float32` must be a path or pattern"):
        kmp.convert(models.classifier()[0], keep_float32=3)


@pytest.mark.parametrize("policy", ["float32", "mixed_float8"])
def test_policy_that_is_none_is_an_error(policy):
    with pytest.raises(ValueError, match="`policy` must be one of 'mixed_float16', 'mixed_bfloat16'"):
        kmp.convert(models.classifier()[0], policy)


@pytest.mark.parametrize("policy", [None, keras.DTypePolicy("mixed_float16")])
def test_policy_that_is_no_string_is_an_error(policy):
    with pytest.raises(TypeError, match="`policy` must be one of"):
        kmp.convert(models.classifier()[0], policy)


def test_float64_model_is_an_error():
    model = keras.Sequential([keras.Input((2,)), layers.Dense(2, dtype="float64")])
    for function in (kmp.convert, kmp.to_float32):
        with pytest.raises(ValueError, match="computes in float64"):
            function(model)


def test_variable_that_is_frozen_by_itself_stays_frozen():
    model, _ = models.classifier()
    model.layers[0].kernel.trainable = False
    assert not kmp.convert(model).layers[0].kernel.trainable


def test_lora_goes_over_unmerged():
    model, _ = models.autoencoder()
    layer = model.get_layer("decoder").layers[0]
    layer.enable_lora(2)
    layer.lora_kernel_b.assign(np.ones((2, 16)))
    converted = kmp.convert(model)
    for mine, its in zip(converted.variables, model.variables, strict=True):
        np.testing.assert_array_equal(mine, its)
    assert len(converted.trainable_variables) == len(model.trainable_variables)


def test_constraint_and_regularizer_that_nobody_registered_survive():
    class Mine(keras.constraints.Constraint):
        def __call__(self, weights):
            return weights

    dense = layers.Dense(2, kernel_constraint=Mine(), kernel_regularizer=lambda weights: 0.1 * ops.sum(weights))
    try:
        model = keras.Sequential([keras.Input((2,)), layers.Dense(2), dense])
    except ValueError:
        pytest.skip("An earlier Keras takes no function for a regularizer.")
    converted = kmp.convert(model).layers[1]
    assert converted.kernel_constraint is dense.kernel_constraint
    assert converted.kernel_regularizer is dense.kernel_regularizer


def test_text_vectorization_goes_over():
    words = layers.TextVectorization(output_sequence_length=4)
    words.adapt(["a b c"])
    embedded = [words, layers.Embedding(10, 8), layers.Flatten(), layers.Dense(2)]
    model = keras.Sequential([keras.Input((), dtype="string"), *embedded])
    converted = kmp.convert(model)
    assert converted.layers[0].get_vocabulary() == words.get_vocabulary()
    assert converted.layers[1].compute_dtype == "float16"


def test_get_config_of_ones_own_on_a_layer_stays():
    model, _ = models.classifier()
    layer = model.layers[0]
    config = layer.get_config()
    layer.get_config = lambda: config | {"name": "renamed"}
    assert kmp.convert(model).layers[0].name == "renamed"
    assert layer.get_config()["name"] == "renamed"


def test_layer_that_cannot_be_made_is_named():
    class Needs(layers.Layer):
        def __init__(self, needed, **kwargs):
            super().__init__(**kwargs)

        def call(self, inputs):
            return inputs

        def get_config(self):
            return keras.layers.Layer.get_config(self)

    inputs = keras.Input((2,))
    with pytest.raises(ValueError, match="Needs 'needs.*' cannot be made anew from its config: .*missing.*'needed'"):
        kmp.convert(keras.Model(inputs, Needs(object())(inputs)))


def test_wrapper_without_a_config_is_told_without_keras_example():
    class Around(layers.Layer):
        def __init__(self, inside):
            super().__init__()
            self.inside = inside

        def call(self, inputs):
            return self.inside(inputs)

    inputs = keras.Input((2,))
    with pytest.raises(
        ValueError,
        match=r"config: Object Around .*Please implement `get_config\(\)`\. It needs a `get_config` that returns",
    ):
        kmp.convert(keras.Model(inputs, Around(layers.Dense(2))(inputs)))


class MakesItsGraph(keras.Model):
    def __init__(self, **kwargs):
        inputs = keras.Input((8,))
        hidden = ops.exp(layers.Dense(8, name="first", kernel_initializer="identity")(inputs))
        super().__init__(inputs, layers.Dense(2, name="last", kernel_initializer="ones")(hidden), **kwargs)

    def get_config(self):
        return {"name": self.name}


def test_operation_that_a_class_makes_in_its_own_code_is_told_and_so_is_what_comes_of_it(caplog):
    model = MakesItsGraph(name="own")
    batch = np.full((1, 8), 12.0, "float32")
    converted = kmp.convert(model, batch=batch)
    assert re.search(r"exp\S* follows its inputs: MakesItsGraph makes it in its own code", caplog.text)
    assert "With this batch the outputs of 'own' are inf or nan in mixed_float16" in caplog.text
    assert dtypes_of(converted) == {"first": "float16", "last": "float32"}
    row = next(row for row in kmp.audit(model).rows if row.class_name == "Exp")
    assert (row.category, row.planned_dtype) == ("float32", "follows its inputs")


def test_states_of_rnns_go_over_and_a_batch_does_not_move_them():
    model = keras.Sequential([keras.Input((3, 4), batch_size=2), layers.LSTM(8, stateful=True), layers.Dense(2)])
    batch = np.ones((2, 3, 4), "float32")
    model(batch)
    before = [np.array(state) for state in model.layers[0].states]
    converted = kmp.convert(model, batch=batch)
    for rnn in (model.layers[0], converted.layers[0]):
        for state, was in zip(rnn.states, before, strict=True):
            np.testing.assert_allclose(state, was, rtol=1e-3)
    assert np.any(before[0] != 0)


def test_batch_that_overflows_in_float32_is_told(caplog):
    model, _ = models.autoencoder()
    kmp.convert(model, batch=np.full((1, 16), np.nan, "float32"))
    assert "inf or nan in float32 too" in caplog.text


@pytest.mark.parametrize("function", [lambda *a: kmp.convert(a[0], batch=a[1]), kmp.audit])
def test_batch_of_the_wrong_shape_is_an_error(function):
    with pytest.raises(ValueError, match="`batch` does not fit Sequential"):
        function(models.classifier()[0], np.zeros((2, 3), "float32"))


class WithoutConfig(keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, inputs):
        return self.layer(inputs)


def test_model_without_a_config_is_an_error_that_says_what_to_write():
    model = WithoutConfig(layers.Dense(2))
    model(np.zeros((1, 2), "float32"))
    with pytest.raises(ValueError, match="WithoutConfig .* cannot be made anew.*`get_config` that returns what its"):
        kmp.convert(model)
    assert "get_config" not in vars(model)
    assert "get_config" not in vars(model.layer)
