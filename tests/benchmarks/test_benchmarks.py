import dataclasses
import io
import json

import keras
import matplotlib.pyplot as plt
import pytest
from conftest import values
from rich.console import Console

from kmp.bench import fit_time, optimizer_step, replay_cost, resnet_bert, runner, sampling_cost, small_models
from kmp.bench.optimizer_step import BARE, COMPILED, KERAS, MODES, OURS
from kmp.bench.sizes import FULL, QUICK
from kmp.bench.timing import Measurement
from kmp.optimizer import LossScaleOptimizer

# A short run of all parts. It fails if the benchmark is broken, never because of a timing.
TINY = dataclasses.replace(
    QUICK, sets=("tiny",), memory_sets=("tiny",), sampled="tiny", side=16, repeats=1, steps=2, turns=1
)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(optimizer_step.SETS, "tiny", lambda: [(3, 4), (4,)])
    return TINY


def test_sets_have_the_shapes_that_their_names_say():
    sizes = {name: shapes() for name, shapes in optimizer_step.SETS.items()}
    assert [len(shapes) for shapes in sizes.values()] == [214, 600, 60, 8, 8]
    assert len(set(sizes["8 of 2048x2048"])) == 1
    assert sizes["8 of 2048x2048"][0] == (2048, 2048)


@pytest.mark.parametrize("variant", [BARE, KERAS, OURS, COMPILED])
def test_each_variant_takes_one_step_per_call(variant):
    step = optimizer_step.make_step(variant, "Adam", [(3,)], "graph")
    assert [int(step()) for _ in range(3)] == [1, 2, 3]


@pytest.mark.slow
def test_optimizers_are_measured_in_both_modes_relative_to_the_unwrapped_one(tiny):
    comparisons = list(optimizer_step.measure_speed(["tiny"], ["Adam", "SGD momentum"], 1))
    assert [(results[0].section, results[0].case, results[0].mode) for results in comparisons] == [
        (section, f"{inner}, tiny", mode)
        for inner in ("Adam", "SGD momentum")
        for mode in MODES
        for section in ("first call", "optimizer step")
    ]
    for results in comparisons:
        variants = [BARE, KERAS, OURS] if results[0].mode == "XLA" else [BARE, KERAS, OURS, COMPILED]
        assert [result.variant for result in results] == variants
        assert results[0].ratio is None
        assert all(result.value > 0 for result in results)
        assert all(result.ratio > 0 for result in results[1:])


@pytest.mark.slow
@pytest.mark.parametrize("name", small_models.TASKS)
def test_models_train_and_the_global_policy_is_unchanged(name):
    task = small_models.TASKS[name](1)
    model = task.build()
    model.compile("sgd", "sparse_categorical_crossentropy")
    before = values(model.trainable_variables)
    model.train_on_batch(task.x, task.y)
    assert any((old != new).any() for old, new in zip(before, values(model.trainable_variables), strict=True))
    assert task.units in (task.y.size, len(task.x))
    assert small_models.trainer(task, "mixed_bfloat16", BARE, "graph", 2)() > 0
    assert keras.config.dtype_policy().name == "float32"


@pytest.mark.slow
def test_optimizers_are_measured_in_several_processes():
    size = dataclasses.replace(TINY, sets=("60 small",), processes=2, repeats=2)
    comparisons = list(runner.PARTS["optimizer"](size))
    assert [(results[0].section, results[0].mode) for results in comparisons] == [
        (section, mode) for mode in MODES for section in ("first call", "optimizer step")
    ]
    for result in (result for results in comparisons for result in results):
        low, high = result.value_range
        assert 0 < low < result.value < high
        assert (result.ratio_range is None) == (result.variant == BARE)


def test_processes_share_the_rounds(monkeypatch):
    calls = []
    monkeypatch.setattr(runner, "_run_in_subprocess", lambda call: calls.append(call) or [])
    list(runner.PARTS["optimizer"](dataclasses.replace(FULL, sets=("60 small",), inner=("Adam",))))
    measure = "optimizer_step.measure_speed(['60 small'], ('Adam',), 5)"
    assert calls == [f"[[asdict(result) for result in compared] for compared in {measure}]"] * 5


@pytest.mark.slow
def test_sampling_is_measured_relative_to_steps_without_sampling(tiny):
    comparisons = list(sampling_cost.measure_cost("tiny", 16, 1, 1))
    assert [(results[0].section, results[0].mode) for results in comparisons] == [
        ("sampling: statistics", "graph"),
        ("sampling: statistics", "XLA"),
        ("sampling: first call", "graph"),
        ("sampling: step, on average", "graph"),
        ("sampling: first call", "XLA"),
        ("sampling: step, on average", "XLA"),
    ]


