import pytest
import tensorflow as tf

from kmp.bench import resnet_bert, runner, small_models
from kmp.bench.resnet_bert import NETWORKS, WAYS, compare, default_batch, measure
from kmp.bench.timing import MeasurementError


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(NETWORKS, "tiny", lambda batch, is_small: small_models.TASKS["MLP"](1))


def in_this_process(call):
    return eval(call, {"networks": _bench_networks})


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_each_way_is_compared_by_throughput_memory_and_time():
    throughput, memory, steps = compare("tiny", "graph", 8, 1, 1, in_this_process)
    tf.config.experimental.enable_tensor_float_32_execution(True)
    ways = [figure.way for figure in throughput]
    assert ways == [way for way in WAYS if way != "float32 with TF32" or tf.config.list_physical_devices("GPU")]
    assert [figure.way for figure in memory] == ways
    assert {figure.case for figure in (*throughput, *memory, *steps)} == {"tiny, 8 of 256"}
    assert (throughput[0].ratio, memory[0].ratio, steps[0].ratio) == (None, None, None)
    assert all(figure.value > 0 for figure in (*throughput, *steps))
    histograms = [f"histogram every {n}" for n in (1, 10, 100)]
    assert [figure.way for figure in steps] == [*(way for way in ways if "float16," in way), *histograms]


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_float32_is_measured_without_tf32():
    try:
        measure("float32", "tiny", "graph", 8, 1, 1)
        assert not tf.config.experimental.tensor_float_32_execution_enabled()
        found = measure("float32 with TF32", "tiny", "graph", 8, 1, 2)
        assert tf.config.experimental.tensor_float_32_execution_enabled()
        assert len(found["seconds"]["float32 with TF32"]) == 2
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(True)


@pytest.mark.usefixtures("tiny")
def test_a_first_training_is_neither_timed_nor_held_against_its_memory(monkeypatch):
    order, levels = [], iter([100, 300, 900, 900, 900])

    def timed(model, task, steps, callbacks=()):
        return lambda: order.append(steps) or 0.5

    monkeypatch.setattr(resnet_bert, "timed", timed)
    monkeypatch.setattr(resnet_bert, "compiled", lambda *arguments: None)
    monkeypatch.setattr(resnet_bert, "forget_peak", lambda: order.append("forget"))
    monkeypatch.setattr(resnet_bert, "peak_memory", lambda: order.append("peak") or next(levels))
    found = measure("mixed_float16, kmp + callbacks", "tiny", "graph", 8, 20, 2)
    rows = [[steps, "forget", steps, steps, "peak"] for steps in (250, 20, 20, 100)]
    assert order == [1, "forget", "peak", *(one for row in rows for one in row)]
    assert found["bytes"] == 200
    assert set(map(tuple, found["seconds"].values())) == {(0.5, 0.5)}


def test_batch_fills_a_quarter_of_the_gpu(monkeypatch):
    gpus = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    assert default_batch("any", None) == 8
    gpus.append("one")
    bytes_of = {"memory_of_gpu": 4000 * 2**20, "an example": 10}

    def in_process(call):
        if "memory_of_gpu" in call:
            return bytes_of["memory_of_gpu"]
        batch = int(call.split(",")[3])
        return {"bytes": (100 + bytes_of["an example"] * batch) * 2**20}

    assert default_batch("any", in_process) == 88  # 100 + 10 * 90 MiB, in eights
    bytes_of["memory_of_gpu"] = 2**20
    assert default_batch("any", in_process) == 8
    bytes_of["an example"] = 0
    with pytest.raises(MeasurementError, match="48 examples of any took no more memory than 16.*--batch"):
        default_batch("any", in_process)


@pytest.mark.slow
def test_networks_are_what_they_are_called():
    resnet, bert = (make(2, True) for make in NETWORKS.values())
    assert len(resnet.build().trainable_variables) == 214
    encoder = bert.build()
    # 30522 words and 32 places of 768, 12 blocks of 7,087,872, a norm, a pooler and two classes
    assert encoder.count_params() == (30522 + 32) * 768 + 12 * 7_087_872 + 2 * 768 + 768 * 769 + 2 * 769
    assert (bert.unit, bert.units) == ("tokens/s", 64)


def test_networks_are_left_to_gpus_unless_asked_for(monkeypatch):
    found = tf.config.list_physical_devices
    for gpus, expected in (([], 5), (["one"], 7)):
        monkeypatch.setattr(
            tf.config, "list_physical_devices", lambda kind=None, gpus=gpus: gpus if kind == "GPU" else found(kind)
        )
        assert len(runner.parts_by_default(runner.FULL)) == expected
        assert len(runner.parts_by_default(runner.QUICK)) == 5
