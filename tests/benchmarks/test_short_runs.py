"""The short run of each benchmark, and of `kmp bench`, measures what the long one does."""

import importlib
import json
import sys

import measuring
import pytest

import kmp_cli

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

# `test_step_operations.py` runs that of `step_operations`.
BENCHMARKS = (
    *("cost_growth", "fallback", "fit_time", "log_cost", "memory", "optimizer_step", "replay_cost", "sampling_cost"),
    "soak",
)


def check(file):
    results = json.loads(file.read_text())["results"]
    assert len(results) > 1
    # What a sample adds to a step, a difference of two times, is negative on a busy machine.
    assert sum(result["value"] > 0 for result in results) > len(results) / 2


@pytest.mark.parametrize("name", BENCHMARKS)
def test_short_run_of_a_benchmark_writes_its_results(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--quick", "--json", str(tmp_path / "results.json")])
    benchmark = importlib.import_module(name)
    measuring.main(benchmark.measure, benchmark.__doc__)
    check(tmp_path / "results.json")


def test_short_run_of_the_command_writes_its_results(tmp_path):
    assert kmp_cli.main(["bench", "--quick", "--json", str(tmp_path / "results.json")]) == 0
    check(tmp_path / "results.json")
