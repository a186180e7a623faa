import io
import json

import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from conftest import assert_equal, values
from keras import layers
from rich.console import Console

import kmp


def rows_of(model, *arguments, **options):
    return {row.path: row for row in kmp.audit(model, *arguments, **options).rows}


def test_rows_are_in_graph_order_and_shared_layers_have_one():
    inputs = keras.Input((4,), name="in")
    shared = layers.Dense(4, name="shared")
    x = shared(shared(inputs))
    paths = rows_of(keras.Model(inputs, layers.Dense(2, name="last")(keras.ops.relu(x) + x)))
    assert [path.rstrip("_0123456789") for path in paths] == ["in", "shared", "relu", "add", "last"]


def test_path_starts_with_that_of_the_parent_and_differs_for_layers_of_one_name():
    paths = list(rows_of(models.autoencoder()[0]))
    assert paths.index("encoder") < next(
        index for index, path in enumerate(paths) if path.startswith("encoder/dense")
    )
    wrapped = keras.Sequential(
        [keras.Input((3, 4)), layers.TimeDistributed(layers.Dense(2, name="in"), name="out")]
    )
    assert list(rows_of(wrapped))[-2:] == ["out", "out/in"]
    # Subclassed.
    assert {path.split("/")[0] for path in rows_of(models.gan()[0])} == {
        "generator",
        "discriminator",
    }
    cells = layers.StackedRNNCells(
        [layers.GRUCell(2, name="same"), layers.GRUCell(2, name="same")], name="cells"
    )
    recurrent = keras.Sequential([keras.Input((3, 4)), layers.RNN(cells, name="rnn")])
    assert list(rows_of(recurrent))[-2:] == ["rnn/cells/same", "rnn/cells/same#2"]


def test_row_has_dtypes_category_reason_and_source():
    model, _ = models.operations()
    rows = rows_of(model)
    power = next(row for path, row in rows.items() if path.startswith("power"))
    dtypes = power.compute_dtype, power.variable_dtype, power.output_dtype
    assert dtypes == ("float32", None, "float32")
    assert (power.category, power.planned_dtype) == ("float32", "float32")
    assert power.reason == "powers overflow float16: 256 squared > 65504"
    assert power.source == "torch.amp's op reference, TensorFlow's auto_mixed_precision_lists.h"
    first = rows["first"]
    assert (first.variable_dtype, first.category, first.planned_dtype) == (
        "float32",
        "float16",
        "float16",
    )
    assert first.tensor_cores == ("channels 3 -> 8",)
    assert rows["logits"].reason == "model output: float16 would round it to 11 significant bits"
    first = rows_of(kmp.convert(model))["first"]
    assert (first.compute_dtype, first.variable_dtype, first.output_dtype) == (
        "float16",
        "float32",
        "float16",
    )


def test_category_and_reason_are_those_of_the_policy_that_is_asked_for():
    hidden = layers.Dense(8, name="hidden"), layers.Dense(8, "softmax", name="gate")
    model = keras.Sequential([keras.Input((8,)), *hidden, layers.Dense(2)])
    for policy in ("mixed_bfloat16", "bfloat16"):
        rows = rows_of(model, policy=policy)
        assert (rows["hidden"].category, rows["hidden"].planned_dtype) == ("bfloat16", "bfloat16")
        assert rows["gate"].category == "float32"
        assert "bfloat16 has 8 significant bits" in rows["gate"].reason


def test_batch_adds_overflow_underflow_and_relative_error():
    constant, kernels = keras.initializers.Constant, {"tiny": 1e-9, "huge": 1e12, "after": 1.0}
    hidden = [
        layers.Dense(4, kernel_initializer=constant(value), name=name)
        for name, value in kernels.items()
    ]
    model = keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(2)])
    rows = rows_of(model, np.ones((2, 4), np.float32))
    assert (rows["tiny"].underflow_share, rows["tiny"].relative_error) == (1.0, 1.0)
    assert rows["tiny"].amax == pytest.approx(4e-9)
    # Its 1e12 kernel is Inf in float16.
    assert (rows["huge"].overflow_share, rows["huge"].overflows) == (0.0, True)
    assert rows["huge"].relative_error is None


