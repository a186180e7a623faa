"""Diagnoses each program, and applies the change that is advised."""

import pytest
from cases import CASES, HEALTHY, HELD_OUT
from programs import PROGRAMS
from running import is_cured, is_named, outcome_of, run_program
from truth import SUSPICIOUS, TRUTHS

import kmp

# A program with a fault may get a warning of it.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", CASES)
def test_fault_is_diagnosed_and_cured(name, tmp_path):
    case, outcome = CASES[name], outcome_of(name, tmp_path)
    assert not is_cured(outcome.score, case.sound), "the program has no fault"
    finding = outcome.advice.problems[0]
    assert finding.cause == case.cause, str(outcome.advice)
    assert is_named(case.at, finding), str(outcome.advice)
    assert is_cured(outcome.cured_score, case.sound), f"{outcome.cured_score} with {finding.change}"


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_program_has_no_problem(name, tmp_path):
    _, run = run_program(name, tmp_path / "program")
    advice = kmp.advise(run)
    assert run.last("fallback") is None
    assert advice.problems == (), str(advice)
    assert advice.verdict.startswith(HEALTHY[name]), advice.verdict


def test_every_program_is_listed():
    assert {*PROGRAMS} == {*CASES, *HEALTHY, *TRUTHS, *SUSPICIOUS}
    assert {*HELD_OUT} < {*CASES}
