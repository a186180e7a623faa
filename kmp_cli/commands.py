"""The sub-commands of `kmp` that need Keras and TensorFlow."""

import argparse
import datetime
import importlib
import re
import sys
import textwrap
import zipfile
from pathlib import Path

import keras
import tensorflow as tf
from rich.console import Console

import kmp
from kmp.policy import POLICIES
from kmp.records import FILE_NAME
from kmp.utils import atomic_files, printable, user_messages


class InputError(Exception):
    """A sub-command cannot do what its arguments ask for."""


def run(parsed: argparse.Namespace) -> int:
    """Runs a sub-command, prints an error in one line, and returns the exit status, which is then 1.

    Args:
        parsed: The parsed arguments. `command` is the name of the sub-command.
    """
    commands = {"demo": _demo, "bench": _bench, "audit": _audit, "report": _report}
    try:
        commands[parsed.command](parsed, Console(markup=False, highlight=False))
    except (OSError, ImportError, InputError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.strerror and error.filename:
            text = f"{error.filename}: {error.strerror}"
        print(f"kmp: {printable(text)}", file=sys.stderr)
        return 1
    return 0


def _demo(parsed: argparse.Namespace, console: Console) -> None:
    from kmp import demo

    if parsed.policy not in POLICIES:
        raise InputError(
            f"--policy must be one of {', '.join(POLICIES)}, received {parsed.policy!r}"
        )
    out = parsed.out or Path("runs") / datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    demo.run(console, parsed.policy, parsed.steps, out)


def _bench(parsed: argparse.Namespace, console: Console) -> None:
    from kmp import bench

    if parsed.batch and set(bench.parts_of(parsed.only, parsed.quick)) == {"precision"}:
        raise InputError("--batch applies only to resnet and bert: add --only resnet bert")
    try:
        comparisons = bench.measure(parsed.only, parsed.quick, parsed.mode, parsed.batch)
        bench.run(console, comparisons, parsed.json)
    except (
        bench.MeasurementError,
        tf.errors.OpError,
    ) as error:  # such as: the GPU's memory is in use
        raise InputError(user_messages.one_line(error)) from error


def _audit(parsed: argparse.Namespace, console: Console) -> None:
    if parsed.modules:
        sys.path.insert(
            0, ""
        )  # as `python -m` does: a console script cannot import from the current folder
    for name in parsed.modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # the module's code may raise anything
            cause = f"{type(error).__name__}: {user_messages.one_line(error)}"
            raise InputError(
                f"--import {name}: {cause}. Pass the name of a module, such as `my_layers`."
            ) from error
    if not parsed.file.is_file():
        raise InputError(f"{parsed.file}: no such file")
    if not zipfile.is_zipfile(parsed.file):  # Keras reports a corrupt file as one that is not found
        raise InputError(
            f"{parsed.file} is not a .keras file: it is not a zip archive, or a corrupt one"
        )
    try:
        model = keras.models.load_model(parsed.file, compile=False)
    except Exception as error:  # a corrupt archive may raise anything
        reason = str(error).rpartition("Exception encountered: ")[
            2
        ]  # it stands after the model's configuration
        shortened = textwrap.shorten(reason, 300, placeholder=" ...")
        raise InputError(f"{parsed.file} cannot be loaded: {shortened}") from error
    try:
        audit = kmp.audit(model, policy=parsed.policy)
    except (TypeError, ValueError) as error:  # such as: the file holds a layer
        raise InputError(f"{parsed.file}: {error}") from error
    if parsed.all:
        console.print(audit)
    else:
        console.print(audit.summary)
        console.print(
            f"All {len(audit.rows)} rows: kmp audit --all {printable(str(parsed.file))}",
            soft_wrap=True,
        )
    if parsed.json:
        parsed.json.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write_json(parsed.json, audit.to_dict())


def _report(parsed: argparse.Namespace, console: Console) -> None:
    from kmp import report

    paths: list[Path] = []
    for path in parsed.runs:
        if not path.is_dir() or (path / FILE_NAME).exists():
            paths.append(path)
            continue
        found = sorted(
            log.parent
            for log in path.rglob(FILE_NAME)
            if not re.fullmatch(r"earlier-\d+", log.parent.name)
        )
        if not found:
            raise InputError(
                f"{path}: no run in this folder: no {FILE_NAME} in it or in the folders below"
            )
        paths += found
    out = parsed.out
    if out is None:
        only = parsed.runs[0] if len(parsed.runs) == 1 else Path()
        out = (only if only.is_dir() else only.parent) / "report.html"
        if out.is_symlink():  # a folder from elsewhere may have one
            raise InputError(f"{out} is a link. Delete it, or pass the file to write: --out FILE")
    try:
        runs = report.load(paths)
    except ValueError as error:
        raise InputError(str(error)) from error
    console.print(report.summary(runs))
    console.print(f"\nReport: {printable(str(report.write(runs, out)))}", soft_wrap=True)
