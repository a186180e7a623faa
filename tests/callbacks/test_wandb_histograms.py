import time

import keras
import numpy as np
import pytest

import kmp
from kmp.callbacks import defaults

wandb = pytest.importorskip("wandb", reason="needs the extra `loggers`")


@pytest.fixture
def wandb_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(project="kmp", mode="offline", dir=tmp_path) as run:
        sent = []
        log = run.log
        monkeypatch.setattr(run, "log", lambda data: (sent.append(data), log(data)))
        yield run, sent


def fit(callbacks, epochs=2):
    with kmp.enable(initial_scale=2.0**10, growth_interval=5):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="a"), keras.layers.Dense(1, name="b")])
        model.compile("sgd", "mse")
    model.fit(np.ones((40, 4)), np.ones((40, 1)), batch_size=4, epochs=epochs, verbose=0, callbacks=callbacks)


def summary_of(run, key, value):
    """Returns the last values that the process of Weights & Biases has got, once `key` has this value."""
    while run.summary.get(key) != value:
        time.sleep(0.1)
    return run.summary


@pytest.mark.slow
def test_each_sample_is_sent_once_as_histograms_by_layer(wandb_run):
    run, sent = wandb_run
    loggers = defaults(every_n_steps=5)
    callbacks = [*loggers, kmp.callbacks.WandbHistograms(loggers[0].run)]
    for _ in range(2):  # a second model, whose steps begin at 1
        sent.clear()
        fit(callbacks)
        samples = loggers[0].run.samples
        assert [data["kmp/step"] for data in sent] == [sample.step for sample in samples] == [1, 5, 10, 15, 20]
    layers = ["kmp_by_layer/sequential/a", "kmp_by_layer/sequential/b"]
    assert list(sent[0]) == ["kmp/step", "kmp/gradient_exponents", *layers]
    by_layer = samples[-1].by_layer()
    edges, counts = by_layer[list(by_layer)[-1]].log2_buckets()
    histogram = sent[-1][layers[1]]
    assert (histogram.bins, histogram.histogram) == (edges.tolist(), counts.tolist())
    assert summary_of(run, "kmp/step", 20)[layers[1]]["bins"] == edges.tolist()


@pytest.mark.slow
def test_wandb_metrics_logger_sends_the_loss_scale(wandb_run):
    from wandb.integration.keras import WandbMetricsLogger

    run, _ = wandb_run
    fit([*defaults(), WandbMetricsLogger()])
    summary = summary_of(run, "epoch/epoch", 1)
    assert summary["epoch/loss_scale"] == 2.0 ** (10 + 20 // 5)
    assert summary["epoch/overflow_count"] == 0


def test_fit_without_a_run_of_wandb_raises():
    loggers = defaults()
    with pytest.raises(RuntimeError, match="wandb.init"):
        fit([*loggers, kmp.callbacks.WandbHistograms(loggers[0].run)])


def test_run_must_be_a_run_of_kmp():
    with pytest.raises(TypeError, match="`run` must be the kmp.records.Run of other callbacks"):
        kmp.callbacks.WandbHistograms(defaults())


@pytest.mark.slow
def test_training_continues_with_a_warning_once_the_run_of_wandb_is_finished(wandb_run):
    run, sent = wandb_run
    loggers = defaults(every_n_steps=5)
    finish = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: run.finish() if epoch == 1 else None)
    with pytest.warns(UserWarning, match="Weights & Biases gets no more histograms"):
        fit([*loggers, finish, kmp.callbacks.WandbHistograms(loggers[0].run, run)])
    assert [data["kmp/step"] for data in sent][:3] == [1, 5, 10]
    assert loggers[0].run.samples[-1].step == 20


def test_wandb_run_must_be_one():
    with pytest.raises(TypeError, match=r"`wandb_run` must be a wandb\.Run"):
        kmp.callbacks.WandbHistograms(defaults()[0].run, "kmp")
