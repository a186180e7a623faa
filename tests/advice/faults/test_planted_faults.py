"""Diagnoses each program, and applies the change that is advised."""

import pytest
from cases import CASES, HEALTHY, HELD_OUT
from programs import PROGRAMS
from running import is_cured, is_named, outcome_of, run_program
from truth import BFLOAT16, SUSPICIOUS, TRUTHS

import kmp
from kmp.advice import ComputeInFloat32

# A program with a fault may get a warning of it.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

# The faults of bfloat16 that layers in float32 cure while the program runs: not a variable in
# bfloat16, which a repair does not create again.
REPAIRED = [
    name
    for name, truth in BFLOAT16.items()
    if isinstance(truth.cure[0], ComputeInFloat32) and truth.predicate != "StaleStateIn16Bits"
]


def assert_diagnosed_and_cured(case, outcome):
    finding = outcome.advice.problems[0]
    assert finding.cause == case.cause, str(outcome.advice)
    assert is_named(case.at, finding), str(outcome.advice)
    assert is_cured(outcome.cured_score, case.sound), f"{outcome.cured_score} with {finding.change}"


@pytest.mark.parametrize("name", CASES)
def test_fault_is_diagnosed_and_cured(name, tmp_path):
    case, outcome = CASES[name], outcome_of(name, tmp_path)
    assert not is_cured(outcome.score, case.sound), "the program has no fault"
    assert_diagnosed_and_cured(case, outcome)


@pytest.mark.parametrize("name", BFLOAT16)
def test_fault_of_bfloat16_is_diagnosed_and_cured(name, tmp_path):
    # Without a repair too, the score may be sound: kmp skips the steps with NaN.
    assert_diagnosed_and_cured(BFLOAT16[name].case, outcome_of(name, tmp_path))


@pytest.mark.parametrize("name", REPAIRED)
def test_fault_of_bfloat16_is_repaired_while_the_program_runs(name, tmp_path):
    score, run = run_program(name, tmp_path / "program")
    (layers,) = [row["fallback"] for row in run.rows if "fallback" in row]
    assert [path.rpartition("/")[2] for path in layers] == [BFLOAT16[name].case.at]
    assert is_cured(score, BFLOAT16[name].case.sound)


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_program_has_no_problem(name, tmp_path):
    _, run = run_program(name, tmp_path / "program")
    advice = kmp.advise(run)
    assert run.last("fallback") is None
    assert advice.problems == (), str(advice)
    assert advice.verdict.startswith(HEALTHY[name]), advice.verdict


@pytest.mark.parametrize("name", SUSPICIOUS)
def test_healthy_program_in_another_format_has_no_problem(name, tmp_path):
    _, run = run_program(name, tmp_path / "program")
    assert run.last("fallback") is None
    assert kmp.advise(run).problems == ()


def test_every_program_is_listed():
    assert {*PROGRAMS} == {*CASES, *HEALTHY, *TRUTHS, *SUSPICIOUS}
    assert {*HELD_OUT} < {*CASES}