def test_model_in_bfloat16_is_audited_for_bfloat16():
    hidden = layers.Dense(8, name="hidden"), layers.Dense(8, "softmax", name="gate")
    model = keras.Sequential([keras.Input((8,)), *hidden, layers.Dense(2)])
    batch = np.full((2, 8), 1e-10, "float32")
    found = kmp.audit(kmp.convert(model, "mixed_bfloat16"), batch)
    rows = {row.path: row for row in found.rows}
    assert found.plan.policy == "mixed_bfloat16"
    assert "bfloat16 has 8 significant bits" in rows["gate"].reason
    assert rows["hidden"].underflow_share == 0.0
    assert 1e-4 < rows["hidden"].relative_error < 0.02
    assert kmp.audit(model).plan.policy == "mixed_float16"


def test_shares_are_of_all_elements_and_the_error_is_relative_to_the_norm():
    model = keras.Sequential([keras.Input((4,)), layers.PReLU(name="same"), layers.Dense(1)])
    batch = np.array([[1.0, 7e4, np.inf, 1e-8], [0.0, 65504.0, 6e-8, np.nan]], "float32")
    row = rows_of(model, batch)["same"]
    assert (row.overflow_share, row.underflow_share, row.amax) == (3 / 8, 1 / 8, np.float32(7e4))
    row = rows_of(model, batch, policy="mixed_bfloat16")["same"]  # it has the range of float32
    assert (row.overflow_share, row.underflow_share) == (2 / 8, 0.0)
    # The first is halfway, and rounded to even.
    batch = np.array([[1 + 2**-11, 1.0, 2**-12, 0.0]], "float32")
    assert rows_of(model, batch)["same"].relative_error == pytest.approx(2**-11 / 2**0.5, rel=1e-3)


def test_batch_compares_a_mixed_precision_model_with_its_float32_version():
    model, batch = models.autoencoder()
    rows = rows_of(kmp.convert(model), batch)
    relative_errors = [
        row.relative_error for row in rows.values() if row.relative_error is not None
    ]
    assert 0 < max(relative_errors) < 0.01
    large = layers.Dense(1, kernel_initializer=keras.initializers.Constant(1e5), name="large")
    wrapper = kmp.layers.Float32(
        layers.Dense(1, kernel_initializer="ones", name="inside"), name="wrapper"
    )
    model = keras.Sequential([keras.Input((1,)), wrapper, large, layers.Dense(1)])
    mixed, batch = kmp.convert(model), np.ones((1, 1), "float32")
    rows = rows_of(mixed, batch)
    # Its float32 version is the reference.
    assert (rows["large"].overflows, rows["large"].amax) == (True, 1e5)
    assert rows["wrapper"].relative_error is not None
    assert rows["wrapper"].amax == rows["wrapper/inside"].amax
    summary = " ".join(kmp.audit(mixed, batch).summary.split())
    assert "3 of 4 layers and operations are float32. NaN or Inf with this batch: large," in summary
    assert "kmp.convert(kmp.to_float32(model), batch=...) avoids this by more float32." in summary
    repaired = kmp.convert(kmp.to_float32(mixed), batch=batch)
    assert repaired.get_layer("large").compute_dtype == "float32"


