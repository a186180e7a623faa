import keras
import pytest
from conftest import compiled_model

import kmp
from kmp.policy import settings_call


def optimizer_of(optimizer):
    return compiled_model(optimizer).optimizer


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (lambda: optimizer_of("sgd"), "kmp.enable"),
        (lambda: optimizer_of(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())), "kmp.enable"),
        (
            lambda: optimizer_of(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8.0)),
            "kmp.wrap",
        ),
        (lambda: kmp.wrap("sgd"), "kmp.enable"),
        (lambda: kmp.wrap("sgd", growth_interval=5), "kmp.wrap"),
        (lambda: optimizer_of(kmp.LossScaleOptimizer("sgd")), "kmp.LossScaleOptimizer"),
        (lambda: kmp.convert(kmp.to_float32(compiled_model("sgd"))).optimizer, "kmp.enable"),
        (lambda: kmp.convert(compiled_model(kmp.wrap("sgd", growth_interval=5))).optimizer, "kmp.wrap"),
    ],
    ids=[
        "compile",
        "stock",
        "stock with settings",
        "wrap",
        "wrap with settings",
        "class",
        "convert",
        "convert wrapped",
    ],
)
def test_settings_call_is_the_one_that_sets_the_loss_scale(make, call):
    with kmp.enable(growth_interval=7):
        optimizer = make()
    assert settings_call(optimizer) == call
    if call == "kmp.enable":
        assert optimizer.rule.growth_interval == 7


def test_settings_call_of_wrap_without_enable():
    assert settings_call(kmp.wrap("sgd")) == "kmp.wrap"
