"""The command line: `kmp`, or `python -m kmp`."""

import argparse
import dataclasses
import datetime
import importlib
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import keras
from rich.console import Console

import kmp
from kmp import _demo_report, _files, policy
from kmp._plan import MIXED


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    parsed = _parser().parse_args(arguments)
    console = Console()
    try:
        parsed.command(parsed, console)
    except (OSError, ImportError, _InputError) as error:
        print(f"kmp: {_in_words(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("kmp: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kmp", description="Mixed-precision training for Keras 3 on TensorFlow.")
    parser.add_argument("--version", action="version", version=f"kmp {kmp.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="train one model in float32, float16 and float16 with kmp, and compare")
    demo.add_argument("--dataset", choices=("digits", "cifar10"), default="digits", help="cifar10 is downloaded")
    demo.add_argument("--policy", choices=policy.POLICIES, default="mixed_float16", help="default: %(default)s")
    demo.add_argument("--steps", type=_positive, default=240, help="training steps of each run (default: %(default)s)")
    demo.add_argument("--out", type=Path, help="folder for logs and pictures (default: runs/<time>)")
    demo.set_defaults(command=_demo)
    report = commands.add_parser("report", help="tell what float16 costs a recorded run, or compare several")
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a log_dir, or the .jsonl file in it")
    report.add_argument(
        "--out", type=_html, help="the HTML file (default: report.html in RUN; of several, in this folder)"
    )
    report.set_defaults(command=_report)
    audit = commands.add_parser("audit", help="tell what float16 would mean for each layer of a saved model")
    audit.add_argument("file", type=Path, metavar="FILE", help="a .keras file")
    audit.add_argument("--policy", choices=MIXED, default=MIXED[0], help="default: %(default)s")
    audit.add_argument(
        "--import", action="append", default=[], dest="modules", metavar="MODULE", help="one with layers of your own"
    )
    audit.add_argument("--json", type=Path, metavar="FILE", help="write the audit to a JSON file")
    audit.set_defaults(command=_audit)
    bench = commands.add_parser("bench", help="measure what loss scaling, callbacks and precisions cost and gain here")
    bench.add_argument(
        "--quick", action="store_true", help="small models and few turns: some 3 minutes, not 30; no resnet, no bert"
    )
    bench.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="PART",
        help="optimizer, memory, training, precision, sampling, resnet, bert (the last two by default only on a GPU)",
    )
    bench.add_argument("--mode", choices=("graph", "XLA"), help="of memory, training, resnet and bert: only this one")
    bench.add_argument(
        "--batch", type=_positive, metavar="N", help="of resnet and bert (default: what fills a quarter of the GPU)"
    )
    bench.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a JSON file")
    bench.add_argument(
        "--picture", type=_picture, metavar="FILE", help="draw the ratios into a .png, .svg or .pdf file"
    )
    bench.set_defaults(command=_bench)
    return parser


def _demo(parsed: argparse.Namespace, console: Console) -> None:
    out = parsed.out or Path("runs") / datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    _demo_report.run(console, parsed.dataset, parsed.policy, parsed.steps, out)


def _bench(parsed: argparse.Namespace, console: Console) -> None:
    from kmp import _bench as bench
    from kmp._bench_clock import MeasurementError

    unknown = [name for name in parsed.only if name not in bench.PARTS]
    if unknown:
        raise _InputError(f"there is no part {unknown[0]!r} of the benchmark; there are {', '.join(bench.PARTS)}")
    size = bench.QUICK if parsed.quick else bench.FULL
    parts = list(dict.fromkeys(parsed.only)) or bench.parts_by_default(size)
    for option, takers in (("mode", bench.WITH_MODE), ("batch", bench.NETWORKS)):
        if getattr(parsed, option) and not set(takers) & set(parts):
            raise _InputError(f"--{option} is of {', '.join(takers)}, and none of them is measured")
    size = dataclasses.replace(size, batch=parsed.batch, modes=(parsed.mode,) if parsed.mode else size.modes)
    files = [path for path in (parsed.json, parsed.picture) if path]
    if len({path.resolve() for path in files}) < len(files):
        raise _InputError(f"--json and --picture are the same file, {parsed.json}")
    new = [path for path in files if not path.exists()]
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()  # before the minutes that measuring takes, not after them
    try:
        bench.run(console, size, parts, parsed.json, parsed.picture)
    except MeasurementError as error:
        raise _InputError(str(error)) from error
    finally:
        for path in new:
            if path.is_file() and not path.stat().st_size:
                path.unlink()


def _audit(parsed: argparse.Namespace, console: Console) -> None:
    try:
        if parsed.modules:
            sys.path.insert(0, "")  # as `python -m` has it: modules of one's own lie here
        for name in parsed.modules:
            importlib.import_module(name)
    except ImportError as error:
        raise _InputError(str(error)) from error
    if not parsed.file.is_file():
        raise _InputError(f"{parsed.file}: no such file")
    try:
        model = keras.models.load_model(parsed.file, compile=False)
    except (ValueError, TypeError, KeyError, OSError) as error:
        cause = re.search("Could not locate .*", str(error))  # Keras puts it at the end of many lines
        reason = textwrap.shorten(cause[0] if cause else str(error), 300, placeholder=" ...")
        raise _InputError(f"{parsed.file} cannot be loaded: {reason}") from error
    try:
        found = kmp.audit(model, policy=parsed.policy)
    except ValueError as error:
        raise _InputError(f"{parsed.file}: {error}") from error
    console.print(found)
    if parsed.json:
        _files.write_json(parsed.json, found.to_dict())


def _report(parsed: argparse.Namespace, console: Console) -> None:
    from kmp import report

    try:
        runs = report.load(parsed.runs)
    except ValueError as error:
        raise _InputError(str(error)) from error
    console.print(report.summary(runs))
    path = report.write(runs, parsed.out or _beside(parsed.runs) / "report.html")
    console.print(f"\nReport: {path}", markup=False, highlight=False, soft_wrap=True)


def _beside(runs: Sequence[Path]) -> Path:
    if len(runs) > 1:
        return Path()
    return runs[0] if runs[0].is_dir() else runs[0].parent


class _InputError(Exception):
    """A command cannot do what it was asked for."""


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _html(text: str) -> Path:
    if Path(text).suffix.lower() != ".html":
        raise argparse.ArgumentTypeError(f"must end in .html, not {text!r}")
    return Path(text)


def _picture(text: str) -> Path:
    if Path(text).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"must end in .png, .svg or .pdf, not {text!r}")
    return Path(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, not {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