def test_batch_compares_float16_with_bfloat16():
    def model_of(**hidden):
        last = layers.Dense(1, kernel_initializer="ones", name="last")
        return keras.Sequential([keras.Input((4,)), layers.Dense(4, **hidden), last])

    positions = 1000.0 + np.arange(8.0, dtype="float32").reshape(2, 4)
    audit = kmp.audit(model_of(kernel_initializer="identity", name="same"), positions)
    same = next(row for row in audit.rows if row.path == "same")
    # float16 has all these integers, bfloat16 every fourth.
    rounded = np.asarray(tf.cast(tf.cast(positions, "bfloat16"), "float32"))
    error = np.linalg.norm(rounded - positions) / np.linalg.norm(positions)
    assert same.relative_error == 0.0
    assert same.other_relative_error == pytest.approx(error)
    in_float16, in_bfloat16 = audit.formats
    assert (in_float16.format, in_bfloat16.format) == ("float16", "bfloat16")
    sums = positions.sum(axis=1)
    of_sums = np.linalg.norm(rounded.sum(axis=1) - sums) / np.linalg.norm(sums)
    assert (in_float16.outputs, in_bfloat16.outputs) == (0.0, pytest.approx(of_sums))
    line = "With this batch, the outputs differ from float32 by at most "
    assert line in audit.summary
    assert line in str(audit)
    assert audit.to_dict()["formats"][1]["outputs"] == in_bfloat16.outputs

    large = model_of(kernel_initializer=keras.initializers.Constant(1e5), name="large")
    audit = kmp.audit(large, np.ones((2, 4), "float32"), policy="mixed_bfloat16")
    rows = {row.path: row for row in audit.rows}
    assert (rows["large"].overflows, rows["large"].overflows_in_other) == (False, True)
    assert audit.formats[1].failures == ("layer 'large' returns NaN or Inf",)
    assert "float16 fails: layer 'large' returns NaN or Inf." in audit.summary


def test_model_in_bfloat16_is_its_own_candidate_in_both_formats():
    model, batch = models.autoencoder()
    mixed = kmp.convert(model, "mixed_bfloat16")
    before = kmp.audit(model, batch).formats
    in_bfloat16, in_float16 = kmp.audit(mixed, batch).formats
    assert (in_bfloat16.format, in_float16.format) == ("bfloat16", "float16")
    assert in_bfloat16.outputs == pytest.approx(before[1].outputs)
    assert in_float16.outputs == pytest.approx(before[0].outputs)
    rows = kmp.audit(mixed, 1e6 * batch).rows
    assert max(row.overflow_share for row in rows if row.overflow_share is not None) == 0


class Noise(layers.Layer):
    def call(self, inputs):
        return inputs + tf.random.normal(tf.shape(inputs), dtype=inputs.dtype)


class Traced(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.Dense(4, name="inner")

    def call(self, inputs):
        return tf.function(self.inner)(inputs)


class AboveOne(layers.Layer):
    def call(self, inputs):
        return tf.boolean_mask(inputs, inputs > 1)

    def compute_output_shape(self, shape):
        return (None,)


class WithoutConfig(keras.Model):
    def __init__(self, units):
        super().__init__()
        self.first = layers.Dense(units, name="first")

    def call(self, inputs):
        return self.first(inputs)


def test_random_numbers_of_a_layer_are_the_same_in_both_precisions():
    hidden = layers.Dense(4), Noise(name="noise")
    model = keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(1)])
    for each in (model, kmp.convert(model)):
        assert 0 < rows_of(each, np.ones((8, 4), "float32"))["noise"].relative_error < 0.01


def test_layer_in_a_function_of_tensorflow_is_measured():
    model = keras.Sequential([keras.Input((4,)), Traced(name="traced"), layers.Dense(1)])
    rows = rows_of(model, np.ones((8, 4), "float32"))
    assert rows["traced/inner"].amax == rows["traced"].amax > 0


def test_outputs_whose_number_depends_on_the_precision_have_no_relative_error():
    inputs = keras.Input((1,))
    hidden = layers.Dense(1, kernel_initializer="ones")(inputs)
    model = keras.Model(inputs, layers.Activation("linear")(AboveOne(name="above")(hidden)))
    row = rows_of(model, np.array([[2.0], [1 + 2**-12]], "float32"))["above"]  # rounded to 1
    assert row.amax == 2.0
    assert np.isnan(row.relative_error)


