"""Runs kmp on the programs of `benchmarks/float16_faults`, and applies the change it advises."""

import pytest
from conftest import exhaustive_unless
from float16_faults.running import is_named, outcome_of
from float16_faults.tools import Kmp
from float16_faults.truth import (
    BFLOAT16,
    FAULTS,
    FLOAT16,
    HEALTHY,
    ComputeInFloat32,
    is_sound,
)
from verdicts import VERDICTS

import kmp

# A program with a fault may get a warning of it.
pytestmark = pytest.mark.filterwarnings("ignore")

# The faults of bfloat16 that layers in float32 cure while the program runs: not a variable in
# bfloat16, which a repair does not create again.
REPAIRED = [
    name
    for name, fault in BFLOAT16.items()
    if isinstance(fault.cure[0], ComputeInFloat32) and name != "fault_bfloat16_counter"
]


def first_of_each_cause(names):
    return {FAULTS[name].cause: name for name in reversed(names)}.values()


# One training of each kind: own loops and steps, attention, recurrence, sums, each format.
SOME_HEALTHY = (
    "healthy_clipped_lstm",
    "healthy_custom_loop",
    "healthy_rezero_transformer",
    "healthy_sum_vae",
    "healthy_train_step",
    "healthy_bfloat16_batch_norm",
    "healthy_float32_attention",
)


def in_ci(chosen, names):
    """Marks the chosen programs as slow tests, and the others, which repeat them, as exhaustive.

    The tests of recorded runs diagnose all of them, without a training.
    """
    return exhaustive_unless(chosen, names, pytest.mark.slow)


class KmpWithoutRepair(Kmp):
    repairs = False


def assert_diagnosed_and_cured(outcome):
    fault, finding = FAULTS[outcome.program], outcome.findings[0]
    assert finding.cause == fault.cause, finding
    assert is_named(fault.place, finding.text), finding
    assert is_sound(outcome.cured_score, fault.sound), outcome
    # Nothing but kmp ends a training.
    assert all(each.text.startswith("StuckError: ") for each in outcome.findings[1:])


@pytest.mark.parametrize("name", in_ci(first_of_each_cause(FLOAT16), FLOAT16))
def test_fault_is_diagnosed_and_cured(name, tmp_path):
    outcome = outcome_of(name, KmpWithoutRepair, tmp_path)
    assert not is_sound(outcome.score, FLOAT16[name].sound), "the program has no fault"
    assert_diagnosed_and_cured(outcome)


@pytest.mark.parametrize("name", in_ci(first_of_each_cause(BFLOAT16), BFLOAT16))
def test_fault_of_bfloat16_is_diagnosed_cured_and_repaired(name, tmp_path):
    # Without a repair too, the score may be sound: kmp skips the steps with NaN.
    outcome = outcome_of(name, Kmp, tmp_path)
    assert_diagnosed_and_cured(outcome)
    if name in REPAIRED:
        run = kmp.load_run(tmp_path / "repaired" / "run")
        (layers,) = [row.fallback for row in run.rows if row.fallback]
        assert [path.rpartition("/")[2] for path in layers] == [BFLOAT16[name].place]
        assert is_sound(outcome.repaired_score, BFLOAT16[name].sound)


@pytest.mark.parametrize("name", in_ci(SOME_HEALTHY, HEALTHY))
def test_healthy_program_has_no_problem_and_no_repair(name, tmp_path):
    outcome = outcome_of(name, Kmp, tmp_path)
    assert outcome.findings == ()
    assert outcome.verdict.startswith(VERDICTS.get(name, "")), outcome.verdict
