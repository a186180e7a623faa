import inspect
import logging

import keras
import numpy as np
import pytest
from conftest import another_thread
from keras import ops

import kmp
from kmp.layers.float32_classes import only_in_float32
from kmp.layers.float32_rules import reason_for_float32


# Layers that stand for those of keras-hub with the same name and module.
class ESMRotaryEmbedding(keras.layers.Layer):
    """`arange` in float16 has no kernel in a graph."""

    def __init__(self, wavelength=10, **kwargs):
        super().__init__(**kwargs)
        self.wavelength = wavelength
        self.scale = keras.layers.Dense(4, name="scale", dtype=self.dtype_policy)

    def call(self, x):
        positions = ops.arange(ops.shape(x)[-1], dtype=x.dtype)
        return self.scale(x + ops.sin(positions / self.wavelength))


class Rotary(ESMRotaryEmbedding):
    """A subclass without an `__init__` of its own."""


def stand_in(name, module="esm"):
    arguments = {"__module__": f"keras_hub.src.models.{module}", "call": lambda self, x: x}
    return type(name, (keras.layers.Layer,), arguments)


ESMRotaryEmbedding.__module__ = "keras_hub.src.models.esm"
MaskedLMHead = stand_in("MaskedLMHead")  # fails in bfloat16 too
T5MultiHeadAttention = stand_in("T5MultiHeadAttention")  # works in bfloat16
Ordinary = stand_in("Ordinary")  # is not listed
TimestepEmbedding = stand_in("TimestepEmbedding", "flux.flux_maths")
OtherTimestepEmbedding = stand_in("TimestepEmbedding", "stable_diffusion_3.mmdit")  # is not listed


class Enlarged(keras.layers.UpSampling2D):
    """Sets the argument on which the reason depends in its own `__init__`."""

    def __init__(self, **kwargs):
        super().__init__(interpolation="bilinear", **kwargs)


class EdgeDetector(keras.layers.Rescaling):
    """A user's layer for raw data."""

    def __init__(self):
        super().__init__(scale=1 / 255)


@keras.saving.register_keras_serializable("tests")
class Encoder(keras.layers.Layer):
    """Creates layers in code, so that no config contains them."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.rotary = ESMRotaryEmbedding(name="rotary")
        self.head = MaskedLMHead(name="head")

    def build(self, input_shape):
        self.attention = T5MultiHeadAttention(name="attention")

    def call(self, x):
        return self.attention(self.head(self.rotary(x)))


@keras.saving.register_keras_serializable("tests")
class Backbone(keras.Model):
    """Creates a functional model in code, as keras-hub's backbones do."""

    def __init__(self, **kwargs):
        inputs = keras.Input((4,))
        super().__init__(
            inputs, ESMRotaryEmbedding(name="rotary")(keras.layers.Dense(4)(inputs)), **kwargs
        )

    def get_config(self):
        return {"name": self.name}


@keras.saving.register_keras_serializable("tests")
class Task(keras.Model):
    """Has the layers of a backbone in its own graph, as keras-hub's tasks do."""

    def __init__(self, backbone, **kwargs):
        super().__init__(backbone.input, keras.layers.Dense(1)(backbone.output), **kwargs)
        self.backbone = backbone

    def get_config(self):
        return {"backbone": keras.saving.serialize_keras_object(self.backbone), "name": self.name}

    @classmethod
    def from_config(cls, config):
        return cls(
            **config | {"backbone": keras.saving.deserialize_keras_object(config["backbone"])}
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("make", "needing"),
    [
        (lambda: keras.layers.Dot(axes=1), ()),
        (lambda: keras.layers.Dot(axes=1, normalize=True), ("float16",)),
        (keras.layers.GlobalAveragePooling1D, ("float16",)),
        (lambda: keras.layers.AveragePooling2D(16), ()),
        (lambda: keras.layers.AveragePooling2D((16, 17)), ("float16",)),
        (lambda: keras.layers.AveragePooling1D(257), ("float16",)),
        (lambda: keras.layers.AveragePooling3D(7), ("float16",)),
        (lambda: keras.layers.DepthwiseConv2D(32), ()),
        (lambda: keras.layers.DepthwiseConv2D(33), ("float16",)),
        (lambda: keras.layers.SeparableConv1D(2, 1025), ("float16",)),
        (keras.layers.Masking, ()),
        (lambda: keras.layers.Masking(-9999.0), ("float16", "bfloat16")),
        (lambda: keras.layers.Masking(-999.0), ("bfloat16",)),
        (lambda: keras.layers.Masking(-1e30), ("float16", "bfloat16")),
        (keras.layers.RandomFlip, ("float16", "bfloat16")),
        (lambda: keras.layers.RandomFlip(dtype="float16"), ("float16", "bfloat16")),
        (keras.layers.STFTSpectrogram, ("float16", "bfloat16")),
        (keras.layers.UpSampling2D, ()),
        (lambda: keras.layers.UpSampling2D(interpolation="bilinear"), ("float16", "bfloat16")),
        (lambda: keras.layers.Dense(1, activity_regularizer="l2"), ("float16", "bfloat16")),
        (Enlarged, ("float16", "bfloat16")),
        (EdgeDetector, ("float16", "bfloat16")),
    ],
)
def test_keras_layer_is_float32_where_its_arguments_need_it(make, needing, dtype):
    with kmp.enable(f"mixed_{dtype}"):
        layer = make()
    assert (layer.compute_dtype == "float32") == (dtype in needing)
    assert bool(reason_for_float32(layer, dtype)) == (dtype in needing)


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [("float16", "float32"), ("mixed_float16", "float16"), ("mixed_bfloat16", "bfloat16")],
)
def test_statistics_of_batch_normalization_are_float32_under_every_policy(policy, dtype):
    with kmp.enable(policy):
        norm = keras.layers.BatchNormalization(momentum=0.9999)
        norm(np.ones((4, 2)), training=True)
    assert norm.compute_dtype == dtype
    assert norm.moving_mean.dtype == "float32"
    np.testing.assert_allclose(norm.moving_mean, [1e-4] * 2, rtol=1e-3)


