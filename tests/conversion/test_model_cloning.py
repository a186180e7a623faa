import keras
import models
import numpy as np
import pytest
from keras import layers

from kmp.conversion.model_cloning import clone_model
from kmp.conversion.model_parts import parts_of


def same(old, config):
    return type(old).from_config(config)


@pytest.mark.parametrize(
    "make", [make for make in models.ALL if make is not models.siamese], ids=lambda make: make.__name__
)
def test_model_made_anew_computes_the_same_and_shares_nothing(make):
    model, batch = make()
    new = clone_model(model, same, "float32")
    for mine, its in zip(*(keras.tree.flatten(one(batch)) for one in (new, model)), strict=True):
        np.testing.assert_array_equal(mine, its)
    assert not {id(part.operation) for part in parts_of(new)} & {id(part.operation) for part in parts_of(model)}
    assert type(new) is type(model)
    assert new.name == model.name


def test_config_functions_of_the_old_layers_are_keras_own_again():
    model, _ = models.classifier()
    clone_model(model, same, "float32")
    assert all("get_config" not in vars(layer) for layer in (model, *model.layers))


def test_global_policy_is_as_before_also_after_an_error():
    def fails(old, config):
        raise RuntimeError("no")

    with pytest.raises(ValueError, match="cannot be made anew from its config: no\\. It "):
        clone_model(models.classifier()[0], fails, "mixed_float16")
    assert keras.config.dtype_policy().name == "float32"


def test_config_that_does_not_say_all_is_an_error():
    class Grows(layers.Layer):
        def __init__(self, units=2, **kwargs):
            super().__init__(**kwargs)
            self.units = units
            self.dense = layers.Dense(units)

        def call(self, inputs):
            return self.dense(inputs)

        def get_config(self):
            return super().get_config()  # without `units`

    inputs = keras.Input((4,))
    with pytest.raises(ValueError, match="has other variables: its config"):
        clone_model(keras.Model(inputs, Grows(3)(inputs)), same, "float32")


def test_vocabulary_and_adapted_statistics_come_along():
    model, batch = models.preprocessing()
    new = clone_model(model, same, "float32")
    old_lookup, new_lookup = (
        next(layer for layer in one.layers if isinstance(layer, layers.StringLookup)) for one in (model, new)
    )
    assert new_lookup.get_vocabulary() == old_lookup.get_vocabulary()
    np.testing.assert_array_equal(new(batch), model(batch))
