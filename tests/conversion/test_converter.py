import functools
import logging
import re

import keras
import models
import numpy as np
import pytest
from conftest import assert_equal
from keras import layers, ops

import kmp
from kmp.backend.keras_internals import is_passthrough
from kmp.conversion.model_parts import parts_of

ALL_MODELS = pytest.mark.parametrize("make", models.ALL, ids=lambda make: make.__name__)


def outputs_of(model, batch):
    return [np.asarray(output) for output in keras.tree.flatten(model(batch, training=False))]


def dtypes_of(model):
    computing = [
        part for part in parts_of(model) if part.is_layer and not is_passthrough(part.operation)
    ]
    return {part.path: part.operation.compute_dtype for part in computing}


@functools.cache
def converted_model(make):
    """Returns a model, a batch, its config and outputs, and the converted model."""
    model, batch = make()
    config, outputs = model.get_config(), outputs_of(model, batch)
    return model, batch, config, outputs, kmp.convert(model)


@ALL_MODELS
def test_converted_model_has_the_planned_dtypes_and_equal_weights_and_converts_back(
    make,
):
    model, batch, config, outputs_before, converted = converted_model(make)
    assert "float16" in dtypes_of(converted).values()
    for row, after in zip(kmp.audit(model).rows, kmp.audit(converted).rows, strict=True):
        if row.variable_dtype is not None and row.planned_dtype != "follows its inputs":  # a layer
            assert after.compute_dtype == row.planned_dtype, row.path
    assert_equal(converted.variables, model.variables)
    assert not set(map(id, converted.variables)) & set(map(id, model.variables))
    for output, expected in zip(outputs_of(converted, batch), outputs_before, strict=True):
        # kmp does not know a subclassed model's outputs.
        assert output.dtype == expected.dtype or make is models.gan
        np.testing.assert_allclose(output, expected, rtol=1e-2, atol=1e-2)
    restored = kmp.to_float32(converted)
    assert_equal(outputs_of(restored, batch), outputs_before)
    parts, original_parts = (
        [part.operation for part in parts_of(each)] for each in (restored, model)
    )
    assert [type(part) for part in parts] == [type(part) for part in original_parts]
    assert not set(map(id, parts)) & set(map(id, original_parts))
    assert [v.dtype for v in restored.variables] == [v.dtype for v in model.variables]
    assert (type(restored), restored.name) == (type(model), model.name)
    assert model.get_config() == config
    assert set(dtypes_of(model).values()) <= {"float32", "string", "int64"}
    assert_equal(outputs_of(model, batch), outputs_before)


@ALL_MODELS
@pytest.mark.filterwarnings("ignore:.*is not compiled:UserWarning")  # the GAN overrides `compile`
def test_converted_model_round_trips_through_a_file_and_trains(make, tmp_path):
    _, batch, _, _, converted = converted_model(make)
    converted.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", compile=False, safe_mode=False)
    assert list(dtypes_of(loaded).values()) == list(dtypes_of(converted).values())
    assert_equal(outputs_of(loaded, batch), outputs_of(converted, batch))
    if make is models.gan:
        loaded.compile(generator=kmp.wrap("adam"), discriminator=kmp.wrap("adam"))
        targets = np.zeros((4, 6), "float32")
    else:
        loaded.compile(kmp.wrap("adam", initial_scale=64.0), "mse")
        targets = keras.tree.map_structure(
            lambda output: np.zeros(output.shape, "float32"), loaded(batch)
        )
    # Which has operations that are not layers, for a graph.
    loaded.run_eagerly = make is not models.operations
    assert np.isfinite(loaded.fit(batch, targets, verbose=0).history["loss"]).all()
    pairs = zip(loaded.trainable_variables, converted.trainable_variables, strict=True)
    assert any(np.any(np.asarray(trained) != np.asarray(original)) for trained, original in pairs)


def test_operations_that_need_float32_run_in_float32():
    model, _ = models.operations()
    operations = [part.operation for part in parts_of(kmp.convert(model)) if not part.is_layer]
    dtypes = {operation.name: operation.output.dtype for operation in operations}
    for prefix in ("power", "exp", "sum", "add", "relu"):
        dtype = next(dtype for name, dtype in dtypes.items() if name.startswith(prefix))
        assert dtype == ("float16" if prefix in ("add", "relu") else "float32"), prefix


def test_symbolic_outputs_have_the_dtype_of_the_computed_outputs():
    _, batch, _, _, converted = converted_model(models.operations)
    for layer in converted.layers[1:]:
        inner = keras.Model(converted.input, layer.output)
        assert inner(batch).dtype == layer.output.dtype


