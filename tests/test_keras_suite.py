"""Runs Keras' own tests of optimizers, which its wheel includes, with kmp."""

import unittest

import keras
import pytest

import kmp

REASON = "the wheels of early Keras 3 versions do not include the tests"
OPTIMIZERS = "keras.src.optimizers"
loss_scale_optimizer_test = pytest.importorskip(
    f"{OPTIMIZERS}.loss_scale_optimizer_test", reason=REASON
)
optimizer_test = pytest.importorskip(f"{OPTIMIZERS}.optimizer_test", reason=REASON)


def run(module):
    result = unittest.TestResult()
    try:
        unittest.defaultTestLoader.loadTestsFromModule(module).run(result)
    finally:  # the tests of Keras disable it
        keras.config.enable_traceback_filtering()
    assert not result.failures + result.errors
    assert result.testsRun > 20


# They apply gradients without a loss.
@pytest.mark.filterwarnings("ignore:.*did not go through `scale_loss`")
# Keras' tests use features that NumPy 2 deprecates.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_keras_own_tests_of_the_loss_scale_optimizer_pass_on_that_of_kmp(monkeypatch):
    monkeypatch.setattr(loss_scale_optimizer_test, "LossScaleOptimizer", kmp.LossScaleOptimizer)
    run(loss_scale_optimizer_test)


# enabling/ and optimizer/ have tests of what kmp adds to an optimizer in float32.
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_keras_own_tests_of_optimizers_pass_in_a_watched_float32_run():
    with kmp.enable("float32"):
        run(optimizer_test)
