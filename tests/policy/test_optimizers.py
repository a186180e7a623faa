import keras
import pytest
from conftest import compiled_model

import kmp

STOCK = keras.optimizers.LossScaleOptimizer


def optimizer_of(optimizer):
    return compiled_model(optimizer).optimizer


# The call that sets the loss scale of an optimizer, and one that creates such an optimizer.
MADE = {
    "compile": ("kmp.enable", lambda: optimizer_of("sgd")),
    "stock": ("kmp.enable", lambda: optimizer_of(STOCK(keras.optimizers.SGD()))),
    "stock with settings": ("kmp.wrap", lambda: optimizer_of(STOCK(keras.optimizers.SGD(), initial_scale=8.0))),
    "wrap": ("kmp.enable", lambda: kmp.wrap("sgd")),
    "wrap with settings": ("kmp.wrap", lambda: kmp.wrap("sgd", growth_interval=5)),
    "class": ("kmp.LossScaleOptimizer", lambda: optimizer_of(kmp.LossScaleOptimizer("sgd"))),
    "convert": ("kmp.enable", lambda: kmp.convert(kmp.to_float32(compiled_model("sgd"))).optimizer),
    "convert wrapped": ("kmp.wrap", lambda: kmp.convert(compiled_model(kmp.wrap("sgd", growth_interval=5))).optimizer),
}


@pytest.mark.parametrize("name", MADE)
def test_settings_call_is_the_one_that_sets_the_loss_scale(name):
    call, make = MADE[name]
    with kmp.enable(growth_interval=7):
        optimizer = make()
    assert optimizer.settings_call == call
    assert optimizer.rule.growth_interval == 7 or call != "kmp.enable"
    assert kmp.wrap("sgd").settings_call == "kmp.wrap"  # without `enable`
