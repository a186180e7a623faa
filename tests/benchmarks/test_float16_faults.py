import re
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tensorflow as tf
from float16_faults import Finding, Tool, scoring, tables
from float16_faults.__main__ import main
from float16_faults.programs import PROGRAMS
from float16_faults.running import is_named, outcome_of, source_of
from float16_faults.scoring import Results, Score, score_of_fault
from float16_faults.tools import TOOLS, CheckNumerics, tool_of
from float16_faults.truth import CAUSES, FAULTS, HEALTHY, Fault, is_sound

FAULT, SOUND = "fault_constant_average", "healthy_sparse_inputs"


class Silent(Tool):
    """Ends each training before it begins."""

    def callbacks(self):
        raise RuntimeError("no training")


def test_every_program_has_a_truth_and_every_category_a_program():
    assert {*PROGRAMS} == {*FAULTS, *HEALTHY}
    assert {fault.cause for fault in FAULTS.values()} == {*CAUSES}
    assert sum(fault.held_out for fault in FAULTS.values()) == 10


@pytest.mark.parametrize("name", FAULTS | HEALTHY)
def test_a_program_is_only_for_kmp_if_keras_has_no_form_of_it(name):
    if not (FAULTS | HEALTHY)[name].only_kmp:
        assert not re.search(r"kmp\.(?!guard\.$)\w+\(", source_of(name, uses_kmp=False))
        return
    with pytest.raises(ValueError, match="Keras"):
        source_of(name, uses_kmp=False)


def test_keras_form_has_the_settings_of_the_loss_scale():
    assert (
        "LossScaleOptimizer(keras.optimizers.Adam(learning_rate=0.01), initial_scale=2.0 ** 24"
        in (source_of("healthy_large_initial_scale", uses_kmp=False))
    )
    assert "auto_scale_loss=False" in source_of("fault_branch_underflow_churn", uses_kmp=False)


@pytest.mark.parametrize(
    ("place", "text", "is_there"),
    [
        ("learning_rate", "The learning rate of 3.0 is too large", True),
        ("project_3", "in functional_1/project_3/MatMul", True),
        ("project_3", "in functional_1/project_30/MatMul", False),
        ("y", "labels of y are 4", True),
        ("y", "any layer", False),
        ("", "anything", True),
    ],
)
def test_a_place_is_named_by_words_of_its_own(place, text, is_there):
    assert is_named(place, text) == is_there


def test_first_finding_is_scored():
    fault = Fault("constant", "norm", 0.9, "")
    wrong, right = Finding("weights"), Finding("layer norm", cause="constant")
    outcome = scoring.Outcome("", 0.2, (right, wrong), 0.86, 0.9)
    assert score_of_fault(fault, outcome, plain=0.2) == Score(1, 1, 1, 1, 1, 1, 1)
    assert score_of_fault(fault, outcome, plain=0.9).repaired == 0
    second = scoring.Outcome("", 0.2, (wrong, right), None, 0.2)
    assert score_of_fault(fault, second, plain=0.2) == Score(1, 1, 0, 1, 0, 0, 0)
    nothing = scoring.Outcome("", None, (), None, None)
    assert score_of_fault(fault, nothing) == Score(1, 0, 0, 1, 0, 0, 0)


def test_tolerance_of_a_negative_score_is_a_quarter():
    assert is_sound(-2.4, -2.0)
    assert not is_sound(-2.6, -2.0)
    assert not is_sound(float("nan"), 0.9)


def test_exception_out_of_a_training_is_a_finding(tmp_path):
    outcome = outcome_of(FAULT, Silent, tmp_path)
    assert outcome.findings == (Finding("RuntimeError: no training"),)
    assert outcome.score is None


