"""Runs a tool on programs with a fault in 16-bit training, and on healthy ones."""

import argparse
import fnmatch
import os
import sys
from pathlib import Path

# TensorFlow reads these when it is imported. oneDNN's float16 rounds in other places, and is many
# times slower on newer CPUs.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

_EPILOG = """\
examples:
  python -m float16_faults --tool kmp
  python -m float16_faults --tool terminate_on_nan --only 'fault_constant*' --only 'healthy*'
  python -m float16_faults --tool my_module:MyTool --processes 8 --json mine.json

README.md in this folder says what a tool is.
"""


def main(arguments: list[str] | None = None) -> None:
    """Runs a tool, prints what it achieves, and writes it to a file."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.processes < 1:
        parser.error(f"--processes must be at least 1. Received: {options.processes}")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}")

    # After the arguments, because TensorFlow takes seconds.
    from float16_faults.all_programs import run_all
    from float16_faults.scoring import outcomes_in
    from float16_faults.tools import tool_of

    try:
        tool = tool_of(options.tool)
        programs = _selected(options.only)
        has_others = options.only and options.json
        others = outcomes_in(options.json, options.tool) if has_others else {}
    except ValueError as error:
        parser.error(str(error))
    run_all(
        options.tool,
        tool.uses_kmp,
        programs,
        options.processes,
        options.json,
        others,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m float16_faults",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--tool",
        required=True,
        help="kmp, terminate_on_nan, check_numerics, none, or MODULE:NAME, a class of your own",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="only the programs whose name matches, such as 'fault_bfloat16*'; may be repeated",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=2,
        metavar="N",
        help="how many programs run at a time (2)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="where to write the results; with --only, those of other programs stay",
    )
    return parser


def _selected(patterns: list[str]) -> list[str]:
    from float16_faults.truth import FAULTS, HEALTHY

    programs = [*FAULTS, *HEALTHY]
    if not patterns:
        return programs
    selected = set()
    for pattern in patterns:
        matching = fnmatch.filter(programs, pattern)
        if not matching:
            raise ValueError(
                f"--only: no program matches {pattern!r}. Their names begin with fault_ or"
                " healthy_, and stand in truth.py."
            )
        selected.update(matching)
    return [program for program in programs if program in selected]


if __name__ == "__main__":
    main(sys.argv[1:])
