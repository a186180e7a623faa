"""Runs Keras' own tests of `LossScaleOptimizer`, which its wheel includes, on kmp's class."""

import unittest

import pytest

import kmp

NAME = "keras.src.optimizers.loss_scale_optimizer_test"
loss_scale_optimizer_test = pytest.importorskip(
    NAME, reason="the wheels of early Keras 3 versions do not include the tests"
)


# They apply gradients without a loss.
@pytest.mark.filterwarnings("ignore:.*did not go through `scale_loss`")
# Keras' tests use features that NumPy 2 deprecates.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_keras_own_tests_pass(monkeypatch):
    monkeypatch.setattr(loss_scale_optimizer_test, "LossScaleOptimizer", kmp.LossScaleOptimizer)
    suite = unittest.defaultTestLoader.loadTestsFromModule(loss_scale_optimizer_test)
    result = unittest.TestResult()
    suite.run(result)
    assert not result.failures + result.errors
    assert result.testsRun > 20
