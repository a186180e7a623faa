"""Prints what is known of the programs for bfloat16 and float32 beside what kmp finds.

Run with `python tests/advice/faults/measure.py`, and with the names of programs if not all are
wanted. With `--keras` it trains without kmp: in float32, as written, and with the known cure.
"""

import argparse
import os
import tempfile
import warnings
from pathlib import Path

# As in the tests: its 16-bit kernels round in other places.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

from programs import PROGRAMS
from running import run_program, scores_in_keras
from truth import SAVED_BY_SKIPPED_STEPS, SUSPICIOUS, TRUTHS

import kmp


def main() -> None:
    """Runs programs and prints a few lines of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="*", default=[*TRUTHS, *SUSPICIOUS])
    parser.add_argument("--keras", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # of the faults
    for name in arguments.programs:
        print(f"\n{name}: {PROGRAMS[name].__doc__.partition(chr(10))[0]}", flush=True)
        _print_truth(name)
        if arguments.keras:
            _print_scores(name)
        else:
            _print_findings(name)


def _print_truth(name: str) -> None:
    if name in TRUTHS:
        truth = TRUTHS[name]
        print(f"  truth: {truth.case.cause} at {truth.case.at!r} ({truth.predicate})")
        print(f"         {truth.reason}")
        print("  cure: ", *truth.cure, sep=" ")
        print(f"  known: {truth.scores}, sound from {truth.case.sound}")
        if name in SAVED_BY_SKIPPED_STEPS:
            print("         the score is as good if steps with NaN are skipped")
    else:
        print(f"  truth: no fault; {SUSPICIOUS[name]}")


def _print_scores(name: str) -> None:
    cure = TRUTHS[name].cure if name in TRUTHS else ()
    with tempfile.TemporaryDirectory() as folder:
        print(f"  keras: {scores_in_keras(name, Path(folder), cure)}", flush=True)


def _print_findings(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        score, run = run_program(name, Path(folder, "program"))
    print(f"  score: {score:.3g}")
    if run is None:
        print("  kmp recorded nothing")
        return
    repairs = [row["fallback"] for row in run.rows if "fallback" in row]
    print("  repairs:", repairs or "none")
    advice = kmp.advise(run)
    for finding in advice.findings:
        print(f"  found: {finding.severity} {finding.cause}: {finding.title} {finding.change}")
    print(f"  verdict: {advice.verdict}", flush=True)


if __name__ == "__main__":
    main()
