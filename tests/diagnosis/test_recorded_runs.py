"""Diagnoses the recorded runs of programs in `benchmarks/float16_faults`, which takes seconds."""

import pytest
from float16_faults.running import is_named
from float16_faults.truth import FAULTS, FLOAT16, HEALTHY_BFLOAT16, HEALTHY_FLOAT16
from float16_faults.truth import HEALTHY as HEALTHY_PROGRAMS
from rare_programs import RARE
from recorded_runs import (
    HEALTHY,
    RARE_RUN,
    prefixes_of,
    recorded_runs,
    repairing_run,
    replay_lengths,
    unrepaired_run,
)
from verdicts import VERDICTS

from kmp.advice import advise
from kmp.diagnosis import (
    ERROR,
    WARNING,
    Cause,
    Observations,
    causes_of,
    cure_of,
    incurable_cause_of,
    thresholds,
)
from kmp.records import Record, load_run
from kmp.records.jsonl import to_line

# These lose time or a little accuracy; the others break the training.
WARNED = ("fault_float32_dead", "fault_scale_growth_of_wrap", "fault_targets_binary")


def layers_of_cure(run):
    cure = cure_of(Observations(run))
    return cure.layers if cure else ()


def repair_of(run):
    """Returns the number of records before a repair, and its layers; `None` without one."""
    for length, row in enumerate(run.rows):
        if row.fallback:
            return length, tuple(row.fallback)
    return None


def all_cures():
    """Returns the layers that `cure_of` finds on each prefix of each run."""
    return {
        name: [layers_of_cure(prefix) for prefix in prefixes_of(run)]
        for name, run in recorded_runs().items()
    }


@pytest.fixture(scope="module")
def cures():
    return all_cures()


@pytest.mark.parametrize("program", FAULTS)
def test_recorded_fault_has_its_cause_place_and_severity(program):
    fault, advice = FAULTS[program], advise(unrepaired_run(program))
    finding = advice.problems[0]
    assert finding.cause == fault.cause, str(advice)
    assert is_named(fault.place, f"{finding.title} {finding.change}"), str(advice)
    assert finding.severity == (WARNING if program in WARNED else ERROR)


@pytest.mark.parametrize("program", HEALTHY_PROGRAMS)
def test_recorded_healthy_run_has_no_problem(program):
    advice = advise(recorded_runs()[f"{program}{HEALTHY}"])
    assert advice.problems == (), str(advice)
    assert advice.verdict.startswith(VERDICTS.get(program, "")), advice.verdict


@pytest.mark.parametrize("program", RARE)
def test_recorded_rare_fault_has_its_cause(program):
    first = next(causes_of(Observations(recorded_runs()[f"{program}{RARE_RUN}"])))
    assert isinstance(first, RARE[program])
    assert first.severity == ERROR


def test_every_program_has_a_recorded_run_and_every_cause_a_program():
    programs = {name.partition(".")[0] for name in recorded_runs()}
    assert programs == {*FAULTS, *HEALTHY_PROGRAMS, *RARE}
    observed = map(Observations, recorded_runs().values())
    found = {type(cause) for run in observed for cause in causes_of(run)}
    assert found == {*Cause.__subclasses__()}


@pytest.mark.parametrize("program", FLOAT16)
def test_cure_is_found_at_the_replay_before_the_recorded_repair_and_nowhere_else(program, cures):
    run, found = repairing_run(program), cures[f"{program}.repair"]
    repair = repair_of(run)
    if repair is None:
        assert {*found} == {()}
        return
    length, layers = repair
    replayed = max(each for each in replay_lengths(run) if each <= length)
    assert found[length] == layers
    # A proof may need the counts of skipped steps that are recorded after the replay.
    assert {*found[replayed:length]} <= {(), layers}
    assert {*found[:replayed], *found[length + 1 :]} == {()}


@pytest.mark.parametrize("program", FLOAT16)
def test_run_without_repairs_has_the_cure_that_the_repair_made(program, cures):
    run = repairing_run(program)
    if unrepaired_run(program) is run:
        pytest.skip("the run is the same without repairs")
    repair = repair_of(run)
    expected = {repair[1]} if repair else set()
    assert {*cures[f"{program}.norepair"]} - {()} == expected


# A repair needs three that agree. Where the first steps are skipped, the comparisons begin later.
@pytest.mark.parametrize("program", HEALTHY_FLOAT16 | HEALTHY_BFLOAT16)
def test_recorded_healthy_run_has_more_comparisons_than_a_repair_needs(program):
    (first_step, _), *others = recorded_runs()[f"{program}{HEALTHY}"].comparisons
    assert len(others) >= (4 if first_step == 1 else thresholds.AGREEING_COMPARISONS)


@pytest.mark.parametrize("program", HEALTHY_PROGRAMS)
def test_no_prefix_of_a_healthy_run_has_a_cure_or_a_warning(program, cures):
    assert {*cures[f"{program}{HEALTHY}"]} == {()}
    prefixes = prefixes_of(recorded_runs()[f"{program}{HEALTHY}"])
    assert {*map(incurable_cause_of, map(Observations, prefixes))} == {None}


@pytest.mark.parametrize("name", recorded_runs())
def test_replays_are_the_same_after_they_are_written_and_loaded_again(name, tmp_path):
    run = recorded_runs()[name]
    lines = [to_line(Record(step=step, replay=replay)) for step, replay in run.replays]
    log = tmp_path / "kmp.jsonl"
    log.write_text(to_line(run.header) + "".join(lines), encoding="utf-8")
    assert "is_part_finite" not in log.read_text(encoding="utf-8")
    assert load_run(log).replays == run.replays
