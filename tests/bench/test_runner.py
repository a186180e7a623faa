import dataclasses
import io
import json

import keras
import matplotlib.pyplot as plt
import pytest
from conftest import values
from rich.console import Console

from kmp.bench import optimizer_step, resnet_bert, runner, sampling_cost, small_models
from kmp.bench.optimizer_step import BARE, COMPILED, KERAS, MODES, OURS
from kmp.bench.small_models import WITH_CALLBACKS
from kmp.bench.timing import Measured
from kmp.optimizer import LossScaleOptimizer

# A short run of everything: it fails where the benchmark is broken, never on a timing.
TINY = dataclasses.replace(
    runner.QUICK, sets=("tiny",), memory_sets=("tiny",), sampled="tiny", side=16, repeats=1, steps=2, turns=1
)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(optimizer_step.SETS, "tiny", lambda: [(3, 4), (4,)])
    return TINY


def test_sets_are_what_they_are_called():
    sizes = {name: shapes() for name, shapes in optimizer_step.SETS.items()}
    assert [len(shapes) for shapes in sizes.values()] == [214, 600, 60, 8, 8]
    assert len(set(sizes["8 of 2048x2048"])) == 1
    assert sizes["8 of 2048x2048"][0] == (2048, 2048)


@pytest.mark.parametrize("way", [BARE, KERAS, OURS, COMPILED])
def test_each_way_takes_a_step_a_call(way):
    step = optimizer_step.step_of(way, "Adam", [(3,)], "graph")
    assert [int(step()) for _ in range(3)] == [1, 2, 3]


@pytest.mark.slow
def test_optimizers_are_measured_in_both_modes_against_the_bare_one(tiny):
    found = list(optimizer_step.speed(["tiny"], ["Adam", "SGD momentum"], 1))
    assert [(figures[0].section, figures[0].case, figures[0].mode) for figures in found] == [
        (section, f"{inner}, tiny", mode)
        for inner in ("Adam", "SGD momentum")
        for mode in MODES
        for section in ("first call", "optimizer step")
    ]
    for figures in found:
        ways = [BARE, KERAS, OURS] if figures[0].mode == "XLA" else [BARE, KERAS, OURS, COMPILED]
        assert [figure.way for figure in figures] == ways
        assert figures[0].ratio is None
        assert all(figure.value > 0 for figure in figures)
        assert all(figure.ratio > 0 for figure in figures[1:])


@pytest.mark.slow
@pytest.mark.parametrize("name", small_models.TASKS)
def test_each_model_trains_and_the_global_policy_stays(name):
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
def test_training_is_measured_with_callbacks_too():
    ways = (BARE, WITH_CALLBACKS)
    found = list(small_models.scaling(1, ["graph"], ways, 2, 1))
    assert [(figures[0].case, [figure.way for figure in figures]) for figures in found] == [
        (name, list(ways)) for name in small_models.TASKS
    ]


@pytest.mark.slow
def test_sampling_is_measured_against_what_is_not_sampled(tiny):
    found = list(sampling_cost.cost("tiny", 16, 1, 1))
    assert [(figures[0].section, figures[0].mode) for figures in found] == [
        ("sampling: statistics", "graph"),
        ("sampling: statistics", "XLA"),
        ("sampling: first call", "graph"),
        ("sampling: step, on average", "graph"),
        ("sampling: first call", "XLA"),
        ("sampling: step, on average", "XLA"),
    ]


def test_modes_and_batch_are_those_asked_for(monkeypatch):
    calls = []
    monkeypatch.setattr(runner, "_in_a_process", lambda call: calls.append(call) or 1.0)
    size = dataclasses.replace(runner.FULL, modes=("graph",), batch=24)
    list(runner.PARTS["memory"](size))
    assert calls
    assert [call for call in calls if not call.endswith("'graph')")] == []
    monkeypatch.setattr(resnet_bert, "compare", lambda *arguments: calls.append(arguments) or iter(()))
    list(runner.PARTS["bert"](size))
    assert calls[-1][:3] == ("BERT-base", "graph", 24)


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own():
    assert runner._in_a_process("optimizers.memory_of('bare', 'Adam', '8 of 512x512', 'graph')") > 8 * 512**2 * 4 * 4
    with pytest.raises(RuntimeError, match=r"(?s)failed.*KeyError: 'nosuch'"):
        runner._in_a_process("optimizers.SETS['nosuch']")


@pytest.mark.slow
def test_a_measurement_imports_nothing_from_the_folder_it_is_started_in(monkeypatch, tmp_path):
    (tmp_path / "json.py").write_text("raise ImportError('the folder of the user')")
    monkeypatch.chdir(tmp_path)
    assert runner._in_a_process("len(optimizers.MODES)") == 2


def test_figures_of_a_benchmark_that_breaks_off_are_kept(monkeypatch, tmp_path):
    figure = Measured("step", "Adam", "graph", BARE, 1.0, "s", None)

    def breaks_off(size):
        yield [figure]
        raise KeyboardInterrupt

    monkeypatch.setitem(runner.PARTS, "optimizer", breaks_off)
    text = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        runner.run(Console(file=text), TINY, ["optimizer"], tmp_path / "bench.json", tmp_path / "bench.png")
    assert "1.00 s" in text.getvalue()
    assert not (tmp_path / "bench.png").exists()  # one figure is compared with nothing
    assert json.loads((tmp_path / "bench.json").read_text())["results"] == [dataclasses.asdict(figure)]


@pytest.mark.slow
def test_figures_are_shown_written_and_drawn(tiny, tmp_path):
    text = io.StringIO()
    files = {"json_file": tmp_path / "bench.json", "picture": tmp_path / "bench.png"}
    results = runner.run(Console(file=text, width=200), tiny, ["optimizer"], **files)
    content = json.loads(files["json_file"].read_text())
    assert content["results"] == [dataclasses.asdict(result) for result in results]
    assert content["keras"] == keras.__version__
    assert files["picture"].read_bytes().startswith(b"\x89PNG")
    assert plt.get_fignums() == []
    assert f"keras: {keras.__version__}" in text.getvalue()
    assert all(result.case in text.getvalue() for result in results)


def test_header_says_which_way_each_optimizer_skips_under_xla():
    ways = runner.header()["under XLA, a step is skipped by"]
    assert (ways["Adam"], ways["AdamW"], ways["SGD"]) == ("gate", "gate", "gate")
    assert ways.get("MultiOptimizer", "branch") == "branch"
    assert LossScaleOptimizer.__name__ not in ways


@pytest.mark.parametrize("size", [runner.FULL, runner.QUICK])
def test_sizes_name_what_there_is(size):
    assert {*size.sets, *size.memory_sets, size.sampled} <= set(optimizer_step.SETS)
    assert set(size.inner) <= set(optimizer_step.INNER)
    assert set(size.modes) <= set(MODES)
