"""The arguments of the `kmp` command."""

import argparse
import difflib
import importlib.metadata
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

POLICIES = ("mixed_float16", "mixed_bfloat16", "float32", "float16")  # as in `kmp.enable`
CONVERSION_POLICIES = ("mixed_float16", "mixed_bfloat16", "float16", "bfloat16")  # as in `kmp.convert`


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `kmp` and returns its exit status.

    Args:
        arguments: Command-line arguments without the program name; `sys.argv[1:]` if `None`.
    """
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if parsed.command is None:
        parser.print_help()
        return 0
    if parsed.command == "demo":  # oneDNN, on by default on newer CPUs, is many times slower in float16
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    if parsed.command == "doctor":  # also where kmp cannot be imported
        from kmp_cli import doctor

        return doctor.run(parsed.json)
    try:
        from kmp import commands
    except ImportError as error:  # TensorFlow is missing, or Keras is set to another backend
        print(f"kmp: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("kmp: interrupted", file=sys.stderr)
        return 130
    return commands.run(parsed)


class _Parser(argparse.ArgumentParser):
    """Suggests the closest command, option or choice for a mistyped one."""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
        parsed, unknown = super().parse_known_args(*args, **kwargs)
        if unknown:  # reported by the parser of the sub-command, which knows its options
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '(.+?)' \(choose from (.+)\)", message)
        option = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        known = re.findall(r"[\w-]+", choice[2]) if choice else re.findall(r"--[\w-]+", self.format_usage())
        mistyped = choice or option
        closest = difflib.get_close_matches(mistyped[1], known, 1) if mistyped else []
        super().error(message + "".join(f". Did you mean {name!r}?" for name in closest))


def _version() -> str:
    try:
        return importlib.metadata.version("kmp")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="kmp", description="Mixed-precision training for Keras 3 on TensorFlow.")
    parser.add_argument("--version", action="version", version=f"kmp {_version()}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(metavar="COMMAND")
    demo = commands.add_parser("demo", help="compare float32, float16, and float16 with kmp on one model")
    demo.add_argument(
        "--dataset", choices=("digits", "cifar10"), default="digits", help="default: %(default)s; cifar10 is downloaded"
    )
    demo.add_argument("--policy", choices=POLICIES, default="mixed_float16", help="default: %(default)s")
    demo.add_argument("--steps", type=_positive, default=240, help="training steps of each run (default: %(default)s)")
    demo.add_argument("--out", type=Path, help="folder for logs, figures and the report (default: runs/<time>)")
    demo.set_defaults(command="demo")
    doctor = commands.add_parser(
        "doctor",
        help="check whether mixed precision works on this machine, and makes training faster",
        epilog="Takes less than a minute. Exit status: 0: works, and is faster; 1: does not work; 3: works, but is not "
        "faster here.",
    )
    doctor.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the results to a JSON file; - prints nothing else"
    )
    doctor.set_defaults(command="doctor")
    report = commands.add_parser(
        "report", help="show the overflows and flushed gradients of a recorded run, or compare runs"
    )
    report.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="log_dir of a run, the .jsonl file in it, or a folder with the log_dirs of several runs",
    )
    report.add_argument(
        "--out", type=_html, help="HTML file (default: report.html in RUN, or in the current folder for several runs)"
    )
    report.set_defaults(command="report")
    audit = commands.add_parser("audit", help="show the dtypes and the float16 risks of each layer of a saved model")
    audit.add_argument("file", type=Path, metavar="FILE", help="a .keras file")
    audit.add_argument(
        "--policy", choices=CONVERSION_POLICIES, default=CONVERSION_POLICIES[0], help="default: %(default)s"
    )
    audit.add_argument(
        "--import",
        action="append",
        default=[],
        dest="modules",
        metavar="MODULE",
        help="module that defines custom layers of the model; it is imported, which runs its code (repeatable)",
    )
    audit.add_argument("--all", action="store_true", help="show the table of all layers, not only a summary")
    audit.add_argument("--json", type=Path, metavar="FILE", help="also write the audit to a JSON file")
    audit.set_defaults(command="audit")
    bench = commands.add_parser(
        "bench", help="measure the cost of loss scaling and the speed of each precision on this machine"
    )
    bench.add_argument(
        "--quick",
        action="store_true",
        help="smaller models, fewer rounds, resnet and bert only with --only: about 3 minutes instead of hours",
    )
    bench.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="PART",
        help="optimizer, memory, operations, fit, precision, sampling, replay, growth, resnet, bert (default: all; the "
        "last two on a GPU)",
    )
    bench.add_argument("--mode", choices=("graph", "XLA"), help="run memory, fit, resnet and bert in this mode only")
    bench.add_argument(
        "--batch",
        type=_positive,
        metavar="N",
        help="batch size of resnet and bert (default: fills a quarter of the GPU)",
    )
    bench.add_argument("--json", type=Path, metavar="FILE", help="write the results to a JSON file")
    bench.add_argument("--figure", type=_figure, metavar="FILE", help="draw the ratios into a .png, .svg or .pdf file")
    bench.set_defaults(command="bench")
    return parser


def _html(text: str) -> Path:
    if Path(text).suffix.lower() != ".html":
        raise argparse.ArgumentTypeError(f"must end in .html, received {text!r}")
    return Path(text)


def _figure(text: str) -> Path:
    if Path(text).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"must end in .png, .svg or .pdf, received {text!r}")
    return Path(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, received {text!r}")
    return int(text)