@pytest.mark.parametrize(
    "selector",
    ["dense", "den*", layers.Dense, lambda layer: layer.name == "dense", ["dense", layers.Dropout]],
)
def test_layers_selected_by_keep_float32_stay_float32(selector):
    hidden = [layers.Dense(4, name="dense"), layers.Dropout(0.1), layers.PReLU(name="middle")]
    model = keras.Sequential([keras.Input((4,)), *hidden, layers.ReLU()])
    dtypes = dtypes_of(kmp.convert(model, keep_float32=selector))
    assert (dtypes["dense"], dtypes["middle"]) == ("float32", "float16")


def test_layer_object_and_full_path_select_one_layer_and_a_name_selects_all_that_have_it():
    inner = keras.Sequential(
        [keras.Input((4,)), layers.Dense(4, name="one"), layers.Dense(4, name="two")], name="in"
    )
    inputs = keras.Input((4,))
    model = keras.Model(
        inputs,
        layers.ReLU()(layers.Dense(4, name="last")(inner(layers.Dense(4, name="one")(inputs)))),
    )
    for selector in ("one", model.get_layer("one")):
        dtypes = dtypes_of(kmp.convert(model, keep_float32=selector))
        assert (dtypes["one"], dtypes["in/one"]) == ("float32", "float16")
    assert dtypes_of(kmp.convert(model, keep_float32="two"))["in/two"] == "float32"
    with pytest.raises(ValueError, match="no layer matches <Dense"):
        kmp.convert(model, keep_float32=layers.Dense(4))


def test_model_of_two_replicas_stays_mirrored(two_replicas):
    with two_replicas.scope():
        model, batch = models.classifier()
        model.compile("adam", "mse", jit_compile=False)
        model.optimizer.build(model.trainable_variables)
    converted = kmp.convert(model)
    variables = [converted.weights[0], *converted.optimizer.inner_optimizer.variables[2:4]]
    assert {type(variable.value).__name__ for variable in variables} == {"MirroredVariable"}
    np.testing.assert_allclose(
        outputs_of(converted, batch)[0], outputs_of(model, batch)[0], atol=1e-2
    )


class Doubling(layers.Layer):
    def call(self, inputs):
        return inputs * 2.0


class Untraceable(Doubling):
    """Needs the number of rows, which a trace does not know."""

    def call(self, inputs):
        int(inputs.shape[0])
        return super().call(inputs)

    def compute_output_shape(self, shape):
        return shape


class Similarity(layers.Layer):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.project = layers.Dense(8)

    def build(self, shape):
        self.project.build(shape)

    def call(self, inputs):
        return ops.matmul(ops.transpose(inputs), self.project(inputs))


def products(x):
    """Each of these is in range or not by the data."""
    gated = layers.Multiply(name="swiglu")([layers.Dense(8, "silu")(x), layers.Dense(8)(x)])
    scores = ops.matmul(x, ops.transpose(gated))
    return ops.matmul(scores, x * 1000.0)


def safe_operations(x):
    """Gates, products with weights and small factors, a mean, and what is in float32."""
    gated = layers.Dense(8, "sigmoid")(x) * layers.Dense(8, "relu")(x)
    gated = ops.matmul(gated, np.eye(8, dtype="float32"))
    gated = gated * 2.0 + ops.mean(x, axis=-1, keepdims=True)
    return gated + ops.exp(x) * x


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (products, "swiglu, matmul, multiply, matmul_1"),
        (safe_operations, ""),
        (Doubling(name="custom"), ""),
        (Untraceable(name="custom"), "custom"),
        (Similarity(name="custom"), "custom"),
    ],
    ids=["products", "safe", "custom layer", "untraceable layer", "products in a layer"],
)
def test_conversion_without_a_batch_names_what_may_overflow_by_the_range_of_the_data(
    function, named, caplog
):
    keras.utils.clear_session()
    inputs = keras.Input((8,))
    hidden = layers.Dense(8, name="first")(inputs)
    outputs = layers.Dense(8, name="last")(function(hidden))
    model = keras.Model(inputs, outputs)
    with caplog.at_level(logging.WARNING, "kmp"):
        kmp.convert(model)
    text = f"Whether these overflow float16 depends on the data: {named}. Pass `batch`"
    assert [record.getMessage()[: len(text)] for record in caplog.records] == [text] * bool(named)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "kmp"):
        kmp.convert(model, "mixed_bfloat16")
        kmp.convert(model, batch=np.ones((2, 8), "float32"))
    assert "depends on the data" not in caplog.text