def test_mixed_precision_model_that_no_config_rebuilds_is_compared_with_itself_in_float32():
    with kmp.enable():
        model = WithoutConfig(4)
        model(np.ones((2, 4)))
    row = rows_of(model, np.full((2, 4), 1 / 3, "float32"))["first"]
    assert (row.compute_dtype, row.overflows) == ("float16", False)
    assert 1e-5 < row.relative_error < 0.01


def test_batch_compares_a_float32_model_with_the_candidate_under_any_global_policy():
    with kmp.enable():
        inputs = keras.Input((4,))  # its layer has the global policy
        hidden = layers.Dense(4, dtype="float32", name="hidden")(inputs)
        model = keras.Model(inputs, layers.Dense(2, dtype="float32")(hidden))
    rows = rows_of(model, np.random.default_rng(0).normal(size=(8, 4)).astype("float32"))
    assert (rows["hidden"].compute_dtype, rows["hidden"].planned_dtype) == ("float32", "float16")
    assert rows["hidden"].relative_error > 0.0


def test_dimensions_to_pad_are_listed_only_for_16_bit_layers_of_a_mixed_precision_model():
    with kmp.enable():
        dense = (
            layers.Dense(10, name="half"),
            layers.Dense(10, dtype="float32", name="single"),
            layers.Dense(10),
        )
        model = keras.Sequential([keras.Input((16,)), *dense, kmp.layers.Softmax()])
    rows = rows_of(model)
    assert rows["half"].tensor_cores == ("units 10 -> 16",)
    assert rows["single"].tensor_cores == ()
    assert rows[dense[2].name].tensor_cores == ("inputs 10 -> 16", "units 10 -> 16")


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (layers.Dense(16), (8,), ()),
        (layers.Dense(10), (12,), ("inputs 12 -> 16", "units 10 -> 16")),
        (layers.EinsumDense("abc,cde->abde", (None, 3, 4)), (2, 16), ("units 12 -> 16",)),
        (layers.Conv2D(12, 3), (8, 8, 3), ("channels 3 -> 8", "filters 12 -> 16")),
        (layers.Conv2DTranspose(12, 3), (8, 8, 16), ("filters 12 -> 16",)),
        (layers.SeparableConv2D(9, 3), (8, 8, 8), ("filters 9 -> 16",)),
        (layers.DepthwiseConv2D(3), (8, 8, 3), ()),
        (layers.LSTM(20), (3, 8), ("units 20 -> 24",)),
        (layers.GRU(8), (3, 5), ("inputs 5 -> 8",)),
        # Of its heads.
        (layers.MultiHeadAttention(2, 12, value_dim=8), (3, 16), ("key_dim 12 -> 16",)),
    ],
    ids=lambda value: value.name if isinstance(value, keras.Layer) else "",
)
def test_dimensions_not_divisible_by_8_have_the_padded_size(layer, shape, expected):
    inputs = keras.Input(shape)
    outputs = (
        layer(inputs, inputs) if isinstance(layer, layers.MultiHeadAttention) else layer(inputs)
    )
    model = keras.Model(inputs, layers.Activation("linear")(outputs))
    assert rows_of(model)[layer.name].tensor_cores == expected


def test_audit_with_a_batch_leaves_the_model_unchanged():
    model, batch = models.classifier()
    before = values(model.variables)
    kmp.audit(model, batch)
    assert_equal(model.variables, before)
    assert any(variable.path.endswith("seed_generator_state") for variable in model.variables)
    assert all("call" not in vars(layer) for layer in model.layers)


