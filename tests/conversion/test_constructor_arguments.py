"""`audit` and `convert` agree for layers whose config and `__init__` do not match."""

import re

import keras
import numpy as np
import pytest
from keras import layers

import kmp

BATCH = np.ones((2, 4), "float32")


class WithoutConfig(layers.Layer):
    def __init__(self, scale=2.0):
        super().__init__()
        self.scale = scale

    def call(self, inputs):
        return inputs * self.scale


class WithoutKwargs(WithoutConfig):
    def get_config(self):
        return super().get_config() | {"scale": self.scale}


class ConfigIsNone(WithoutConfig):
    """Its `get_config` forgets to return the config, as keras-hub's Gemma3 vision layers do."""

    def get_config(self):
        super().get_config()


class DtypeOnly(WithoutKwargs):
    def __init__(self, scale=2.0, dtype=None):
        layers.Layer.__init__(self, dtype=dtype)
        self.scale = scale


class OwnFromConfig(WithoutKwargs):
    @classmethod
    def from_config(cls, config):
        return cls(config["scale"])


class MissingKey(WithoutConfig):
    def __init__(self, scale, **kwargs):
        layers.Layer.__init__(self, **kwargs)
        self.scale = scale

    def get_config(self):
        return super().get_config()


class Sublayer(layers.Layer):
    def __init__(self, layer, **kwargs):
        super().__init__(**kwargs)
        self.layer = layer

    def call(self, inputs):
        return self.layer(inputs)


class SerializedSublayer(Sublayer):
    """Its `from_config` is missing, so its `__init__` gets a config in place of the layer."""

    def get_config(self):
        return super().get_config() | {"layer": keras.saving.serialize_keras_object(self.layer)}


class DeserializedSublayer(SerializedSublayer):
    @classmethod
    def from_config(cls, config):
        return cls(**config | {"layer": keras.saving.deserialize_keras_object(config["layer"])})


class MissingUnits(Sublayer):
    def __init__(self, units=2, **kwargs):
        super().__init__(layers.Dense(units), **kwargs)

    def get_config(self):
        return super().get_config()


class FailingConfig(WithoutKwargs):
    def get_config(self):
        raise RuntimeError("no config")


def model_with(layer):
    inputs = keras.Input((4,))
    return keras.Model(
        inputs, layers.Dense(2, name="end")(layer(layers.Dense(4, name="start")(inputs)))
    )


def planned_dtypes(audit):
    return {row.path: row.planned_dtype for row in audit.rows}


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda: WithoutKwargs(3.0), "float32"),
        (lambda: WithoutConfig(3.0), "float32"),
        (lambda: DtypeOnly(3.0), "float16"),
        (lambda: OwnFromConfig(3.0), "float16"),
        (lambda: DeserializedSublayer(layers.Dense(4)), "float16"),
    ],
    ids=["no kwargs", "no get_config", "dtype", "own from_config", "sublayer"],
)
def test_layer_is_converted_to_the_dtype_that_audit_shows(make, dtype):
    layer = make()
    model = model_with(layer)
    converted = kmp.convert(model)
    assert converted.layers[2].compute_dtype == dtype
    assert planned_dtypes(kmp.audit(model))[layer.name] == dtype
    assert planned_dtypes(kmp.audit(model, BATCH))[layer.name] == dtype
    assert kmp.audit(model).conversion_error == ""
    np.testing.assert_allclose(converted(BATCH), model(BATCH), rtol=1e-2, atol=1e-2)


def test_layer_whose_constructor_takes_no_dtype_stays_float32_under_its_name_and_is_logged(caplog):
    layer = WithoutKwargs()
    layer.trainable = False
    model = model_with(layer)
    row = next(row for row in kmp.audit(model).rows if row.path == layer.name)
    assert row.reason == "its `__init__` takes no `dtype`, so its policy cannot be set"
    clone = kmp.convert(model).layers[2]
    assert (clone.name, clone.trainable) == (layer.name, False)
    assert f"{layer.name} stays float32: its `__init__` takes no `dtype`" in caplog.text


class Parent(Sublayer):
    def __init__(self, **kwargs):
        super().__init__(WithoutKwargs(), **kwargs)


def test_layer_that_custom_code_creates_needs_no_dtype_argument():
    model = model_with(Parent(name="parent"))
    assert planned_dtypes(kmp.audit(model))[f"parent/{model.layers[2].layer.name}"] == "float16"
    assert kmp.convert(model).layers[2].layer.compute_dtype == "float16"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: MissingKey(2.0),
            (
                "MissingKey 'missing_key.*' cannot be rebuilt from its config: .*missing 1"
                " .*argument: 'scale'. It "
            ),
        ),
        # Without the example of code that Keras' message has.
        (
            lambda: Sublayer(layers.Dense(4)),
            (
                r"non-serializable argument values.*Please implement `get_config\(\)`\. It needs a"
                r" `get_config` that"
            ),
        ),
        (lambda: SerializedSublayer(layers.Dense(4)), "calling SerializedSublayer.call"),
        (lambda: MissingUnits(3), "has different variables"),
        (FailingConfig, "no config"),
        (ConfigIsNone, "'NoneType' object is not iterable"),
        (lambda: layers.Dense(4, dtype="float64"), "computes in float64"),
    ],
    ids=[
        "missing key",
        "layer",
        "serialized layer",
        "missing units",
        "failing config",
        "none",
        "float64",
    ],
)
def test_layer_that_convert_refuses_is_an_error_in_audit_too(make, message):
    layer = make()
    model = model_with(layer)
    with pytest.raises(ValueError, match=message) as caught:
        kmp.convert(model)
    assert caught.type is ValueError
    assert keras.config.dtype_policy().name == "float32"
    assert "\x1b" not in str(caught.value)
    with pytest.raises(ValueError, match=message):
        kmp.audit(model, BATCH)
    audit = kmp.audit(model)
    assert re.search(message, audit.conversion_error)
    assert audit.to_dict()["conversion_error"] == audit.conversion_error
    assert "kmp.convert cannot convert this model" in str(audit)
    assert planned_dtypes(audit)[layer.name] == layer.compute_dtype


def test_error_names_the_layer_inside_a_nested_model():
    with pytest.raises(
        ValueError, match="^MissingKey 'missing_key.*' cannot be rebuilt from its config"
    ):
        kmp.convert(model_with(model_with(MissingKey(2.0))))
