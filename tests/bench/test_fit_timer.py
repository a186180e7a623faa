import keras
import pytest
import tensorflow as tf
from conftest import sequential

from kmp_bench.fit_timer import Blocks, time_fit


class Steps(keras.callbacks.Callback):
    """Counts the steps."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def on_train_batch_begin(self, batch, logs=None):
        self.count += 1


@pytest.fixture
def model_and_data():
    model = sequential(keras.layers.Dense(1), shape=(2,), optimizer="sgd")
    return model, tf.data.Dataset.from_tensors((tf.ones((4, 2)), tf.ones((4, 1)))).repeat()


def test_blocks_are_measured_after_the_warm_up_in_one_fit(model_and_data):
    steps = Steps()
    times = time_fit(*model_and_data, Blocks(warm_up=3, count=2, steps=5), [steps])
    assert len(times.seconds) == 2
    assert all(seconds > 0 for seconds in times.seconds)
    assert times.peak_memory > 0
    assert steps.count == 3 + 2 * 5 + 1


def test_keras_does_not_read_the_loss_in_each_step(model_and_data, monkeypatch):
    model, data = model_and_data
    used = []
    monkeypatch.setattr(model, "fit", lambda data, callbacks, **options: used.extend(callbacks))
    time_fit(model, data, Blocks())
    assert len(used) == 1
    for name in ("on_train_batch_end", "on_batch_end"):  # for which Keras would read it
        assert getattr(type(used[0]), name) is getattr(keras.callbacks.Callback, name)