def test_audit_displays_as_a_table_in_text_terminals_and_notebooks():
    model, batch = models.classifier()
    audit = kmp.audit(model, batch)
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(audit)
    for text in (str(audit), console.export_text(), audit._repr_html_()):
        assert "probabilities" in text
        assert "Micikevicius et al. 2018" in text
    first, second = str(audit).splitlines()[1:3]
    assert first.split() == ["float16", "bfloat16"]
    columns = ["layer", "class", "now", "after", "amax", "error", "error", "reason"]
    assert second.split() == columns
    assert "1 of 4 layers and operations are float32 after kmp.convert" in str(audit)
    assert audit.jit_compile in str(audit)
    assert audit.jit_compile in audit.summary
    assert [row.path for row in audit.needs_float32] == ["probabilities"]
    assert audit.notes == kmp.audit(kmp.convert(model)).notes == ()  # its output is float32


def test_output_in_16_bits_is_noted_with_the_change_that_makes_it_float32():
    with kmp.enable():
        inputs = keras.Input((8,))
        hidden = layers.Dense(8)(inputs)
        outputs = [
            layers.Dense(1, name="value")(hidden),
            hidden + 1.0,
            layers.Dense(1, dtype="float32")(hidden),
        ]
        model = keras.Model(inputs, outputs)
    audit = kmp.audit(model)
    add = next(row.path for row in audit.rows if row.class_name == "Add")
    assert audit.notes == (
        (
            "The output of 'value' is float16, as is what `predict` returns. For float32, create"
            " the layer with dtype='float32'."
        ),
        (
            f"The output of '{add}' is float16, as is what `predict` returns. For float32, use "
            "keras.ops.cast(x, 'float32')."
        ),
    )
    written = json.loads(json.dumps(audit.to_dict()))
    assert (written["notes"], written["plan"]) == (list(audit.notes), audit.plan.to_dict())
    assert "The output of 'value' is float16" in str(audit)
    assert "is float16, as is what `predict` returns" in audit._repr_html_()


def float32_shares(layers_of_model, shape=(8,)):
    with kmp.enable():
        model = keras.Sequential([keras.Input(shape), *layers_of_model()])
    return kmp.audit(model).traffic


def test_float32_share_of_a_step_is_that_of_its_tensors_by_layer_class():
    def two_layers():
        return [layers.Dense(16, use_bias=False), layers.Activation("tanh", dtype="float32")]

    traffic = float32_shares(two_layers)
    # Per pass, in elements: the kernel has 8 * 16, the inputs 32 * 8, the outputs 32 * 16.
    kernel, inputs, outputs = 8 * 16, 32 * 8, 32 * 16
    cast_kernel = 2 * kernel  # to float16, and its gradient to float32
    products = 2 * (inputs + kernel + outputs)  # the forward pass, and the gradient of the kernel
    float32_of_dense = 4 * (cast_kernel + inputs)  # Keras casts the float32 inputs of the model
    # Forward, backward, and both casts.
    float32_of_tanh = 4 * (2 * outputs + 3 * outputs + 2 * outputs)
    float16 = 2 * (cast_kernel + inputs + products + 2 * outputs)
    total = float32_of_dense + float32_of_tanh + float16
    expected = {"Activation": float32_of_tanh / total, "Dense": float32_of_dense / total}
    assert traffic.by_class == pytest.approx(expected)
    assert list(traffic.by_class) == ["Activation", "Dense"]
    assert traffic.float32_share == pytest.approx(sum(expected.values()))
    assert traffic.batch_size == 32
    assert (
        str(traffic)
        == f"{traffic.float32_share:.0%} of the bytes of a forward and backward pass (batch size"
        f" 32) are float32: Activation {expected['Activation']:.0%}, Dense"
        f" {expected['Dense']:.0%}."
    )


def test_float32_bytes_belong_to_the_innermost_layer_whatever_its_name():
    def nested():
        inner = [layers.Dense(8, name="a"), layers.Activation("tanh", dtype="float32", name="a_1")]
        shared = layers.LayerNormalization(dtype="float32", name="a_2")
        return [keras.Sequential([keras.Input((8,)), *inner, shared], name="a"), shared]

    shares = float32_shares(nested).by_class
    assert set(shares) == {"Dense", "Activation", "LayerNormalization"}
    assert shares["LayerNormalization"] > shares["Activation"] > shares["Dense"]


