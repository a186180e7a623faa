import numpy as np
import pytest
import tensorflow as tf

from kmp.bench import timing
from kmp.bench.timing import Measurement


def test_variants_run_alternately_after_a_warmup_round():
    calls = []
    seconds = {"a": iter([9.0, 1.0, 2.0]), "b": iter([9.0, 3.0, 4.0])}
    variants = {name: (lambda name=name: calls.append(name)) for name in seconds}

    def clock(function):
        function()
        return next(seconds[calls[-1]])

    assert timing.measure_alternately(variants, 2, clock) == {"a": [1.0, 2.0], "b": [3.0, 4.0]}
    assert calls == ["a", "b"] * 3


def test_ratio_is_the_median_of_the_ratios_of_each_round():
    results = timing.comparison("step", "Adam", "graph", {"bare": [1.0, 2.0, 4.0], "kmp": [2.0, 3.0, 4.0]})
    assert results == [
        Measurement("step", "Adam", "graph", "bare", 2.0, "s", None, (1.0, 4.0)),
        Measurement("step", "Adam", "graph", "kmp", 3.0, "s", 1.5, (2.0, 4.0), (1.0, 2.0)),
    ]


def test_one_round_has_no_range():
    results = timing.comparison("step", "Adam", "graph", {"bare": [1.0], "kmp": [2.0]})
    assert [(result.value_range, result.ratio_range) for result in results] == [(None, None)] * 2


def test_results_of_several_processes_are_their_medians_and_ranges():
    processes = [
        timing.comparison("step", "Adam", "graph", {"bare": [1.0, 1.0], "kmp": [seconds, seconds]})
        for seconds in (4.0, 2.0, 3.0)
    ]
    assert timing.over_processes(processes) == [
        Measurement("step", "Adam", "graph", "bare", 1.0, "s", None, (1.0, 1.0)),
        Measurement("step", "Adam", "graph", "kmp", 3.0, "s", 3.0, (2.0, 4.0), (2.0, 4.0)),
    ]


def test_there_is_no_ratio_to_zero():
    results = timing.comparison("memory", "Adam", "graph", {"bare": [0, 2], "kmp": [3, 4]}, "B")
    assert [(result.value, result.ratio) for result in results] == [(1.0, None), (3.5, None)]


def test_seconds_are_per_call(monkeypatch):
    clock = iter([10.0, 16.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    calls = []
    assert timing.seconds_per_call(lambda: calls.append(1), calls=3) == 2.0
    assert len(calls) == 3


def test_peak_memory_is_reset_on_gpus_only(monkeypatch):
    gpus, reset_devices = [], []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda device_type: gpus)
    monkeypatch.setattr(tf.config.experimental, "reset_memory_stats", reset_devices.append)
    timing.reset_peak_memory()
    assert reset_devices == []
    gpus.append("GPU:0")
    timing.reset_peak_memory()
    assert reset_devices == ["GPU:0"]


def test_peak_memory_grows_with_allocations():
    before = timing.peak_memory()
    ones = tf.ones if tf.config.list_physical_devices("GPU") else np.ones
    allocated = ones(max(2**24, before // 4), "float32")  # as much as the peak so far
    assert timing.peak_memory() - before > len(allocated)


def test_peak_memory_is_known_without_proc(monkeypatch):
    monkeypatch.setattr(timing.Path, "exists", lambda self: False)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda device_type: [])
    assert timing.peak_memory() == pytest.approx(timing.peak_memory(), rel=0.01)
    assert timing.peak_memory() > 2**24
