"""The short run of each benchmark, and of `kmp bench`, measures what the long one does."""

import importlib
import json
import sys

import gpu
import keras
import measuring
import pytest
from conftest import exhaustive_unless

import kmp_cli

pytestmark = pytest.mark.filterwarnings("ignore")

# `test_step_operations.py` runs that of `step_operations`, `test_graph_traffic.py` that of
# `graph_traffic`.
BENCHMARKS = (
    *(
        "cost_growth",
        "fallback",
        "fit_time",
        "log_cost",
        "memory",
        "optimizer_step",
        "replay_cost",
        "replica_step",
        "training_cost",
        "sampling_cost",
    ),
    "soak",
    "watching_cost",
)


def check(file):
    results = json.loads(file.read_text())["results"]
    assert len(results) > 1
    # What a sample adds to a step, a difference of two times, is negative on a busy machine.
    assert sum(result["value"] > 0 for result in results) > len(results) / 2


# Three for the mechanism that all share; the others change with their own file only.
IN_CI = ("memory", "optimizer_step", "sampling_cost")


@pytest.mark.parametrize("name", exhaustive_unless(IN_CI, BENCHMARKS, pytest.mark.slow))
def test_short_run_of_a_benchmark_writes_its_results(name, tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", [f"{name}.py", "--quick", "--json", str(tmp_path / "results.json")]
    )
    benchmark = importlib.import_module(name)
    measuring.main(benchmark.measure, benchmark.__doc__)
    check(tmp_path / "results.json")


@pytest.mark.exhaustive  # its parts are in `bench/test_precision.py`
def test_short_run_of_the_command_writes_its_results(tmp_path):
    assert kmp_cli.main(["bench", "--quick", "--json", str(tmp_path / "results.json")]) == 0
    check(tmp_path / "results.json")


@pytest.mark.slow
def test_short_run_of_gpu_writes_each_result_and_the_error_of_a_variant(
    tmp_path, monkeypatch, capsys
):
    def fail_in_float32(name):
        if keras.config.dtype_policy().name == "float32":
            raise ValueError("a line\nand another")
        return step_model(name)

    step_model = gpu.step_model
    monkeypatch.setattr(gpu, "step_model", fail_in_float32)
    out = tmp_path / "new" / "gpu.json"
    gpu.main(["--quick", "--only", "bert-graph", "--out", str(out)])
    failed, *others = json.loads(out.read_text())["results"]
    assert (failed["variant"], failed["step"]) == ("float32", None)
    assert failed["error"] == "ValueError: a line and another"
    assert [result["variant"].split(", ")[-1] for result in others] == [
        "kmp",
        "Keras' scaler",
        "no loss scale",
    ]
    assert all(result["step"]["median"] > 0 and result["error"] is None for result in others)
    assert [result["loss_scale"] for result in others] == [
        gpu.INITIAL_SCALE,
        gpu.INITIAL_SCALE,
        None,
    ]
    gpu.main(
        ["--quick", "--only", "bert-graph", "--budget", "-1", "--out", str(tmp_path / "none.json")]
    )
    assert not (tmp_path / "none.json").exists()
    assert capsys.readouterr().out.count("not measured") == 4


@pytest.mark.slow
def test_short_run_of_gpu_measures_layers_and_a_replica(tmp_path):
    out = tmp_path / "gpu.json"
    gpu.main(["--quick", "--only", "layers", "replica-graph", "replica-xla", "--out", str(out)])
    written = json.loads(out.read_text())
    assert {each["variant"] for each in written["layers"]} >= {"Keras", "kmp"}
    assert [each["part"] for each in written["results"]] == ["replica-graph", "replica-xla"]
    assert all(each["step"]["median"] > 0 for each in written["results"])
