import gc
import os
import signal

import numpy as np
import pytest
import tensorflow as tf

from kmp_bench import measurement
from kmp_bench.measurement import Measurement, MeasurementError


def test_variants_run_alternately_after_a_warmup_round():
    calls = []
    values = {"a": iter([9.0, 1.0, 2.0]), "b": iter([9.0, 3.0, 4.0])}
    functions = {
        name: lambda name=name: calls.append(name) or next(values[name]) for name in values
    }
    assert measurement.alternate(functions, 2) == {"a": [1.0, 2.0], "b": [3.0, 4.0]}
    assert calls == ["a", "b"] * 3


def test_ratio_is_the_median_of_the_ratios_of_each_round():
    results = measurement.comparison(
        "step", "Adam", "graph", {"bare": [1.0, 2.0, 4.0], "kmp": [2.0, 3.0, 4.0]}
    )
    assert results == [
        Measurement("step", "Adam", "graph", "bare", 2.0, "s", None, (1.0, 4.0)),
        Measurement("step", "Adam", "graph", "kmp", 3.0, "s", 1.5, (2.0, 4.0), (1.0, 2.0)),
    ]


def test_one_round_has_no_range_and_there_is_no_ratio_to_zero():
    results = measurement.comparison(
        "memory", "Adam", "graph", {"bare": [2], "kmp": [4], "Keras": [0]}, "B"
    )
    assert [(result.ratio, result.value_range, result.ratio_range) for result in results] == [
        *((None, None, None), (2, None, None), (0, None, None))
    ]
    results = measurement.comparison(
        "memory", "Adam", "graph", {"bare": [0, 2], "kmp": [3, 4]}, "B"
    )
    assert [(result.value, result.ratio) for result in results] == [(1.0, None), (3.5, None)]


def test_seconds_are_per_call(monkeypatch):
    clock = iter([10.0, 16.0])
    monkeypatch.setattr(measurement.time, "perf_counter", lambda: next(clock))
    calls = []
    assert measurement.seconds_per_call(lambda: calls.append(1), calls=3) == 2.0
    assert len(calls) == 3


@pytest.mark.slow
def test_function_runs_in_a_new_process_and_its_errors_name_it():
    assert measurement.in_new_process(os.getpid) != os.getpid()
    with pytest.raises(
        MeasurementError, match=r"float\('much',\) failed: ValueError: could not convert"
    ):
        measurement.in_new_process(float, "much")
    with pytest.raises(MeasurementError, match=r"raise_signal.* was killed"):
        measurement.in_new_process(signal.raise_signal, signal.SIGKILL)


def test_peak_memory_is_reset_on_gpus_only(monkeypatch):
    gpus, reset = [], []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda device_type: gpus)
    monkeypatch.setattr(tf.config.experimental, "reset_memory_stats", reset.append)
    for gpus[:] in ([], ["GPU:0"]):
        measurement.reset_peak_memory()
        assert reset == gpus


def test_peak_memory_is_in_bytes_and_grows_with_allocations():
    ones = tf.ones if tf.config.list_physical_devices("GPU") else np.ones
    gc.collect()  # not between the measurements
    before, allocated = measurement.peak_memory(), []
    while measurement.peak_memory() == before:  # first it fills what was freed since the peak
        allocated.append(ones(2**22, "float32"))
    before = measurement.peak_memory()
    allocated += [ones(2**22, "float32") for _ in range(4)]
    assert 0.75 < (measurement.peak_memory() - before) / (4 * 4 * 2**22) < 1.25