def test_audit_has_no_float32_share_of_what_cannot_be_traced_or_is_float32():
    class Failing(layers.Layer):
        def call(self, inputs, training=None):
            if training:
                raise RuntimeError("only for inference")
            return inputs

    assert kmp.audit(models.classifier()[0]).traffic is None
    assert float32_shares(lambda: [layers.Dense(4), Failing()]) is None
    assert float32_shares(lambda: [layers.Dense(4)], shape=(None, 8)) is None
    assert float32_shares(lambda: [layers.Activation("relu")]) is None  # nothing to train
    subclassed = kmp.audit(kmp.convert(models.gan()[0]))
    assert subclassed.traffic is None
    assert "float32" in str(subclassed)
    assert "bytes of a forward" not in str(subclassed) + subclassed.summary
    assert "traffic" not in subclassed.to_dict()


def test_trace_of_the_audit_changes_no_variable_and_leaves_no_loss():
    with kmp.enable():
        hidden = (
            layers.Dense(8, activity_regularizer="l2"),
            layers.Dropout(0.5),
            layers.BatchNormalization(),
        )
        recurrent = layers.Reshape((2, 4)), layers.GRU(4, stateful=True)
        model = keras.Sequential([keras.Input(batch_shape=(2, 8)), *hidden, *recurrent])
    model(np.ones((2, 8), "float32"), training=True)
    variables = [*model.variables, *model.layers[-1].states]
    before = values(variables)
    assert kmp.audit(model).traffic.float32_share > 0
    assert_equal(variables, before)
    assert model.losses == []


def test_model_with_several_inputs_and_a_fixed_batch_is_traced():
    with kmp.enable():
        inputs = {name: keras.Input(batch_shape=(4, 8), name=name) for name in ("second", "first")}
        model = keras.Model(
            inputs, [layers.Dense(2)(inputs["first"]), layers.Dense(2)(inputs["second"]) + 1.0]
        )
    traffic = kmp.audit(model).traffic
    assert traffic.batch_size == 4
    written = json.loads(json.dumps(kmp.audit(model).to_dict()))["traffic"]
    assert {key: written[key] for key in ("float32_share", "by_class", "batch_size")} == {
        "float32_share": traffic.float32_share,
        "by_class": traffic.by_class,
        "batch_size": 4,
    }


