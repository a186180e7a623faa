import pytest

from kmp import bench
from kmp.bench import models, networks
from kmp.bench.networks import VARIANTS, Variant, compare, measure
from kmp.policy import Gpu, Hardware


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(networks, "task_of", lambda name, batch: models.mlp(16, batch or 8))


@pytest.mark.parametrize(
    ("gpus", "missing"),
    [
        ((), {"float32 without TF32"}),
        ((Gpu("T4", (7, 5)),), {"float32 without TF32", "mixed_bfloat16"}),
        ((Gpu("A100", (8, 0)),), set()),
    ],
)
@pytest.mark.usefixtures("tiny")
def test_variants_are_compared_by_throughput_memory_and_step_time(monkeypatch, gpus, missing):
    calls = []
    monkeypatch.setattr(networks, "hardware", lambda: Hardware(gpus))
    monkeypatch.setattr(networks, "in_new_process", lambda *call: calls.append(call) or ([0.5, 0.25], 1000))
    throughput, memory, steps = compare("BERT-base", "XLA", None, 20, 2)
    labels = [label for label in VARIANTS if label not in missing]
    assert calls == [(measure, VARIANTS[label], "BERT-base", "XLA", None, 20, 2) for label in labels]
    assert [result.variant for result in throughput] == [result.variant for result in memory] == labels
    assert {result.case for result in (*throughput, *memory, *steps)} == {"BERT-base, 8 of 16"}
    assert [(result.value, result.unit) for result in throughput] == [(24.0, "images/s")] * len(labels)
    assert [result.variant for result in steps] == [label for label in labels if label.startswith("mixed_float16")]


@pytest.mark.usefixtures("tiny")
def test_warmup_counts_neither_for_time_nor_for_peak_memory(monkeypatch):
    events, peaks = [], iter([100, 300])

    def timed_training(model, task, steps, callbacks=()):
        return lambda: events.append((steps, len(callbacks))) or 0.5

    monkeypatch.setattr(networks, "timed_training", timed_training)
    monkeypatch.setattr(networks, "reset_peak_memory", lambda: events.append("reset"))
    monkeypatch.setattr(networks, "peak_memory", lambda: events.append("peak") or next(peaks))
    variant = Variant("mixed_float16", models.OURS, histogram_every=100)
    assert measure(variant, "ResNet-50", "graph", 8, 20, 2) == ([0.5, 0.5], 200)
    trained = (100, 1)  # a histogram is drawn at least once
    assert events == [(1, 0), "reset", "peak", trained, "reset", trained, trained, "peak"]


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_training_with_callbacks_is_measured():
    seconds, _ = measure(VARIANTS["mixed_float16, kmp + callbacks"], "ResNet-50", "graph", 8, 1, 2)
    assert len(seconds) == 2
    assert min(seconds) > 0


@pytest.mark.slow
def test_networks_have_the_parameters_of_resnet50_and_bert_base():
    assert len(models.resnet50(2, side=64).build().trainable_variables) == 214
    encoder = models.bert(2, length=32)
    # embeddings of 30522 tokens and 32 positions, 12 blocks of 7,087,872, LayerNormalization, pooler, two classes
    assert encoder.build().count_params() == (30522 + 32) * 768 + 12 * 7_087_872 + 2 * 768 + 768 * 769 + 2 * 769
    assert (encoder.unit, encoder.units) == ("tokens/s", 64)


@pytest.mark.parametrize(
    ("arguments", "on_gpu", "expected"),
    [
        ({}, False, ["operations", "small graph XLA"]),
        (
            {},
            True,
            ["operations", "small graph XLA", *(f"{n} {m}" for n in networks.NETWORKS for m in ("graph", "XLA"))],
        ),
        ({"is_quick": True}, True, ["operations", "small XLA"]),
        ({"only": ["bert"], "mode": "graph"}, False, ["BERT-base graph"]),
    ],
)
def test_large_networks_are_measured_by_default_on_a_gpu(monkeypatch, arguments, on_gpu, expected):
    monkeypatch.setattr("kmp.bench.parts.hardware", lambda: Hardware((Gpu("T4", (7, 5)),) if on_gpu else ()))
    monkeypatch.setattr("kmp.bench.parts.measure_operations", lambda: iter(["operations"]))
    monkeypatch.setattr(
        "kmp.bench.parts.measure_small_models", lambda modes, *rest: iter([" ".join(["small", *modes])])
    )
    monkeypatch.setattr("kmp.bench.parts.compare", lambda name, mode, *rest: iter([f"{name} {mode}"]))
    assert list(bench.measure(**arguments)) == expected