def test_unknown_cause_is_an_error_that_lists_the_categories(tmp_path):
    class Other(Silent):
        def findings(self):
            return [Finding("it is bad", cause="bad")]

    with pytest.raises(ValueError, match=r"lost_updates.*Received: cause='bad'"):
        outcome_of(FAULT, Other, tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nosuch", "A tool is none, .*MODULE:NAME.*Received: nosuch"),
        ("nosuch:Tool", "Cannot import the tool nosuch:Tool: No module named 'nosuch'"),
        ("pathlib:Nosuch", "Cannot import the tool pathlib:Nosuch"),
        ("pathlib:Path", "A tool is a subclass of float16_faults.Tool. Received: pathlib:Path"),
    ],
)
def test_tool_that_is_none_is_an_error(name, message):
    with pytest.raises(ValueError, match=message):
        tool_of(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--tool"),
        (["--tool", "nosuch"], "MODULE:NAME"),
        (["--tool", "none", "--only", "nosuch*"], "no program matches 'nosuch*'"),
        (["--tool", "none", "--processes", "0"], "--processes must be at least 1"),
        (["--tool", "none", "--json", "nosuch/file"], "there is no folder nosuch"),
    ],
)
def test_wrong_option_is_an_error_before_a_training(options, message, capsys):
    with pytest.raises(SystemExit):
        main(options)
    assert message in capsys.readouterr().err


def test_check_numerics_is_switched_off_after_a_training(tmp_path):
    with (
        CheckNumerics("", tmp_path),
        pytest.raises(tf.errors.InvalidArgumentError, match="Detected"),
    ):
        tf.math.log(tf.constant([0.0]))
    assert np.isneginf(tf.math.log(tf.constant([0.0])))


def test_pages_have_the_stored_results():
    readme, page = (path.read_text(encoding="utf-8") for path in (tables.README, tables.PAGE))
    assert tables.readme(readme) == readme
    assert tables.page(page) == page


@pytest.mark.parametrize("tool", TOOLS)
def test_stored_results_are_of_all_programs_that_the_tool_can_run(tool):
    truth = FAULTS | HEALTHY
    expected = [name for name in truth if TOOLS[tool].uses_kmp or not truth[name].only_kmp]
    assert list(scoring.load(tool).outcomes) == expected


def run(tool, file):
    programs = [argument for name in (FAULT, SOUND) for argument in ("--only", name)]
    main(["--tool", tool, *programs, "--processes", "1", "--json", str(file)])
    return msgspec.json.decode(file.read_bytes(), type=Results).outcomes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        ("none", Score(1, 0, 0, 1, 0, 0, 0)),
        ("terminate_on_nan", Score(1, 1, 0, 1, 0, 0, 0)),
        ("check_numerics", Score(1, 1, 0, 1, 1, 0, 0)),
        ("kmp", Score(1, 1, 1, 1, 1, 1, 1)),
    ],
)
def test_tool_is_run_on_two_programs(tool, expected, tmp_path, capsys):
    outcomes = run(tool, tmp_path / "results.json")
    fault = FAULTS[FAULT]
    assert score_of_fault(fault, outcomes[FAULT], scoring.plain_scores()[FAULT]) == expected
    assert outcomes[SOUND].findings == ()
    printed = capsys.readouterr().out
    assert f"| {tool} | 1 | 0 |" in printed
    assert ("kmp was developed on these programs" in printed) == (tool == "kmp")


def test_results_of_some_programs_are_not_added_to_those_of_another_tool(tmp_path, capsys):
    file = tmp_path / "results.json"
    scoring.save(scoring.load("none"), file)
    with pytest.raises(SystemExit):
        main(["--tool", "kmp", "--only", SOUND, "--json", str(file)])
    assert "has the results of the tool none, not of kmp" in capsys.readouterr().err


@pytest.mark.slow
def test_results_of_some_programs_are_added_to_those_of_others(tmp_path):
    file = tmp_path / "results.json"
    before = scoring.load("none")
    changed = replace(before.outcomes[SOUND], score=-1.0)
    scoring.save(replace(before, outcomes=before.outcomes | {SOUND: changed}), file)
    main(["--tool", "none", "--only", SOUND, "--json", str(file)])
    outcomes = scoring.outcomes_in(file, "none")
    assert list(outcomes) == list(before.outcomes)
    assert outcomes[SOUND].score > 0


@pytest.mark.slow
def test_tool_of_the_readme_runs(tmp_path, monkeypatch):
    (code,) = re.findall(r"(?s)```python\n(.*?)```", tables.README.read_text(encoding="utf-8"))
    Path(tmp_path, "loss_watcher.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    outcomes = run("loss_watcher:LossWatcher", tmp_path / "results.json")
    assert outcomes[FAULT].findings == (Finding("The loss is not finite.", "forward_overflow"),)
    assert is_sound(outcomes[FAULT].cured_score, FAULTS[FAULT].sound)
    assert outcomes[SOUND].findings == ()