@pytest.mark.parametrize(
    ("convert", "dtypes", "normalization"),
    [
        (kmp.to_float32, ["float32", "float32", "float32", "float32"], layers.BatchNormalization),
        (kmp.convert, ["float16", "float16", "float16", "float32"], kmp.layers.BatchNormalization),
        (
            lambda model: kmp.convert(
                model, kmp.Plan("mixed_float16"), keep_float32=layers.BatchNormalization
            ),
            ["float16", "float32", "float16", "float16"],
            kmp.layers.BatchNormalization,
        ),
        (
            lambda model: kmp.convert(model, kmp.Plan("float16")),
            ["float16", "float16", "float16", "float16"],
            layers.BatchNormalization,
        ),
    ],
    ids=["O0", "O1", "O2", "O3"],
)
def test_levels_of_apex_have_their_dtypes_and_normalization(convert, dtypes, normalization):
    model, batch = models.classifier()
    converted = convert(model)
    assert [layer.compute_dtype for layer in converted.layers] == dtypes
    assert [type(layer) for layer in converted.layers] == [
        layers.Dense,
        normalization,
        layers.Dropout,
        layers.Dense,
    ]
    in_half = {variable.dtype for variable in converted.weights} == {"float16"}
    assert in_half == (dtypes == ["float16"] * 4)
    np.testing.assert_allclose(
        outputs_of(converted, batch)[0], outputs_of(model, batch)[0], atol=1e-2
    )


def test_layers_of_kmp_stay_float32_whatever_the_plan_says_and_to_float32_replaces_them():
    kmps = [kmp.layers.Softmax(), kmp.layers.Float32(ops.exp), kmp.layers.Float32(layers.Dense(2))]
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4), *kmps])
    converted = kmp.convert(model, kmp.Plan("mixed_float16"))
    assert [layer.compute_dtype for layer in converted.layers] == [
        "float16",
        "float32",
        "float32",
        "float32",
    ]
    restored, batch = kmp.to_float32(converted), np.ones((2, 4), "float32")
    assert {type(layer).__module__.split(".")[0] for layer in restored.layers} == {"keras"}
    assert_equal(outputs_of(restored, batch), outputs_of(model, batch))
    inputs = keras.Input((4,))  # a function of two arguments stays kmp's layer
    model = keras.Model(
        inputs, kmp.layers.Float32(lambda a, b: ops.exp(a - b))(layers.Dense(4)(inputs), inputs)
    )
    restored = kmp.to_float32(kmp.convert(model))
    np.testing.assert_allclose(
        outputs_of(restored, batch)[0], outputs_of(model, batch)[0], rtol=1e-6
    )


def test_plan_can_be_saved_edited_and_applied(tmp_path):
    model, _ = models.classifier()
    plan = kmp.audit(model).plan
    plan.float32["dropout"] = "edited"
    plan.save(tmp_path / "plan.json")
    assert kmp.Plan.load(tmp_path / "plan.json") == plan
    converted = kmp.convert(models.classifier()[0], kmp.Plan.load(tmp_path / "plan.json"))
    assert [layer.compute_dtype for layer in converted.layers] == [
        "float16",
        "float16",
        "float32",
        "float32",
    ]


def test_keep_float32_adds_to_a_plan_which_keeps_nothing_else_in_float32():
    model, _ = models.classifier()
    dense = model.layers[0].name
    plan = kmp.Plan("mixed_float16", {"dropout": "edited"})
    converted = kmp.convert(model, plan, keep_float32=dense)
    assert [layer.compute_dtype for layer in converted.layers] == [
        "float32",
        "float16",
        "float32",
        "float16",
    ]
    assert plan.float32 == {"dropout": "edited"}


def test_float16_model_is_returned_unchanged_and_logged_and_so_are_nonfinite_outputs_in_float32(
    caplog,
):
    converted = kmp.convert(models.classifier()[0], batch=np.full((1, 8), np.nan, "float32"))
    assert "have NaN or Inf in float32 too" in caplog.text
    assert kmp.convert(converted) is converted
    assert "already computes in float16 and float32" in caplog.text


# Keras' own quantize.
@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
def test_quantized_model_is_returned_unchanged_and_logged(caplog):
    model, _ = models.classifier()
    model.quantize("int8")
    assert kmp.convert(model) is model
    assert kmp.to_float32(model) is model
    assert caplog.text.count("is quantized and is returned unchanged") == 2
    rows = kmp.audit(model).rows
    assert len(rows) == 5
    dense = [row for row in rows if row.class_name == "Dense"]
    assert [row.planned_dtype for row in dense] == [row.compute_dtype for row in dense]
    with pytest.raises(ValueError, match="is quantized and has no float32 version"):
        kmp.audit(model, np.zeros((1, 8), "float32"))


def test_lora_weights_are_copied_unmerged():
    model, _ = models.autoencoder()
    layer = model.get_layer("decoder").layers[0]
    layer.enable_lora(2)
    layer.lora_kernel_b.assign(np.ones((2, 16)))
    converted = kmp.convert(model)
    assert_equal(converted.variables, model.variables)
    assert len(converted.trainable_variables) == len(model.trainable_variables)


