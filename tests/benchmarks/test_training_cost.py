import itertools
import threading

import pytest
import training_cost
from measuring import WITH_CALLBACKS

from kmp_bench.models import OURS, mlp


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(training_cost, "MODELS", {"tiny": (mlp, 4)})


def test_both_trainings_take_cpu_time_and_wall_time():
    found = training_cost.seconds_of_trainings("tiny", 4, 2)
    assert list(found) == [OURS, WITH_CALLBACKS]
    assert min(min(times) for times in found.values()) > 0


def test_threads_take_turns_and_each_has_the_time_of_its_own(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(training_cost, "_clocks", lambda: (next(ticks), 0))
    turns, order = training_cost.Turns(["first", "second"]), []

    def work(name, count):
        turns.begin(name)
        for _ in range(count):
            order.append(name)
            turns.pass_on(name)
        turns.end(name)

    threads = [threading.Thread(target=work, args=each) for each in (("second", 1), ("first", 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order == ["first", "second", "first", "first"]
    assert turns.seconds == {"first": (4, 0), "second": (2, 0)}


def test_each_length_has_a_comparison_in_both_times(monkeypatch):
    trained = []

    def in_new_process(function, *arguments):
        trained.append(arguments)
        if function is training_cost.steps_per_second:
            return 20.0
        return {OURS: (2.0, 1.0), WITH_CALLBACKS: (3.0, 2.0)}

    monkeypatch.setattr(training_cost, "in_new_process", in_new_process)
    results = [result for group in training_cost.measure(is_quick=True) for result in group]
    assert [each.section for each in results] == [
        *["training: CPU time"] * 2,
        *["training: wall time"] * 2,
    ]
    assert [each.ratio for each in results] == [None, 1.5, None, 2.0]
    assert trained[1:] == [("tiny", 4, 2)]
