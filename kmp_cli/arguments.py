"""The arguments of the `kmp` command."""

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `kmp` and returns its exit status.

    Args:
        arguments: Command-line arguments without the program name; `sys.argv[1:]` if `None`.
    """
    try:
        parser = _parser()
        parsed = parser.parse_args(arguments)
        if parsed.command is None:
            parser.print_help()
            return 0
        if parsed.command == "demo":
            # oneDNN, on by default on newer CPUs, is many times slower in float16.
            os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
        if parsed.command == "doctor":  # also where kmp cannot be imported
            from kmp_cli import doctor

            return doctor.run(parsed.json)
        from kmp_cli import commands

        return commands.run(parsed)
    except (ImportError, OSError) as error:
        # Such as: kmp or TensorFlow is not installed, Keras has another backend.
        print(f"kmp: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("kmp: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kmp", description="Mixed-precision training for Keras 3 on TensorFlow."
    )
    parser.add_argument(
        "--version", action="version", version=f"kmp {importlib.metadata.version('kmp')}"
    )
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")

    demo = commands.add_parser(
        "demo",
        help="compare float32, float16, and float16 with kmp on a network that float16 breaks",
    )
    demo.add_argument(
        "--steps",
        type=_positive,
        default=360,
        help="training steps of each run (default: %(default)s)",
    )
    demo.add_argument(
        "--out",
        type=_path,
        metavar="FOLDER",
        help="a new or empty folder for logs, figures and the report (default: runs/<time>)",
    )

    doctor = commands.add_parser(
        "doctor",
        help="check whether mixed precision works on this machine, and makes training faster",
        epilog=(
            "Takes up to a minute on a CPU, two to three on a GPU. Exit status: 0: works, and is"
            " faster; 1: does not work; 3: works, but is not faster here."
        ),
    )
    doctor.add_argument(
        "--json",
        type=_file_to_write(".json", "-"),
        metavar="FILE",
        help="also write the results to a JSON file; - prints nothing else",
    )

    report = commands.add_parser(
        "report", help="show what is wrong with a recorded run in any precision, or compare runs"
    )
    report.add_argument(
        "runs",
        type=_path,
        nargs="+",
        metavar="RUN",
        help=(
            "log_dir of a run, the .jsonl file in it, or a folder with the log_dirs of several runs"
        ),
    )
    report.add_argument(
        "--out",
        type=_file_to_write(".html"),
        metavar="FILE",
        help=(
            "HTML file; one that exists is replaced only if it is a report of kmp (default:"
            " report.html in RUN, or in the current folder for several runs)"
        ),
    )

    audit = commands.add_parser(
        "audit",
        help="show the dtypes of each layer of a saved model, and what is at risk in 16 bits",
    )
    audit.add_argument("file", type=_path, metavar="FILE", help="a .keras file")
    audit.add_argument(
        "--all", action="store_true", help="show the table of all layers, not only a summary"
    )

    bench = commands.add_parser(
        "bench", help="measure what each precision gains: for a model, or on this machine"
    )
    bench.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=(
            "a .keras file of a compiled model; or MODULE:FUNCTION, a function that returns a"
            " compiled model and a batch, such as (x, y) or a tf.data.Dataset (default: models of"
            " kmp)"
        ),
    )
    bench.add_argument(
        "--quick", action="store_true", help="fewer steps and rounds, for a rough answer"
    )
    bench.add_argument(
        "--only",
        nargs="+",
        choices=("precision", "resnet", "bert"),
        default=[],
        metavar="PART",
        help=(
            "without MODEL: precision: operations and small models; resnet, bert: large networks"
            " (default: all on a GPU, else precision)"
        ),
    )
    bench.add_argument(
        "--batch",
        type=_positive,
        metavar="N",
        help="batch size for a .keras file (32), or of resnet and bert (64 and 32; 8 on a CPU)",
    )

    for command in (audit, bench):
        command.add_argument(
            "--import",
            action="append",
            default=[],
            dest="modules",
            metavar="MODULE",
            help=(
                "module that defines custom layers of the model; it is imported, which runs its"
                " code (repeatable)"
            ),
        )
    text = "as in `kmp.enable` (default: %(default)s)"
    demo.add_argument("--policy", default="mixed_float16", help=text)
    text = "as in `kmp.convert` (default: mixed_bfloat16 for a model in it, else mixed_float16)"
    audit.add_argument("--policy", help=text)
    for command, content in ((audit, "audit"), (bench, "results")):
        text = f"also write the {content} to a JSON file"
        command.add_argument("--json", type=_file_to_write(".json"), metavar="FILE", help=text)
    return parser


def _path(text: str) -> Path:
    """Returns a path; "" is an error, because `Path` takes it as the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("must be a path, received ''")
    return Path(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, received {text!r}")
    return int(text)


def _file_to_write(*endings: str) -> Callable[[str], Path]:
    """Returns the type of an argument: a file with one of the endings, which may contain `-`.

    A file that cannot be written is an error before minutes of measuring, and a wrong ending before
    a model or log is overwritten.
    """

    def file_to_write(text: str) -> Path:
        path = Path(text)
        if text == "-" and "-" in endings:
            return path
        if path.suffix.lower() not in endings:
            expected = " or ".join(endings)
            raise argparse.ArgumentTypeError(f"must end in {expected}, received {text!r}")
        if not _can_be_written(path):
            raise argparse.ArgumentTypeError(f"cannot be written, received {text!r}")
        return path

    return file_to_write


def _can_be_written(path: Path) -> bool:
    """Whether a file exists and can be written, or can be created with its missing folders."""
    try:
        existing = next(found for found in (path, *path.absolute().parents) if _exists(found))
        is_folder, is_path = existing.is_dir(), existing == path
    except OSError:  # a name that is too long, or below a folder without permission
        return False
    return is_folder != is_path and os.access(existing, os.W_OK)


def _exists(path: Path) -> bool:
    """Returns whether a file or folder exists; raises the errors that `exists` of 3.14 hides."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
