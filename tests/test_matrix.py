"""Training works in every mode, under every strategy and with every option of an optimizer.

`enabling/test_misuse_warnings.py` has the combinations that `compile` refuses.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MODES, assert_equal, fit_data, values, without_replays
from matrix import BATCHES, data, make_model
from tensorflow.python.distribute import mirrored_strategy

pytestmark = pytest.mark.usefixtures("enabled")

STRATEGIES = ["none", "one replica", "two replicas"]
# Replays are in `callbacks/`, in each mode.
CALLBACKS = {"no callbacks": list, "callbacks without replays": without_replays}
# Each mode and each option without a strategy or with one replica, and with two replicas if Keras
# updates differently then. XLA has a test of its own, and each option under it is in
# `optimizer/test_skipped_steps.py`.
CASES = [
    ("eager", "none", "clipnorm, decay", "callbacks without replays"),
    ("graph", "none", "global_clipnorm", "callbacks without replays"),
    ("compiled step", "none", "clipnorm, decay", "no callbacks"),
    ("steps_per_execution", "none", "ema, accumulation", "callbacks without replays"),
    ("eager", "one replica", "ema, accumulation", "no callbacks"),
    ("graph", "one replica", "clipvalue, fixed scale", "no callbacks"),
    ("graph", "two replicas", "clipnorm, decay", "callbacks without replays"),
    # In a graph, Keras has neither under a strategy.
    ("eager", "two replicas", "ema, accumulation", "no callbacks"),
]
# The other pairs of a mode and a strategy that supports it, and of a mode and options.
RARE_CASES = [
    ("compiled step", "none", "clipnorm, decay", "callbacks without replays"),
    ("eager", "two replicas", "ema, accumulation", "callbacks without replays"),
    ("compiled step", "none", "ema, accumulation", "no callbacks"),
    ("xla", "none", "clipnorm, decay", "no callbacks"),
    ("graph", "one replica", "clipnorm, decay", "no callbacks"),
    ("steps_per_execution", "one replica", "clipvalue, fixed scale", "no callbacks"),
]


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
    return dict(
        zip(STRATEGIES, (tf.distribute.get_strategy(), one_replica, two_replicas), strict=True)
    )


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """TensorFlow runs replicas that are GPUs without synchronizing Python if XLA compiles them."""
    monkeypatch.setattr(mirrored_strategy, "_is_gpu_device", lambda device: True)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_training_under_xla_and_a_strategy_with_one_gpu(scopes):
    check_training("xla", "one replica", "ema, accumulation", "callbacks without replays", scopes)


@pytest.mark.parametrize(
    ("mode", "strategy", "option", "callbacks"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in RARE_CASES)],
)
def test_training_skips_exactly_the_corrupt_batches(mode, strategy, option, callbacks, scopes):
    check_training(mode, strategy, option, callbacks, scopes)


def check_training(mode, strategy, option, callbacks, scopes):
    arguments = MODES[mode] | ({"steps_per_execution": 2} if mode == "steps_per_execution" else {})
    with scopes[strategy].scope():
        model = make_model(option, compiles_step=mode == "compiled step", **arguments)
    recorder, per_call = StateRecorder(), arguments.get("steps_per_execution", 1)
    fit_data(model, data(), [recorder, *CALLBACKS[callbacks]()])
    states = recorder.states
    before, after, last = states[2 // per_call - 1], states[4 // per_call - 1], states[-1]
    assert_equal(before, after)
    assert not all(np.array_equal(old, new) for old, new in zip(after, last, strict=True))
    assert all(np.isfinite(value).all() for value in last)
    snapshot = model.optimizer.snapshot()
    assert (snapshot.step, snapshot.overflow_count, snapshot.nonfinite_loss_count) == (
        BATCHES,
        2,
        2,
    )
    assert snapshot.loss_scale == 1024.0
