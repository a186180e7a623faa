"""Runs a tool on programs in several processes, and prints a line for each."""

import datetime
import multiprocessing
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

import keras
import tensorflow as tf

from float16_faults.running import Outcome, outcome_of
from float16_faults.scoring import (
    PlainScores,
    Results,
    alarms_table_of,
    plain_scores,
    save,
    score_of_fault,
    table_of,
    warning_of,
)
from float16_faults.tools import tool_of
from float16_faults.truth import FAULTS, HEALTHY


def run_all(
    name: str,
    uses_kmp: bool,
    programs: Sequence[str],
    processes: int,
    file: Path | None,
    others: Mapping[str, Outcome],
) -> Results:
    """Runs a tool on programs, prints what it achieves, and returns it.

    Args:
        name: The name of the tool.
        uses_kmp: Whether it runs programs under kmp. If not, those that Keras cannot train are
            left out.
        programs: The names of the programs.
        processes: How many run at a time.
        file: Where to write the results, or `None`.
        others: The outcomes of other programs, which go to the file too.
    """
    truth = FAULTS | HEALTHY
    left_out = [each for each in programs if truth[each].only_kmp and not uses_kmp]
    if left_out:
        print(f"Left out, because they use what only kmp has: {', '.join(left_out)}\n")
    outcomes = _outcomes(name, [each for each in programs if each not in left_out], processes)
    results = Results(name, datetime.date.today().isoformat(), _versions(), outcomes)
    if file is not None:
        found = {**others, **outcomes}
        ordered = {each: found[each] for each in truth if each in found}
        save(replace(results, outcomes=ordered), file)
    _print_tables(results)
    return results


def _outcomes(name: str, programs: Sequence[str], processes: int) -> dict[str, Outcome]:
    """Returns outcomes in the order of the programs."""
    outcomes, plain = {}, plain_scores()
    # A fresh process for each program would cost more than the trainings. Threads of TensorFlow
    # forbid a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context) as pool:
        running = [pool.submit(_outcome, name, program) for program in programs]
        try:
            for done in as_completed(running):
                outcome = done.result()
                outcomes[outcome.program] = outcome
                print(_line_of(outcome, plain), flush=True)
        except BaseException:  # an error of the tool, or Ctrl-C: do not run the others first
            pool.shutdown(cancel_futures=True)
            raise
    return {program: outcomes[program] for program in programs}


def _outcome(name: str, program: str) -> Outcome:
    """Runs in another process."""
    warnings.simplefilter("ignore")  # of the faults
    tf.get_logger().setLevel("ERROR")  # AutoGraph cannot see the source of the programs
    with tempfile.TemporaryDirectory() as folder:
        try:
            return outcome_of(program, tool_of(name), Path(folder))
        except Exception as error:
            error.add_note(f"The tool {name} fails on the program {program}.")
            raise


def _line_of(outcome: Outcome, plain: PlainScores) -> str:
    program = outcome.program
    texts = [f"\n    {finding.text.partition(chr(10))[0]}" for finding in outcome.findings]
    if program in HEALTHY:
        result = "FALSE ALARM" if outcome.findings else "nothing found"
        return f"{program}: {result}{''.join(texts)}"
    fault = FAULTS[program]
    score = score_of_fault(fault, outcome, plain.get(program))
    right = ("found", "cause", "place", "cured", "repaired")
    achieved = [each for each in right if getattr(score, each)]
    numbers = [f"score {_number(outcome.score)}"]
    if outcome.cured_score is not None:
        numbers.append(f"{_number(outcome.cured_score)} with the change")
    if outcome.repaired_score != outcome.score:
        numbers.append(f"{_number(outcome.repaired_score)} with the repair")
    result = ", ".join(achieved) or "nothing"
    return f"{program}: {result}; {', '.join(numbers)}; sound from {fault.sound}{''.join(texts)}"


def _number(score: float | None) -> str:
    return "none" if score is None else f"{score:.3g}"


def _print_tables(results: Results) -> None:
    plain = plain_scores()
    print()
    print(table_of([results], plain))
    if not HEALTHY.keys().isdisjoint(results.outcomes):
        print()
        print(alarms_table_of([results]))
    if results.tool == "kmp":
        print()
        print(warning_of(results.outcomes, plain))


def _versions() -> dict[str, str]:
    return {"keras": keras.__version__, "tensorflow": tf.__version__}
