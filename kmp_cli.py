"""The `kmp` command, beside the package: its arguments are parsed before anything imports Keras and TensorFlow."""

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path

POLICIES = ("mixed_float16", "mixed_bfloat16", "float32", "float16")  # as in `kmp.enable`
MIXED = ("mixed_float16", "mixed_bfloat16", "float16", "bfloat16")  # as in `kmp.convert`


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        from kmp import cli
    except ImportError as error:  # TensorFlow is missing, or Keras is set to another backend
        print(f"kmp: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("kmp: interrupted", file=sys.stderr)
        return 130
    return cli.run(parsed)


def _version() -> str:
    try:
        return importlib.metadata.version("kmp")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kmp", description="Mixed-precision training for Keras 3 on TensorFlow.")
    parser.add_argument("--version", action="version", version=f"kmp {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="train one model in float32, float16 and float16 with kmp, and compare")
    demo.add_argument("--dataset", choices=("digits", "cifar10"), default="digits", help="cifar10 is downloaded")
    demo.add_argument("--policy", choices=POLICIES, default="mixed_float16", help="default: %(default)s")
    demo.add_argument("--steps", type=_positive, default=240, help="training steps of each run (default: %(default)s)")
    demo.add_argument("--out", type=Path, help="folder for logs and pictures (default: runs/<time>)")
    demo.set_defaults(command="demo")
    report = commands.add_parser("report", help="tell what float16 costs a recorded run, or compare several")
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a log_dir, or the .jsonl file in it")
    report.add_argument(
        "--out", type=_html, help="the HTML file (default: report.html in RUN; of several, in this folder)"
    )
    report.set_defaults(command="report")
    audit = commands.add_parser("audit", help="tell what float16 would mean for each layer of a saved model")
    audit.add_argument("file", type=Path, metavar="FILE", help="a .keras file")
    audit.add_argument("--policy", choices=MIXED, default=MIXED[0], help="default: %(default)s")
    audit.add_argument(
        "--import", action="append", default=[], dest="modules", metavar="MODULE", help="one with layers of your own"
    )
    audit.add_argument("--json", type=Path, metavar="FILE", help="write the audit to a JSON file")
    audit.set_defaults(command="audit")
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
    bench.add_argument("--figure", type=_figure, metavar="FILE", help="draw the ratios into a .png, .svg or .pdf file")
    bench.set_defaults(command="bench")
    return parser


def _html(text: str) -> Path:
    if Path(text).suffix.lower() != ".html":
        raise argparse.ArgumentTypeError(f"must end in .html, not {text!r}")
    return Path(text)


def _figure(text: str) -> Path:
    if Path(text).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"must end in .png, .svg or .pdf, not {text!r}")
    return Path(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, not {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
