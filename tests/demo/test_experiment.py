import sys
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from conftest import without_replays
from rich.console import Console

import kmp
from kmp.demo import experiment, presentation
from kmp_cli import main


def test_digits_are_split_without_overlap_and_only_inputs_have_noise():
    train, test = experiment.load()
    assert len(train.labels) + len(test.labels) == 1797
    assert (train.clean.min(), train.clean.max()) == (0.0, 1.0)
    assert train.noisy.std() > train.clean.std()
    assert train.noisy.dtype == np.float32


def test_interrupt_and_missing_data_are_one_line_each(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo", "--out", str(tmp_path / "out")]) == 1
    assert not (tmp_path / "out").exists()
    assert (
        capsys.readouterr().err
        == "kmp: The demo's data set is part of scikit-learn: pip install 'kmp[demo]'\n"
    )
    monkeypatch.setattr(experiment, "load", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["demo", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "kmp: interrupted\n"


@pytest.mark.parametrize(
    ("policy", "mixed"),
    [
        *(
            (policy, ["float16 without loss scaling", "float16 with kmp"])
            for policy in ("mixed_float16", "float16")
        ),
        ("mixed_bfloat16", ["bfloat16 without loss scaling"]),
        ("float32", []),
    ],
)
def test_variants_depend_on_the_policy(policy, mixed):
    assert [variant.name for variant in experiment.variants(policy)] == ["float32", *mixed]


def result(accuracy):
    return experiment.Result(accuracy, 1.0, kmp.records.Run())


def explanation(policy, *accuracies):
    """Explains results with these accuracies of each variant."""
    variants = experiment.variants(policy)
    results = {each: [*map(result, pair)] for each, pair in zip(variants, accuracies, strict=True)}
    return " ".join(presentation.explanation(results))


def test_explanation_has_reasons_only_if_the_variants_differ_by_more_than_the_seeds():
    float32, with_kmp = (0.7, 0.8), (0.75, 0.8)
    assert "The reason: the loss is a mean" in explanation(
        "mixed_float16", float32, (0.2, 0.3), with_kmp
    )
    assert "no more than the seeds do" in explanation(
        "mixed_float16", float32, (0.7, 0.8), with_kmp
    )
    assert "differ" not in explanation("float32", float32)


@pytest.fixture
def shorter(monkeypatch, without_figures):
    """Trains with one seed, without the replays and the figures that take most of the time."""
    monkeypatch.setattr(experiment, "callbacks", SimpleNamespace(defaults=without_replays))
    monkeypatch.setattr(presentation, "SEEDS", (0,))


@pytest.mark.slow
@pytest.mark.usefixtures("shorter")
def test_demo_prints_what_float16_flushes_and_writes_logs_figures_and_a_report(tmp_path):
    out = tmp_path / "a folder with [red]brackets"
    console = Console(record=True, width=80)
    results = presentation.run(console, "mixed_float16", 40, out)
    float32, unscaled, with_kmp = (trained[0].zeros for trained in results.values())
    assert unscaled > float32 + 0.1
    assert abs(with_kmp - float32) < 0.02
    printed = console.export_text()
    assert "One model" in printed
    assert "The accuracy is 0." in printed
    assert "float16 flushes to zero" in " ".join(printed.split())
    assert f"tensorboard --logdir '{out}'" in printed
    assert max(len(line) for line in printed.splitlines() if str(out) not in line) <= 80
    assert "\u2026" not in printed  # no cell is truncated
    rows = [line for line in printed.splitlines() if line.startswith("\u2502")]
    assert rows
    assert all(line.rstrip().endswith("\u2502") for line in rows)
    folders = {"float32", "float16-without-loss-scaling", "float16-with-kmp"}
    files = {"gradient_exponents.png", "loss_scale.png", "report.html"}
    assert {path.name for path in out.iterdir()} == folders | files
    report = (out / "report.html").read_text()
    assert all(variant.name in report for variant in results)
    run = kmp.load_run(out / "float16-with-kmp" / "seed-0")
    assert run.series("loss_scale")[0][-1] == 40
    assert keras.config.dtype_policy().name == "float32"


@pytest.mark.slow
@pytest.mark.usefixtures("shorter")
def test_bfloat16_demo_runs_without_a_loss_scale(tmp_path, capsys):
    assert main(["demo", "--steps", "2", "--policy", "mixed_bfloat16", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "bfloat16" in printed
    assert "float16 flushes to zero" not in printed