class OwnRms(layers.Layer):
    """Computes in float32, as the normalization of a language model."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones")

    def call(self, inputs):
        x = keras.ops.cast(inputs, "float32")
        x *= keras.ops.rsqrt(keras.ops.mean(x**2, -1, keepdims=True) + 1e-6)
        return keras.ops.cast(x, self.compute_dtype) * self.scale


class OwnAttention(layers.Layer):
    """Has a softmax in float32, whose result it casts back."""

    def __init__(self):
        super().__init__()
        self.softmax = layers.Softmax(dtype="float32", name="own_softmax")

    def call(self, inputs):
        scores = keras.ops.matmul(inputs, keras.ops.transpose(inputs, (0, 2, 1)))
        weights = keras.ops.cast(self.softmax(scores), self.compute_dtype)
        return keras.ops.matmul(weights, inputs)


def test_audit_says_why_each_class_of_layers_moves_float32():
    def language_model():
        embedding = layers.Embedding(100, 16), layers.Dense(16, name="hidden")
        head = layers.Dense(100, dtype="float32", name="head")
        normalized = layers.UnitNormalization(name="unit"), OwnRms(name="rms")
        return [*embedding, *normalized, OwnAttention(), head]

    traffic = float32_shares(language_model, shape=(64,))
    causes = {(each.class_name, each.reason): each for each in traffic.causes}
    of_kmp = "kmp keeps it in float32: its sum of squares can be Inf or 0 in float16"
    expected = {
        ("Dense", "its dtype is float32"): "head",
        ("Dense", "its weights and their gradients are float32"): "hidden",
        ("Softmax", "its dtype is float32"): "own_softmax",
        ("UnitNormalization", of_kmp): "unit",
        ("OwnRms", f"its code in {__name__} computes in float32"): "rms",
    }
    for key, name in expected.items():
        assert [path.rpartition("/")[2] for path in causes[key].layers] == [name]
    assert ("OwnAttention", "it casts from or to a layer in float32") in causes
    for name, share in traffic.by_class.items():
        of_class = sum(each.share for each in traffic.causes if each.class_name == name)
        assert of_class == pytest.approx(share) or name == "operations outside layers"
    head = causes["Dense", "its dtype is float32"]
    line = f"  Dense {head.share:.0%}: its dtype is float32 ({head.layers[0]})"
    assert line in traffic.largest_causes


def test_cast_of_float32_inputs_is_neither_code_nor_a_layer_in_float32():
    with kmp.enable():
        inputs = keras.Input((16, 32))
        hidden = layers.Dense(32)(inputs)
        exact = layers.Activation("tanh", dtype="float32")(layers.Add()([inputs, hidden]))
        model = keras.Model(inputs, layers.Dense(8)(exact))
    traffic = kmp.audit(model).traffic
    reasons = {(path, each.reason) for each in traffic.causes for path in each.layers}
    first, add, activation, last = (layer.path or layer.name for layer in model.layers[1:])
    of_inputs = "it casts the inputs of the model, which have dtype float32"
    assert reasons == {
        (first, of_inputs),
        (first, "its weights and their gradients are float32"),
        (add, of_inputs),
        (activation, "its dtype is float32"),
        (last, "it casts from or to a layer in float32"),
        (last, "its weights and their gradients are float32"),
    }


def test_audit_says_whether_keras_compiles_the_model_with_xla(one_replica):
    def jit_compile(*hidden, **options):
        model = keras.Sequential(
            [keras.Input((8, 8, 3)), *hidden, layers.Flatten(), layers.Dense(1)]
        )
        if options:
            model.compile("sgd", "mse", **options)
        return kmp.audit(model).jit_compile

    default = (
        'On a GPU, jit_compile="auto", the default of `compile`, compiles this model with XLA.'
    )
    assert jit_compile() == default
    assert jit_compile(jit_compile=True) == "With jit_compile=True, XLA compiles this model."
    assert "run_eagerly=True: XLA does not compile it" in jit_compile(run_eagerly=True)
    refused = 'jit_compile="auto" does not compile this model with XLA: '
    rotation, crop = layers.RandomRotation(0.1), layers.RandomCrop(4, 4)
    assert jit_compile(rotation) == f"{refused}RandomRotation does not support it."
    assert jit_compile(rotation, crop) == f"{refused}RandomCrop, RandomRotation do not support it."
    with one_replica.scope():
        replica = "each replica's pass of this model"
        assert jit_compile() == default.replace("this model", replica)
    with kmp.enable("float32"):
        assert jit_compile(jit_compile="auto") == default
        assert "jit_compile=False: XLA does not" in jit_compile(jit_compile=False)


def test_model_without_a_float_output_has_no_share():
    kmp.enable()
    inputs = keras.Input((8,))
    model = keras.Model(inputs, keras.ops.argmax(keras.layers.Dense(4)(inputs), axis=-1))
    assert kmp.audit(model).traffic is None


def test_recurrent_layers_for_which_keras_uses_cudnn_are_not_compiled():
    model = keras.Sequential([keras.Input((4, 8)), keras.layers.LSTM(4)])
    assert "LSTM does not support it" in kmp.audit(model).jit_compile
    model = keras.Sequential([keras.Input((4, 8)), keras.layers.LSTM(4, use_cudnn=False)])
    assert "compiles this model with XLA" in kmp.audit(model).jit_compile