def test_integer_dtype_of_a_listed_layer_and_a_dtype_that_is_set_after_creation_are_kept(enabled):
    encoding, rescaling = (
        keras.layers.CategoryEncoding(num_tokens=3, dtype="int32"),
        keras.layers.Rescaling(0.5),
    )
    assert (encoding.compute_dtype, reason_for_float32(encoding)) == ("int32", None)
    rescaling.dtype_policy = "float16"
    assert rescaling(np.ones((1, 1))).dtype == "float16"


def test_listed_classes_and_their_subclasses_are_in_float32_while_float16_is_enabled(caplog):
    caplog.set_level(logging.INFO, "kmp")
    # A class is logged once in a process, and another test may have created a layer of this one.
    new_class = type(
        "NewRotary", (ESMRotaryEmbedding,), {"__module__": ESMRotaryEmbedding.__module__}
    )
    with kmp.enable():
        listed = [new_class(wavelength=5), Rotary(wavelength=5), TimestepEmbedding()]
        others = [Ordinary(), OtherTimestepEmbedding()]
        model = keras.Sequential([keras.Input((4,)), *listed, *others, keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
        assert np.isfinite(model.train_on_batch(np.ones((8, 4)), np.ones((8, 1))))
    assert [layer.compute_dtype for layer in (*listed, *others)] == ["float32"] * 3 + [
        "float16"
    ] * 2
    assert [layer.scale.compute_dtype for layer in listed[:2]] == ["float32"] * 2
    assert listed[1].get_config()["wavelength"] == 5
    assert "NewRotary stays in float32: it computes positions" in caplog.text
    assert Rotary(dtype="mixed_float16").compute_dtype == "float16"  # as before `enable`


def test_other_policies_are_kept_where_the_layer_works():
    with kmp.enable("mixed_bfloat16"):
        assert T5MultiHeadAttention().compute_dtype == "bfloat16"
        # bfloat16 rounds positions above 256.
        assert ESMRotaryEmbedding().compute_dtype == "float32"
        assert MaskedLMHead().compute_dtype == "float32"
    with kmp.enable("float32"):
        assert ESMRotaryEmbedding().compute_dtype == "float32"


def test_signature_that_keras_reads_is_kept():
    before = inspect.signature(keras.layers.Layer.__init__)
    with kmp.enable():
        assert inspect.getfullargspec(keras.layers.Layer.__init__).varargs is None
        assert inspect.signature(keras.layers.Layer.__init__) == before


def test_converted_model_has_a_listed_layer_in_float32_or_a_dtype_in_which_it_works():
    layers = [
        Encoder(name="encoder"),
        T5MultiHeadAttention(name="attention"),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input((4,)), *layers])
    assert "arange" in kmp.audit(model).plan.float32["encoder/rotary"]
    assert kmp.convert(model).layers[0].rotary.compute_dtype == "float32"
    assert "attention" not in kmp.audit(model, policy="mixed_bfloat16").plan.float32
    assert kmp.convert(model, "mixed_bfloat16").layers[1].compute_dtype == "bfloat16"


def test_edited_plan_applies_to_a_listed_layer_while_float16_is_enabled():
    encoders = [Encoder(name="first"), Encoder(name="second")]
    model = keras.Sequential([keras.Input((4,)), *encoders, keras.layers.Dense(1)])
    plan = kmp.audit(model).plan
    del plan.float32["second/head"], plan.float32["second/attention"]
    with kmp.enable():
        first, second, _ = kmp.convert(model, plan).layers
        assert (first.head.compute_dtype, second.head.compute_dtype) == ("float32", "float16")
        assert (first.attention.compute_dtype, second.attention.compute_dtype) == (
            "float32",
            "float16",
        )
        assert MaskedLMHead().compute_dtype == "float32"  # `enable` still applies


def test_listed_layer_of_a_nested_model_whose_layers_belong_to_the_outer_graph_too_stays_float32():
    model = Task(Backbone(name="backbone"), name="task")
    converted = kmp.convert(model)
    assert np.isfinite(converted(np.ones((2, 4)))).all()
    assert {
        layer.compute_dtype for layer in converted.backbone.layers if "rotary" in layer.name
    } == {"float32"}


def test_classes_are_in_float32_in_the_thread_and_the_context_that_selects_them():
    def dtype_of(layer_class):
        return layer_class(dtype="mixed_float16").compute_dtype

    with another_thread() as call:
        selected = only_in_float32({MaskedLMHead})
        call(selected.__enter__)
        with only_in_float32({MaskedLMHead}):
            assert (dtype_of(MaskedLMHead), dtype_of(ESMRotaryEmbedding)) == ("float32", "float16")
        assert dtype_of(MaskedLMHead) == "float16"
        assert call(dtype_of, MaskedLMHead) == "float32"
        call(selected.__exit__, None, None, None)
