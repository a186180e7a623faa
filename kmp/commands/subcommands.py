"""Runs the sub-commands of `kmp` and prints their errors."""

import argparse
import dataclasses
import datetime
import importlib
import json
import re
import sys
import textwrap
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
from rich.console import Console

from kmp import conversion
from kmp.records import FILE_NAME
from kmp.utils import atomic_files, printable, user_messages

_PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}


class InputError(Exception):
    """A sub-command cannot do what its arguments ask for."""


def run(parsed: argparse.Namespace) -> int:
    """Runs a sub-command and returns its exit status.

    Args:
        parsed: The parsed arguments. `command` is the name of the sub-command.

    Returns:
        0; 1 after an error, which is printed in one line; 130 after a keyboard interrupt.
    """
    try:
        _COMMANDS[parsed.command](parsed, Console())
    except (OSError, ImportError, InputError) as error:
        print(f"kmp: {printable(_message(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("kmp: interrupted", file=sys.stderr)
        return 130
    return 0


def _demo(parsed: argparse.Namespace, console: Console) -> None:
    from kmp import demo

    out = parsed.out or Path("runs") / datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    demo.run(console, parsed.dataset, parsed.policy, parsed.steps, out)


def _bench(parsed: argparse.Namespace, console: Console) -> None:
    from kmp import bench

    unknown = [name for name in parsed.only if name not in bench.PARTS]
    if unknown:
        raise InputError(f"--only: unknown part {unknown[0]!r}; choose from {', '.join(bench.PARTS)}")
    size = bench.QUICK if parsed.quick else bench.FULL
    parts = list(dict.fromkeys(parsed.only)) or bench.parts_by_default(size)
    for option, supported in (("mode", bench.WITH_MODE), ("batch", bench.NETWORKS)):
        if getattr(parsed, option) and not set(supported) & set(parts):
            raise InputError(
                f"--{option} applies only to {', '.join(supported)}; the parts to run are {', '.join(parts)}"
            )
    size = dataclasses.replace(size, batch=parsed.batch, modes=(parsed.mode,) if parsed.mode else size.modes)
    files = [path for path in (parsed.json, parsed.figure) if path]
    if len({path.resolve() for path in files}) < len(files):
        raise InputError(f"--json and --figure are the same file: {parsed.json}")
    new = [path for path in files if not path.exists()]
    try:
        for path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()  # a file that cannot be written fails now, not after minutes of measuring
        bench.run(console, size, parts, parsed.json, parsed.figure)
    except bench.MeasurementError as error:
        raise InputError(str(error)) from error
    finally:
        for path in new:
            if path.is_file() and not path.stat().st_size:
                path.unlink()


def _audit(parsed: argparse.Namespace, console: Console) -> None:
    try:
        if parsed.modules:
            sys.path.insert(0, "")  # as `python -m` does: a console script cannot import from the current folder
        for name in parsed.modules:
            _import_module(name)
    except ImportError as error:
        raise InputError(str(error)) from error
    if not parsed.file.is_file():
        raise InputError(f"{parsed.file}: no such file")
    _check_format(parsed.file)
    try:
        model = keras.models.load_model(parsed.file, compile=False)
    except Exception as error:  # a corrupt archive may raise anything
        cause = re.search("Could not locate .*", str(error))  # Keras writes it at the end of a message of many lines
        reason = textwrap.shorten(cause[0] if cause else str(error), 300, placeholder=" ...")
        raise InputError(f"{parsed.file} cannot be loaded: {reason}") from error
    try:
        audit = conversion.audit(model, policy=parsed.policy)
    except ValueError as error:
        raise InputError(f"{parsed.file}: {error}") from error
    if parsed.all:
        console.print(audit)
    else:
        console.print(audit.summary, markup=False, highlight=False)
        console.print(f"All {len(audit.rows)} rows: kmp audit --all {printable(str(parsed.file))}", **_PLAIN)
    if parsed.json:
        atomic_files.write_json(parsed.json, audit.to_dict())


def _import_module(name: str) -> None:
    if not all(part.isidentifier() for part in name.split(".")):
        raise InputError(f"--import: must be the name of a module, such as `my_layers`, received {name!r}")
    try:
        importlib.import_module(name)
    except ImportError:
        raise
    except Exception as error:  # the module's code may raise anything
        raise InputError(f"--import {name}: {type(error).__name__}: {user_messages.one_line(error)}") from error


def _check_format(path: Path) -> None:
    """Checks that a `.keras` file is an archive with a config: Keras reports another file as not found."""
    if path.suffix != ".keras":
        return
    try:
        with zipfile.ZipFile(path) as archive:
            json.loads(archive.read("config.json"))
    except KeyError as error:
        raise InputError(f"{path} is not a valid .keras file: it has no config.json") from error
    except ValueError as error:
        raise InputError(f"{path} is not a valid .keras file: its config.json is not JSON") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
        raise InputError(f"{path} is not a valid .keras file: it is not a zip archive, or a corrupt one") from error


def _report(parsed: argparse.Namespace, console: Console) -> None:
    from kmp import report

    paths = [log for path in parsed.runs for log in _logs_in(path)]
    out = parsed.out or _default_folder(parsed.runs) / "report.html"
    if parsed.out is None and out.is_symlink():  # a folder from elsewhere may have one
        raise InputError(f"{printable(str(out))} is a link. Delete it, or pass the file to write: --out FILE")
    try:
        runs = report.load(paths)
    except ValueError as error:
        raise InputError(str(error)) from error
    console.print(report.summary(runs))
    path = report.write(runs, out)
    console.print(f"\nReport: {printable(str(path))}", **_PLAIN)


def _logs_in(path: Path) -> list[Path]:
    """Returns the folders of the runs in a folder, or the path itself if it is a run."""
    if not path.is_dir() or (path / FILE_NAME).exists():
        return [path]
    found = sorted(log.parent for log in path.rglob(FILE_NAME) if not re.fullmatch(r"earlier-\d+", log.parent.name))
    if not found:
        raise InputError(f"{path}: no run in this folder: no {FILE_NAME} in it or in the folders below")
    return found


def _default_folder(runs: Sequence[Path]) -> Path:
    if len(runs) > 1:
        return Path()
    return runs[0] if runs[0].is_dir() else runs[0].parent


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


_COMMANDS: dict[str, Callable[[argparse.Namespace, Console], None]] = {
    "demo": _demo,
    "bench": _bench,
    "audit": _audit,
    "report": _report,
}
