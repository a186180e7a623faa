import numpy as np
import pytest
import tensorflow as tf

from kmp.bench import timing
from kmp.bench.timing import Measured


def test_ways_take_turns_after_one_that_does_not_count():
    calls = []
    seconds = {"a": iter([9.0, 1.0, 2.0]), "b": iter([9.0, 3.0, 4.0])}
    ways = {name: (lambda name=name: calls.append(name)) for name in seconds}

    def clock(way):
        way()
        return next(seconds[calls[-1]])

    assert timing.take_turns(ways, 2, clock) == {"a": [1.0, 2.0], "b": [3.0, 4.0]}
    assert calls == ["a", "b"] * 3


def test_ratios_are_taken_turn_by_turn_to_the_first_way():
    found = timing.compared("step", "Adam", "graph", {"bare": [1.0, 2.0, 4.0], "kmp": [2.0, 3.0, 4.0]})
    assert found == [
        Measured("step", "Adam", "graph", "bare", 2.0, "s", None),
        Measured("step", "Adam", "graph", "kmp", 3.0, "s", 1.5),
    ]


def test_there_is_no_ratio_to_nothing():
    found = timing.compared("memory", "Adam", "graph", {"bare": [0, 2], "kmp": [3, 4]}, "B")
    assert [(figure.value, figure.ratio) for figure in found] == [(1.0, None), (3.5, None)]


def test_seconds_are_of_one_call(monkeypatch):
    clock = iter([10.0, 16.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    calls = []
    assert timing.seconds_of(lambda: calls.append(1), calls=3) == 2.0
    assert len(calls) == 3


def test_peak_is_forgotten_on_a_gpu_and_nowhere_else(monkeypatch):
    gpus, reset = [], []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.setattr(tf.config.experimental, "reset_memory_stats", reset.append)
    timing.forget_peak()
    assert reset == []
    gpus.append("one")
    timing.forget_peak()
    assert reset == ["GPU:0"]


def test_peak_memory_grows_with_what_is_held():
    before = timing.peak_memory()
    ones = tf.ones if tf.config.list_physical_devices("GPU") else np.ones
    held = ones(max(2**24, before // 4), "float32")  # as much as ever was held, once more
    assert timing.peak_memory() - before > len(held)


def test_peak_memory_is_known_where_there_is_no_proc(monkeypatch):
    monkeypatch.setattr(timing.Path, "exists", lambda self: False)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [])
    assert timing.peak_memory() == pytest.approx(timing.peak_memory(), rel=0.01)
    assert timing.peak_memory() > 2**24