class CreatesItsGraph(keras.Model):
    def __init__(self, **kwargs):
        inputs = keras.Input((8,))
        hidden = ops.exp(layers.Dense(8, name="first", kernel_initializer="identity")(inputs))
        super().__init__(
            inputs, layers.Dense(2, name="last", kernel_initializer="ones")(hidden), **kwargs
        )

    def get_config(self):
        return {"name": self.name}


def test_operation_created_in_custom_code_is_logged_and_the_layer_before_it_is_float32(caplog):
    model = CreatesItsGraph(name="custom")
    batch = np.full((1, 8), 12.0, "float32")
    assert dtypes_of(kmp.convert(model))["first"] == "float16"
    converted = kmp.convert(model, batch=batch)
    assert re.search(
        r"exp\S* needs float32 but follows its inputs, because the code of CreatesItsGraph",
        caplog.text,
    )
    assert "first stays float32: it avoids NaN and Inf with the batch: amax 12" in caplog.text
    assert dtypes_of(converted) == {"first": "float32", "last": "float32"}
    assert np.isfinite(outputs_of(converted, batch)[0]).all()
    row = next(row for row in kmp.audit(model).rows if row.class_name == "Exp")
    assert (row.category, row.planned_dtype) == ("float32", "follows its inputs")


def test_nested_model_that_is_selected_or_in_a_plan_keeps_its_layers_in_float32():
    model, batch = models.autoencoder()
    for arguments in (
        {"keep_float32": "encoder"},
        {"policy": kmp.Plan("mixed_float16", {"encoder": "why"})},
    ):
        dtypes = dtypes_of(kmp.convert(model, **arguments))
        assert {dtype for path, dtype in dtypes.items() if path.startswith("encoder/")} == {
            "float32"
        }
    assert {path.split("/")[0]: dtype for path, dtype in dtypes.items()} == {
        "encoder": "float32",
        "decoder": "float16",
    }
    converted = kmp.convert(model, keep_float32="encoder")
    assert "float16" not in {output.dtype for output in outputs_of(converted, batch)}


def test_frozen_variable_and_frozen_sublayer_that_code_creates_stay_frozen(caplog):
    model, _ = models.custom_layers()
    model.get_layer("block").dense.trainable = False
    model.get_layer("block").normalize.gamma.trainable = False
    block = kmp.convert(model).get_layer("block")
    assert not block.dense.trainable
    assert [variable.name for variable in block.normalize.trainable_variables] == ["beta"]
    assert (
        "without stays float32: its config has no `dtype`, so its policy cannot be set."
        in caplog.text
    )


@pytest.mark.parametrize("function", [kmp.convert, kmp.to_float32, kmp.audit])
def test_model_that_cannot_be_converted_is_an_error(function):
    with pytest.raises(
        TypeError, match="`model` must be a keras.Model, such as .*Received: model='a.keras'"
    ):
        function("a.keras")
    with pytest.raises(ValueError, match="is not built: call it on a batch first"):
        function(keras.Sequential([layers.Dense(2, name="one")]))


def test_to_float32_of_a_float64_model_is_an_error():
    model = keras.Sequential([keras.Input((2,)), layers.Dense(2, dtype="float64")])
    with pytest.raises(ValueError, match="computes in float64"):
        kmp.to_float32(model)


BAD_PLAN = kmp.Plan("mixed_float16", {"typo": "why"})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"keep_float32": "nosuch*"},
            ValueError,
            "no layer matches 'nosuch.*'. The layers are: dense, ",
        ),
        (
            {"keep_float32": layers.Conv2D},
            ValueError,
            "no layer matches Conv2D. The layers are: dense, ",
        ),
        (
            {"keep_float32": ["dense", "nosuch"]},
            ValueError,
            "no layer matches 'nosuch'. The layers are: dense, ",
        ),
        ({"keep_float32": 3}, TypeError, "`keep_float32` must be a path, pattern, layer, class"),
        (
            {"policy": "float32"},
            ValueError,
            r"must be one of 'mixed_float16', 'mixed_bfloat16'.*\(of type str\)$",
        ),
        ({"policy": None}, TypeError, "`policy` must be one of"),
        (
            {"policy": BAD_PLAN},
            ValueError,
            "plan contains 'typo', but the model has no such layer.*are: dense, ",
        ),
        ({"batch": np.zeros((2, 3), "float32")}, ValueError, "`batch` does not fit Sequential"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_wrong_argument_is_an_error_that_names_it(arguments, error, message):
    model, _ = models.classifier()
    for function in (kmp.convert, kmp.audit) if "batch" in arguments else (kmp.convert,):
        with pytest.raises(error, match=message):
            function(model, **arguments)
