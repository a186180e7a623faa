import keras
import models
import numpy as np
import pytest
from keras import layers

from kmp.conversion.model_cloning import clone_model
from kmp.conversion.model_parts import parts_of


def from_same_config(original, config):
    return type(original).from_config(config)


@pytest.mark.parametrize(
    "make", [make for make in models.ALL if make is not models.siamese], ids=lambda make: make.__name__
)
def test_clone_has_the_same_outputs_and_shares_no_layer(make):
    model, batch = make()
    clone = clone_model(model, from_same_config, "float32")
    for output, expected in zip(*(keras.tree.flatten(variant(batch)) for variant in (clone, model)), strict=True):
        np.testing.assert_array_equal(output, expected)
    assert not {id(part.operation) for part in parts_of(clone)} & {id(part.operation) for part in parts_of(model)}
    assert type(clone) is type(model)
    assert clone.name == model.name


def test_get_config_of_the_original_layers_is_restored():
    model, _ = models.classifier()
    clone_model(model, from_same_config, "float32")
    assert all("get_config" not in vars(layer) for layer in (model, *model.layers))


def test_global_policy_is_restored_after_an_error():
    def fail(original, config):
        raise RuntimeError("no")

    with pytest.raises(ValueError, match="cannot be rebuilt from its config: no\\. It "):
        clone_model(models.classifier()[0], fail, "mixed_float16")
    assert keras.config.dtype_policy().name == "float32"


def test_config_with_missing_arguments_is_an_error():
    class MissingUnits(layers.Layer):
        def __init__(self, units=2, **kwargs):
            super().__init__(**kwargs)
            self.units = units
            self.dense = layers.Dense(units)

        def call(self, inputs):
            return self.dense(inputs)

        def get_config(self):
            return super().get_config()  # without `units`

    inputs = keras.Input((4,))
    with pytest.raises(ValueError, match="has different variables: its `get_config`"):
        clone_model(keras.Model(inputs, MissingUnits(3)(inputs)), from_same_config, "float32")


def test_vocabulary_and_adapted_statistics_are_copied():
    model, batch = models.preprocessing()
    clone = clone_model(model, from_same_config, "float32")
    original_lookup, cloned_lookup = (
        next(layer for layer in variant.layers if isinstance(layer, layers.StringLookup)) for variant in (model, clone)
    )
    assert cloned_lookup.get_vocabulary() == original_lookup.get_vocabulary()
    np.testing.assert_array_equal(clone(batch), model(batch))
