"""`kmp.advise`: its arguments, its result and how that is printed."""

import copy
import pickle
import re
import runpy
from pathlib import Path

import keras
import msgspec
import numpy as np
import pytest
from built_runs import training
from conftest import without_replays

import kmp
from kmp.diagnosis import ERROR, SetArguments, names_of_causes
from kmp.records import Header, Record, Run


def test_advice_is_printed_with_evidence_and_the_line_to_change_and_can_be_copied():
    advice = kmp.advise(training(Record(step=50, last_loss=7e4, highest_loss=7e4)))
    (finding,) = advice
    assert (finding.cause, finding.severity, finding.tried) == (
        "exploding",
        ERROR,
        "not in a replay",
    )
    assert advice.problems == (finding,)
    assert str(advice).splitlines() == [
        advice.verdict,
        f"1. {finding.title}",
        f"  Evidence: {finding.evidence}",
        f"  Change: {finding.change}",
        "  Tried: not in a replay",
    ]
    for copied in (copy.copy(advice), copy.deepcopy(advice), pickle.loads(pickle.dumps(advice))):
        assert copied == advice
        assert str(copied) == str(advice)


def test_printed_findings_are_printable():
    edit = SetArguments("e\x1b", {"f": "1"})
    finding = kmp.advice.Finding("loss", ERROR, "a\x1bb", "c\u202ed", [edit], "h\u2028i")
    lines = [
        "g\\u200bh",
        "1. a\\x1bb",
        "  Evidence: c\\u202ed",
        "  Change: e\\x1b(f=1)",
        "  Note: h\\u2028i",
    ]
    assert str(kmp.advice.Advice([finding], "g\u200bh")).splitlines() == lines


def test_path_of_a_run_is_an_error_and_an_empty_run_has_a_verdict_and_no_finding():
    for function in (kmp.advise, kmp.what_if):
        with pytest.raises(
            TypeError, match=r"`run` must be a kmp.records.Run, such as kmp.load_run.*'runs/first'"
        ):
            function("runs/first")
    assert list(kmp.advise(Run())) == []
    assert kmp.advise(Run()).verdict.startswith("The run is empty")


def test_tiny_gradients_of_a_float32_layer_are_not_reported():
    dense = keras.layers.Dense
    with kmp.enable(loss_scale=1.0):
        inputs = keras.Input((4,))
        tiny = kmp.layers.Float32(dense(8))(inputs)
        model = keras.Model(inputs, [dense(1, dtype="float32")(dense(4)(inputs)), tiny])
        model.compile(
            keras.optimizers.SGD(0.0), ["mse", "mse"], loss_weights=[1.0, 1e-5], run_eagerly=True
        )
        callbacks = without_replays(every_n_steps=1)
        model.fit(
            np.ones((64, 4)), [np.ones((64, 1)), np.ones((64, 8))], callbacks=callbacks, verbose=0
        )
    run = callbacks[0].run
    assert len(run.settings.float32_variables) == 4
    assert list(kmp.advise(run)) == []
    settings = msgspec.structs.replace(run.settings, float32_variables=[])
    finding = kmp.advise(Run(run.rows, Header(settings=settings)))[0]
    assert (finding.cause, finding.location) == ("scale_too_small", "loss_scale")


def test_documented_causes_are_those_of_the_rules():
    page = Path(__file__).parents[2] / "docs" / "advice.md"
    text = page.read_text(encoding="utf-8")
    first_cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    described = [cause for cell in first_cells for cause in re.findall("`(.*?)`", cell)]
    assert sorted(described) == sorted([*names_of_causes()] * 2)  # what they are; what shows them
    script = runpy.run_path(str(page.parents[0] / "generate_causes.py"))
    assert script["generated"](text) == text, "run: python docs/generate_causes.py"
