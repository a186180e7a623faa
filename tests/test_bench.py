import io

import pytest
import tensorflow as tf
from rich.console import Console

from kmp import _bench


@pytest.mark.slow
def test_every_row_is_a_ratio_in_both_modes(monkeypatch):
    monkeypatch.setattr(_bench, "_REPEATS", 1)
    monkeypatch.setattr(_bench, "_FIRST_CALLS", 1)
    monkeypatch.setattr(_bench, "_SIDE", 64)
    small = [tf.zeros([3, 5]), tf.ones([7])]
    monkeypatch.setattr(
        _bench.keras.applications, "ResNet50", lambda weights: type("M", (), {"trainable_variables": small})
    )
    shown = io.StringIO()
    rows = _bench.run(Console(file=shown, width=200))
    assert len(rows) == 4
    for row in rows[:2]:
        assert float(row.graph.split()[0]) > 0
        assert row.xla.endswith(" times")
    for row in rows[2:]:
        assert row.graph.endswith("%")
        assert row.xla.endswith("%")
    assert all(row.name in shown.getvalue() for row in rows)


def test_ways_take_turns_and_their_medians_are_told(monkeypatch):
    calls = []
    clock = iter(range(100))
    monkeypatch.setattr(_bench.time, "perf_counter", lambda: next(clock))
    found = _bench._medians([lambda: calls.append("a"), lambda: (calls.append("b"), next(clock))])
    assert calls == ["a", "b"] * (1 + _bench._REPEATS)
    assert found == [1, 2]
