import itertools

import keras
import pytest
from conftest import training_rates, values

from kmp.enabling import Gpu
from kmp_bench import models, precision
from kmp_bench.models import BARE
from kmp_bench.precision import FORMATS, VARIANTS

TF32_OFF = "float32 without TF32"
CPU, T4, A100 = (), (Gpu("T4", (7, 5)),), (Gpu("A100", (8, 0)),)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(precision, "task_of", lambda name, batch: models.mlp(16, batch or 8))


@pytest.mark.parametrize(
    ("float16", "bfloat16", "xla", "expected"),
    [
        (0.5, 0.9, 1.0, ("float32", False, 1.0)),
        (0.5, 0.9, 2.0, ("float32", True, 1.0)),
        (2.0, 1.95, 1.0, ("mixed_bfloat16", False, 1.95)),
        (2.0, 1.0, 1.5, ("mixed_float16", True, 2.0)),
        (1.05, 1.05, 1.0, ("float32", False, 1.0)),
        (1.3, 1.3, 1.09, ("mixed_bfloat16", False, 1.3 / 1.09)),
        (1.12, 1.02, 1.0, ("mixed_float16", False, 1.12)),
    ],
)
def test_recommended_is_the_fastest_policy_if_it_is_clearly_faster(
    float16, bfloat16, xla, expected
):
    operations, *training = training_rates(float16, bfloat16, xla)
    best = precision.recommend([*operations, *itertools.chain(*training)])
    assert (best.policy, best.jit_compile, pytest.approx(best.speedup)) == expected
    assert precision.recommend(operations) is None


@pytest.mark.parametrize(
    ("machine", "missing"),
    [(CPU, {TF32_OFF}), (T4, {TF32_OFF, "bfloat16", "mixed_bfloat16"}), (A100, set())],
    ids=["CPU", "T4", "A100"],
)
@pytest.mark.usefixtures("tiny")
def test_variants_are_those_that_differ_here_by_throughput_and_memory(
    monkeypatch, machine, missing
):
    calls = []
    monkeypatch.setattr(precision, "gpus", lambda: machine)
    monkeypatch.setattr(
        precision, "in_new_process", lambda *call: calls.append(call) or ([0.5, 0.25], 1000)
    )
    throughput, memory = precision.measure_network("BERT-base", "XLA", None, 20, 2)
    labels = [label for label in VARIANTS if label not in missing]
    assert calls == [
        (precision.train_network, VARIANTS[label], "BERT-base", "XLA", None, 20, 2)
        for label in labels
    ]
    assert (
        [result.variant for result in throughput] == [result.variant for result in memory] == labels
    )
    assert {result.case for result in (*throughput, *memory)} == {"BERT-base, 8 of 16"}
    assert [(result.value, result.unit) for result in throughput] == [(24.0, "images/s")] * len(
        labels
    )
    assert set(precision.usable(FORMATS)) == set(FORMATS) - missing


@pytest.mark.usefixtures("tiny")
def test_warmup_counts_neither_for_time_nor_for_peak_memory(monkeypatch):
    events, peaks = [], iter([100, 300])

    def timed_training(model, task, steps, callbacks=()):
        return lambda: events.append((steps, bool(callbacks))) or 0.5

    monkeypatch.setattr(precision, "timed_training", timed_training)
    monkeypatch.setattr(precision, "reset_peak_memory", lambda: events.append("reset"))
    monkeypatch.setattr(precision, "peak_memory", lambda: events.append("peak") or next(peaks))
    variant = VARIANTS["mixed_float16, kmp + callbacks"]
    assert precision.train_network(variant, "ResNet-50", "graph", 8, 20, 2) == ([0.5, 0.5], 200)
    trained = (250, True)  # the callbacks read at least once
    assert events == [(1, False), "reset", "peak", trained, "reset", trained, trained, "peak"]


NETWORKS = [f"{name} {mode}" for name in ("ResNet-50", "BERT-base") for mode in ("graph", "XLA")]


@pytest.mark.parametrize(
    ("arguments", "machine", "expected"),
    [
        ({}, CPU, ["operations", "small graph XLA"]),
        ({}, T4, ["operations", "small graph XLA", *NETWORKS]),
        ({"is_quick": True}, T4, ["operations", "small XLA"]),
        ({"is_quick": True, "only": ["bert"]}, CPU, ["BERT-base XLA"]),
        ({"only": ["bert"]}, CPU, ["BERT-base graph", "BERT-base XLA"]),
    ],
)
def test_large_networks_are_measured_by_default_on_a_gpu(monkeypatch, arguments, machine, expected):
    monkeypatch.setattr(precision, "gpus", lambda: machine)
    monkeypatch.setattr(precision, "measure_operations", lambda: iter(["operations"]))
    monkeypatch.setattr(
        precision, "measure_small_models", lambda modes, *rest: iter([" ".join(["small", *modes])])
    )
    monkeypatch.setattr(
        precision, "measure_network", lambda name, mode, *rest: iter([f"{name} {mode}"])
    )
    assert list(precision.measure(**arguments)) == expected


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_training_with_callbacks_is_measured():
    variant = VARIANTS["mixed_float16, kmp + callbacks"]
    seconds, _ = precision.train_network(variant, "ResNet-50", "graph", 8, 1, 2)
    assert len(seconds) == 2
    assert min(seconds) > 0


@pytest.mark.slow
def test_networks_have_the_parameters_of_resnet50_and_bert_base():
    assert len(models.resnet50(2, side=64).build().trainable_variables) == 214
    encoder = models.bert(2, length=32)
    # embeddings of 30522 tokens and 32 positions, 12 blocks of 7,087,872, LayerNormalization,
    # pooler, two classes
    assert (
        encoder.build().count_params()
        == (30522 + 32) * 768 + 12 * 7_087_872 + 2 * 768 + 768 * 769 + 2 * 769
    )
    assert (encoder.unit, encoder.units) == ("tokens/s", 64)


@pytest.mark.slow
def test_each_precision_is_measured_on_this_machine(monkeypatch):
    monkeypatch.setattr(models, "transformer", models.mlp)  # compiles sooner
    results = [result for compared in precision.measure_machine() for result in compared]
    assert {result.variant for result in results} == set(precision.usable(FORMATS))
    assert {(result.section, result.mode) for result in results} == {
        *(("operations", "graph"), (precision.TRAINING, "graph"), (precision.TRAINING, "XLA"))
    }
    assert all(result.value > 0 for result in results)


def test_model_trains_and_the_global_policy_is_unchanged():
    task = models.mlp(16, batch=2)  # `benchmarks/test_short_runs.py` trains the others
    model = models.compiled_model(task, "mixed_bfloat16", BARE, "graph")
    assert keras.config.dtype_policy().name == "float32"
    assert model.layers[-2].compute_dtype == "bfloat16"
    before = values(model.trainable_variables)
    assert models.timed_training(model, task, 2)() > 0
    assert any(
        (old != new).any()
        for old, new in zip(before, values(model.trainable_variables), strict=True)
    )
    assert task.units in (task.y.size, len(task.x))
