import math
import sys

import keras
import numpy as np
import pytest
from rich.console import Console

import kmp
from kmp_cli import main
from kmp_cli.demo import experiment, presentation
from kmp_cli.demo.explanation import explanation, warnings_of_repairs

LAYER = "digits/attention"


def test_digits_are_split_without_overlap_and_have_blank_columns():
    training, validation = experiment.load()
    assert (len(training.labels), len(validation.labels)) == (1437, 360)
    images = np.concatenate([training.images, validation.images])
    assert (images.dtype, images.shape, images.max()) == (np.float32, (1797, 8, 8), 1.0)
    assert len(np.unique(images, axis=0)) == len(images)
    assert (images == 0).all(-1).any()  # without them, the mask has no effect


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
        ("mixed_float16", ["float16 in Keras", "float16 with kmp"]),
        ("float16", ["float16 in Keras", "float16 with kmp"]),
        ("mixed_bfloat16", ["bfloat16 with kmp"]),
        ("float32", []),
    ],
)
def test_setups_depend_on_the_policy(policy, mixed):
    assert [setup.name for setup in experiment.setups(policy)] == ["float32", *mixed]


def result(accuracy, updates=8, loss=1.0, repaired_at=None, warnings=()):
    """Returns a result of 8 steps in an epoch; its network begins with an accuracy of 0.1."""
    rows = []
    if repaired_at is not None:
        rows.append(kmp.records.Record(step=repaired_at, fallback=[LAYER]))
    return experiment.Result(
        accuracies=[0.1, accuracy],
        losses=[loss],
        updates=updates,
        loss_scale=None,
        seconds=1.0,
        warnings=list(warnings),
        run=kmp.records.Run(rows),
    )


def explained(policy, *results):
    """Explains one result of each setup."""
    setups = experiment.setups(policy)
    pairs = zip(setups, results, strict=True)
    return list(explanation({setup: [each] for setup, each in pairs}))


def test_explanation_has_what_keras_skipped_and_what_kmp_repaired():
    fault, of_keras, of_kmp = explained(
        "mixed_float16",
        result(0.9),
        result(0.1, updates=0, loss=math.nan, warnings=["RuntimeWarning: overflow"]),
        result(0.8, updates=7, repaired_at=1),
    )
    assert "float16 ends at 65504" in fault
    assert of_keras == (
        "float16 in Keras: the loss is NaN, and Keras skips every step. The accuracy stays at"
        " 0.10: all outputs are NaN, and count as the digit 0. All that warns of it:"
        " RuntimeWarning: overflow."
    )
    assert of_kmp == (
        "float16 with kmp: in each run kmp sets 'attention' to float32, and trains on."
        " The accuracy is 0.80, and 0.90 in float32."
    )


def test_explanation_claims_nothing_that_was_not_measured():
    _, of_keras, of_kmp = explained("mixed_float16", result(0.9), result(0.7), result(0.8))
    assert of_keras == "float16 in Keras: the accuracy is 0.70."
    assert of_kmp.startswith("float16 with kmp: kmp repairs nothing. ")
    _, of_keras, _ = explained("float16", result(0.9), result(0.2, loss=math.nan), result(0.8))
    assert of_keras == "float16 in Keras: the loss is NaN. Nothing warns of it."


def test_explanation_of_bfloat16_names_neither_an_infinite_constant_nor_a_repair():
    fault, of_kmp = explained("mixed_bfloat16", result(0.9), result(0.9))
    assert "finite in bfloat16" in fault
    assert "65504" not in fault
    assert of_kmp.startswith("bfloat16 with kmp: kmp repairs nothing. ")
    [fault] = explained("float32", result(0.9))
    assert "float16" not in fault


def test_explanation_counts_the_repaired_runs():
    setups = experiment.setups("mixed_bfloat16")
    repaired = [result(0.9, repaired_at=1), result(0.1)]
    results = dict(zip(setups, ([result(0.9)] * 2, repaired), strict=True))
    *_, of_kmp = explanation(results)
    assert "in 1 of 2 runs kmp sets 'attention' to float32" in of_kmp


def test_warnings_of_repairs_are_shown_once_and_other_warnings_are_not():
    [setup] = experiment.setups("float32")
    repair = f"UserWarning: At step 1 kmp set the layer {LAYER!r} to float32."
    trained = result(0.9, repaired_at=1, warnings=["RuntimeWarning: overflow", repair])
    assert warnings_of_repairs({setup: [trained, trained]}) == [repair]
    assert warnings_of_repairs({setup: [result(0.9, warnings=[repair])]}) == []


@pytest.mark.exhaustive  # `.ci/run` runs the demo, and looks for its sentences and files
@pytest.mark.usefixtures("without_figures")
def test_demo_shows_a_run_that_keras_loses_and_that_kmp_repairs(tmp_path, capsys):
    out = tmp_path / "a folder with [red]brackets"
    console = Console(record=True, width=80)
    results = presentation.run(console, "mixed_float16", 90, out, seeds=[0])
    [float32], [of_keras], [of_kmp] = results.values()
    assert (float32.updates, of_keras.updates, of_kmp.updates) == (90, 0, 89)
    assert (float32.loss_scale, of_keras.loss_scale, of_kmp.loss_scale) == (None, 2.0**-75, 2**15)
    assert of_keras.run is None
    assert of_keras.accuracy == of_keras.accuracies[0]
    assert of_kmp.accuracy == pytest.approx(float32.accuracy, abs=0.1)
    assert of_kmp.accuracy > 2 * of_keras.accuracy
    assert of_kmp.repairs == [(1, [LAYER])]

    printed = console.export_text()
    assert "One network, 1 seed each" in printed
    assert f"UserWarning: At step 1 kmp set the layer '{LAYER}' to float32" in printed
    assert "\n  kmp.layers.Float32(ColumnAttention(..., name='attention'))\n" in printed
    assert "Warning" not in capsys.readouterr().err
    assert f"tensorboard --logdir '{out}'" in printed
    table = [line for line in printed.splitlines() if line.startswith("\u2502")]
    assert table
    assert all(line.rstrip().endswith("\u2502") and len(line) <= 80 for line in table)
    assert "\u2026" not in printed  # no cell is truncated

    folders = {"float32", "float16-with-kmp"}
    files = {"accuracy.png", "gradient_exponents.png", "report.html"}
    assert {path.name for path in out.iterdir()} == folders | files
    assert "float16 with kmp" in (out / "report.html").read_text()
    assert keras.config.dtype_policy().name == "float32"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "shown"),
    [
        ("mixed_bfloat16", "bfloat16 with kmp: kmp repairs nothing."),
        ("float32", "kmp's verdict on float32, seed 0: "),
    ],
)
@pytest.mark.usefixtures("without_figures")
def test_demo_of_other_policies_has_no_loss_scale_and_no_repair(policy, shown, tmp_path):
    console = Console(record=True, width=80)
    results = presentation.run(console, policy, 2, tmp_path, seeds=[0])
    trained = [result for [result] in results.values()]
    assert all((each.updates, each.loss_scale, each.repairs) == (2, None, []) for each in trained)
    printed = console.export_text()
    assert shown in printed
    assert "float16 ends" not in printed
    assert "Warning" not in printed
