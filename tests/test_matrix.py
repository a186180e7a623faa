"""What DESIGN calls "works alike": every mode, strategy and option of the inner optimizer trains, or is refused."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MODES, values
from matrix import BATCHES, OPTIONS, data, make_model

import kmp

pytestmark = [pytest.mark.usefixtures("enabled"), pytest.mark.slow]

STRATEGIES = ["none", "one replica", "two replicas"]
REFUSED = {("xla", "two replicas"), ("steps_per_execution", "two replicas")}
REFUSED_UNLESS_EAGER = {"ema", "accumulation"}


class States(keras.callbacks.Callback):
    """Keeps all state after each call of the train function."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        optimizer = self.model.optimizer.inner_optimizer
        self.seen.append(values([*self.model.weights, *optimizer.variables]))


@pytest.fixture(scope="module")
def scopes(one_replica, two_replicas):
    return dict(zip(STRATEGIES, (tf.distribute.get_strategy(), one_replica, two_replicas), strict=True))


@pytest.mark.parametrize(("mode", "strategy", "option"), list(itertools.product(MODES, STRATEGIES, OPTIONS)))
def test_training_skips_what_is_spoilt_and_nothing_else(mode, strategy, option, scopes):
    arguments = MODES[mode] | ({"steps_per_execution": 2} if mode == "steps_per_execution" else {})
    in_a_branch = option in REFUSED_UNLESS_EAGER and mode != "eager" and strategy != "none"
    with scopes[strategy].scope():
        if (mode, strategy) in REFUSED or in_a_branch:
            with pytest.raises(ValueError, match="TensorFlow cannot compile|TensorFlow fails|Keras' optimizers fail"):
                make_model(option, **arguments)
            return
        model = make_model(option, **arguments)
    states, per_call = States(), arguments.get("steps_per_execution", 1)
    model.fit(*data(), batch_size=8, shuffle=False, verbose=0, callbacks=[states, *kmp.callbacks.defaults()])
    before, after, last = states.seen[2 // per_call - 1], states.seen[4 // per_call - 1], states.seen[-1]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    assert not all(np.array_equal(old, new) for old, new in zip(after, last, strict=True))
    assert all(np.isfinite(value).all() for value in last)
    found = model.optimizer.snapshot()
    assert (found.step, found.overflow_count, found.nonfinite_loss_count) == (BATCHES, 2, 2)
    assert found.loss_scale == 1024.0
