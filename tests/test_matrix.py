"""Training works for every pair of a mode, a strategy, an optimizer option, and with or without callbacks.

`policy/test_misuse_warnings.py` has the combinations that `compile` refuses.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MODES, assert_equal, values
from matrix import BATCHES, OPTIONS, data, make_model
from tensorflow.python.distribute import mirrored_strategy

import kmp

pytestmark = pytest.mark.usefixtures("enabled")

STRATEGIES = ["none", "one replica", "two replicas"]
CALLBACKS = {"no callbacks": list, "default callbacks": kmp.callbacks.defaults}
UNSUPPORTED = {("xla", "two replicas"), ("steps_per_execution", "two replicas")}
EAGER_ONLY = {"ema", "accumulation"}
# XLA has a code path of its own without a strategy, which every option goes through.
ALWAYS = [("xla", "none", option, "no callbacks") for option in OPTIONS]


class StateRecorder(keras.callbacks.Callback):
    """Records all state after each call of the train function."""

    def __init__(self):
        super().__init__()
        self.states = []

    def on_train_batch_end(self, batch, logs=None):
        optimizer = self.model.optimizer.inner_optimizer
        self.states.append(values([*self.model.weights, *optimizer.variables]))


@pytest.fixture(scope="module")
def scopes(one_replica, two_replicas):
    return dict(zip(STRATEGIES, (tf.distribute.get_strategy(), one_replica, two_replicas), strict=True))


def is_supported(mode, strategy, option, callbacks):
    needs_eager = option in EAGER_ONLY and strategy != "none"
    return (mode, strategy) not in UNSUPPORTED and (mode == "eager" or not needs_eager)


def pairwise():
    """Returns the fewest supported combinations that have each supported pair of two values, by greedy choice."""
    supported = [case for case in itertools.product(MODES, STRATEGIES, OPTIONS, CALLBACKS) if is_supported(*case)][::-1]
    chosen = list(ALWAYS)
    uncovered = set().union(*map(pairs_of, supported)) - set().union(*map(pairs_of, chosen))
    while uncovered:
        chosen.append(max(supported, key=lambda case: len(pairs_of(case) & uncovered)))
        uncovered -= pairs_of(chosen[-1])
    return chosen


def pairs_of(case):
    return set(itertools.combinations(enumerate(case), 2))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """TensorFlow runs replicas that are GPUs without synchronizing Python if XLA compiles them."""
    monkeypatch.setattr(mirrored_strategy, "_is_gpu_device", lambda device: True)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("option", ["plain", "ema"])
def test_training_under_xla_and_a_strategy_with_one_gpu(option, scopes):
    check_training("xla", "one replica", option, "default callbacks", scopes)


@pytest.mark.parametrize(("mode", "strategy", "option", "callbacks"), pairwise())
def test_training_skips_exactly_the_corrupt_batches(mode, strategy, option, callbacks, scopes):
    check_training(mode, strategy, option, callbacks, scopes)


def check_training(mode, strategy, option, callbacks, scopes):
    arguments = MODES[mode] | ({"steps_per_execution": 2} if mode == "steps_per_execution" else {})
    with scopes[strategy].scope():
        model = make_model(option, **arguments)
    recorder, per_call = StateRecorder(), arguments.get("steps_per_execution", 1)
    model.fit(*data(), batch_size=8, shuffle=False, verbose=0, callbacks=[recorder, *CALLBACKS[callbacks]()])
    states = recorder.states
    before, after, last = states[2 // per_call - 1], states[4 // per_call - 1], states[-1]
    assert_equal(before, after)
    assert not all(np.array_equal(old, new) for old, new in zip(after, last, strict=True))
    assert all(np.isfinite(value).all() for value in last)
    snapshot = model.optimizer.snapshot()
    assert (snapshot.step, snapshot.overflow_count, snapshot.nonfinite_loss_count) == (BATCHES, 2, 2)
    assert snapshot.loss_scale == 1024.0
