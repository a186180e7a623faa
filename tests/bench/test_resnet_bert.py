import pytest
import tensorflow as tf

from kmp.backend import tensorflow_internals
from kmp.bench import resnet_bert, runner, sizes, small_models
from kmp.bench.resnet_bert import NETWORKS, VARIANTS, compare, default_batch, measure
from kmp.bench.timing import MeasurementError


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(NETWORKS, "tiny", lambda batch, is_small: small_models.TASKS["MLP"](1))


def run_in_this_process(call):
    return eval(call, {"resnet_bert": resnet_bert, "tensorflow_internals": tensorflow_internals})


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_variants_are_compared_by_throughput_memory_and_step_time():
    throughput, memory, steps = compare("tiny", "graph", 8, 1, 1, run_in_this_process)
    tf.config.experimental.enable_tensor_float_32_execution(True)
    variants = [result.variant for result in throughput]
    assert variants == [
        variant for variant in VARIANTS if variant != "float32 with TF32" or tf.config.list_physical_devices("GPU")
    ]
    assert [result.variant for result in memory] == variants
    assert {result.case for result in (*throughput, *memory, *steps)} == {"tiny, 8 of 256"}
    assert (throughput[0].ratio, memory[0].ratio, steps[0].ratio) == (None, None, None)
    assert all(result.value > 0 for result in (*throughput, *steps))
    histograms = [f"histogram every {n}" for n in (1, 10, 100)]
    assert [result.variant for result in steps] == [
        *(variant for variant in variants if "float16," in variant),
        *histograms,
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_float32_is_measured_without_tf32():
    try:
        measure("float32", "tiny", "graph", 8, 1, 1)
        assert not tf.config.experimental.tensor_float_32_execution_enabled()
        measured = measure("float32 with TF32", "tiny", "graph", 8, 1, 2)
        assert tf.config.experimental.tensor_float_32_execution_enabled()
        assert len(measured["seconds"]["float32 with TF32"]) == 2
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(True)


@pytest.mark.usefixtures("tiny")
def test_warmup_training_counts_neither_for_time_nor_for_peak_memory(monkeypatch):
    events, peaks = [], iter([100, 300, 900, 900, 900])

    def timed_training(model, task, steps, callbacks=()):
        return lambda: events.append(steps) or 0.5

    monkeypatch.setattr(resnet_bert, "timed_training", timed_training)
    monkeypatch.setattr(resnet_bert, "compiled_model", lambda *arguments: None)
    monkeypatch.setattr(resnet_bert, "reset_peak_memory", lambda: events.append("reset"))
    monkeypatch.setattr(resnet_bert, "peak_memory", lambda: events.append("peak") or next(peaks))
    measured = measure("mixed_float16, kmp + callbacks", "tiny", "graph", 8, 20, 2)
    rows = [[steps, "reset", steps, steps, "peak"] for steps in (250, 20, 20, 100)]
    assert events == [1, "reset", "peak", *(event for row in rows for event in row)]
    assert measured["bytes"] == 200
    assert set(map(tuple, measured["seconds"].values())) == {(0.5, 0.5)}


def test_default_batch_fills_a_quarter_of_the_gpu(monkeypatch):
    gpus = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda device_type: gpus)
    assert default_batch("any", None) == 8
    gpus.append("GPU:0")
    sizes = {"gpu": 4000 * 2**20, "example": 10}

    def run_in_subprocess(call):
        if "memory_limit_of_gpu" in call:
            return sizes["gpu"]
        batch = int(call.split(",")[3])
        return {"bytes": (100 + sizes["example"] * batch) * 2**20}

    assert default_batch("any", run_in_subprocess) == 88  # 100 + 10 * 90 MiB, rounded down to a multiple of 8
    sizes["gpu"] = 2**20
    assert default_batch("any", run_in_subprocess) == 8
    sizes["example"] = 0
    with pytest.raises(MeasurementError, match="memory of any does not grow from a batch of 16 to one of 48.*--batch"):
        default_batch("any", run_in_subprocess)


@pytest.mark.slow
def test_networks_have_the_parameters_of_resnet50_and_bert_base():
    resnet, bert = (make_task(2, True) for make_task in NETWORKS.values())
    assert len(resnet.build().trainable_variables) == 214
    encoder = bert.build()
    # embeddings of 30522 tokens and 32 positions, 12 blocks of 7,087,872, LayerNormalization, pooler, two classes
    assert encoder.count_params() == (30522 + 32) * 768 + 12 * 7_087_872 + 2 * 768 + 768 * 769 + 2 * 769
    assert (bert.unit, bert.units) == ("tokens/s", 64)


def test_networks_are_default_parts_on_gpus_only(monkeypatch):
    list_devices = tf.config.list_physical_devices
    for gpus, expected in (([], 8), (["GPU:0"], 10)):
        monkeypatch.setattr(
            tf.config,
            "list_physical_devices",
            lambda device_type=None, gpus=gpus: gpus if device_type == "GPU" else list_devices(device_type),
        )
        assert len(runner.parts_by_default(sizes.FULL)) == expected
        assert len(runner.parts_by_default(sizes.QUICK)) == 8
