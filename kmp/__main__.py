"""The command line: `kmp`, or `python -m kmp`."""

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

import kmp
from kmp import _demo_report, policy


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    parsed = _parser().parse_args(arguments)
    console = Console()
    try:
        parsed.command(parsed, console)
    except (OSError, ImportError) as error:
        print(f"kmp: {error}", file=sys.stderr)
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
    demo.add_argument("--steps", type=_steps, default=240, help="training steps of each run (default: %(default)s)")
    demo.add_argument("--out", type=Path, help="folder for logs and pictures (default: runs/<time>)")
    demo.set_defaults(command=_demo)
    return parser


def _demo(parsed: argparse.Namespace, console: Console) -> None:
    out = parsed.out or Path("runs") / datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    _demo_report.run(console, parsed.dataset, parsed.policy, parsed.steps, out)


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, not {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