@pytest.mark.slow
def test_replays_are_measured_relative_to_a_training_step(monkeypatch):
    monkeypatch.setattr(replay_cost, "TASKS", {"MLP": small_models.TASKS["MLP"]})
    time, memory = replay_cost.measure(1, 1, lambda call: 2.0 * eval(call))
    assert [result.variant for result in time] == ["training step", "replay", "replay of an overflow"]
    assert time[1].ratio > 1
    assert [result.unit for result in memory] == ["B", "B"]


def test_modes_and_batch_of_the_size_are_used(monkeypatch):
    calls = []
    monkeypatch.setattr(runner, "_run_in_subprocess", lambda call: calls.append(call) or 1.0)
    size = dataclasses.replace(FULL, modes=("graph",), batch=24)
    list(runner.PARTS["memory"](size))
    assert calls
    assert [call for call in calls if not call.endswith("'graph')")] == []
    monkeypatch.setattr(resnet_bert, "compare", lambda *arguments: calls.append(arguments) or iter(()))
    list(runner.PARTS["bert"](size))
    assert calls[-1][:3] == ("BERT-base", "graph", 24)


@pytest.mark.slow
def test_memory_is_measured_in_a_subprocess():
    assert (
        runner._run_in_subprocess("optimizer_step.memory_of('bare', 'Adam', '8 of 512x512', 'graph')")
        > 8 * 512**2 * 4 * 4
    )
    with pytest.raises(RuntimeError, match=r"(?s)failed.*KeyError: 'nosuch'"):
        runner._run_in_subprocess("optimizer_step.SETS['nosuch']")


@pytest.mark.slow
def test_subprocess_imports_nothing_from_the_current_folder(monkeypatch, tmp_path):
    (tmp_path / "json.py").write_text("raise ImportError('imported from the current folder')")
    monkeypatch.chdir(tmp_path)
    assert runner._run_in_subprocess("len(optimizer_step.MODES)") == 2


def test_results_of_an_interrupted_benchmark_are_kept(monkeypatch, tmp_path):
    result = Measurement("step", "Adam", "graph", BARE, 1.0, "s", None)

    def interrupted_part(size):
        yield [result]
        raise KeyboardInterrupt

    monkeypatch.setitem(runner.PARTS, "optimizer", interrupted_part)
    text = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        runner.run(Console(file=text), TINY, ["optimizer"], tmp_path / "bench.json", tmp_path / "bench.png")
    assert "1.00 s" in text.getvalue()
    assert not (tmp_path / "bench.png").exists()  # there is no ratio to draw
    assert json.loads((tmp_path / "bench.json").read_text())["results"] == [dataclasses.asdict(result)]


@pytest.mark.slow
def test_results_are_printed_written_and_drawn(tiny, tmp_path):
    text = io.StringIO()
    files = {"json_file": tmp_path / "bench.json", "figure": tmp_path / "bench.png"}
    results = runner.run(Console(file=text, width=200), tiny, ["optimizer"], **files)
    content = json.loads(files["json_file"].read_text())
    assert content["results"] == json.loads(json.dumps([dataclasses.asdict(result) for result in results]))
    assert content["keras"] == keras.__version__
    assert files["figure"].read_bytes().startswith(b"\x89PNG")
    assert plt.get_fignums() == []
    assert f"keras: {keras.__version__}" in text.getvalue()
    assert all(result.case in text.getvalue() for result in results)


def test_header_has_the_skip_method_of_each_optimizer_under_xla():
    methods = runner.header()["under XLA, a step is skipped by"]
    assert (methods["Adam"], methods["AdamW"], methods["SGD"]) == ("predicated write",) * 3
    assert methods.get("MultiOptimizer", "branch") == "branch"
    assert LossScaleOptimizer.__name__ not in methods


@pytest.mark.parametrize("size", [FULL, QUICK])
def test_sizes_name_existing_sets_optimizers_and_modes(size):
    assert {*size.sets, *size.memory_sets, size.sampled} <= set(optimizer_step.SETS)
    assert set(size.inner) <= set(optimizer_step.INNER)
    assert set(size.modes) <= set(MODES)
    assert set(size.fit_tasks) <= set(fit_time.TASKS)
