"""The sub-commands of `kmp` but `doctor`. Without TensorFlow, `report` works."""

import argparse
import datetime
import importlib
import re
import sys
import textwrap
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rich.console import Console

import kmp
from kmp.records.jsonl import FILE_NAME
from kmp.utils import atomic_files, user_messages
from kmp.utils.backend_check import require_tensorflow
from kmp.utils.names import printable

if TYPE_CHECKING:
    import keras


class InputError(Exception):
    """A sub-command cannot do what its arguments ask for."""


def run(parsed: argparse.Namespace) -> int:
    """Runs a sub-command and returns the exit status. An error is printed in one line.

    Args:
        parsed: The parsed arguments. `command` is the name of the sub-command.
    """
    if parsed.command != "report":
        require_tensorflow()
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
    from kmp.enabling.active_settings import POLICIES
    from kmp_cli import demo

    if parsed.policy not in POLICIES:
        raise InputError(
            f"--policy must be one of {', '.join(POLICIES)}, received {parsed.policy!r}"
        )
    out = parsed.out or Path("runs") / datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    demo.run(console, parsed.policy, parsed.steps, out)


def _bench(parsed: argparse.Namespace, console: Console) -> None:
    import tensorflow as tf

    from kmp_bench import MeasurementError, precision, results

    results.share_gpu()
    if parsed.model:
        _bench_model(parsed, console)
        return
    if parsed.modules:
        raise InputError("--import applies only to a MODEL")
    if parsed.batch and set(precision.parts_of(parsed.only, parsed.quick)) == {"precision"}:
        raise InputError("--batch applies only to resnet and bert: add --only resnet bert")
    try:
        comparisons = precision.measure(parsed.only, parsed.quick, parsed.batch)
        results.run(console, comparisons, parsed.json)
    except (MeasurementError, tf.errors.OpError) as error:
        # Such as: the GPU's memory is in use.
        raise InputError(user_messages.one_line(error)) from error


def _bench_model(parsed: argparse.Namespace, console: Console) -> None:
    from kmp_bench import MeasurementError, StepComparison, compare, results

    if parsed.only:
        raise InputError("--only applies only without a MODEL")
    _import_modules(parsed.modules)
    model: keras.Model | Callable[[], Any]
    is_function = re.fullmatch(r"[\w.]+:\w+", parsed.model) is not None
    if is_function:
        if parsed.batch:
            raise InputError(
                "--batch applies only to a .keras file: the function returns the batch"
            )
        model = _function(*parsed.model.split(":"))
    elif not Path(parsed.model).exists():
        raise InputError(f"{parsed.model}: neither a .keras file nor MODULE:FUNCTION")
    else:
        model = _load_model(Path(parsed.model), is_compiled=True)
    steps, rounds = (5, 2) if parsed.quick else (20, 5)

    def measure() -> StepComparison:
        return compare(model, batch_size=parsed.batch, steps=steps, rounds=rounds)

    try:
        results.run_model(console, measure, parsed.json)
    except Exception as error:  # the user's function and model may raise anything
        is_of_kmp = isinstance(error, TypeError | ValueError | MeasurementError)
        start = "" if is_of_kmp else f"{type(error).__name__}: "
        raise InputError(f"{parsed.model}: {start}{user_messages.one_line(error)}") from error


def _function(module: str, name: str) -> Callable[[], Any]:
    """Returns a function of a module of the user."""
    function = getattr(_imported(module, f"{module}:{name}"), name, None)
    if not callable(function):
        raise InputError(f"{module}:{name}: the module has no function {name!r}")
    return function


def _audit(parsed: argparse.Namespace, console: Console) -> None:
    _import_modules(parsed.modules)
    model = _load_model(parsed.file)
    try:
        audit = kmp.audit(model, policy=parsed.policy)
    except (TypeError, ValueError) as error:  # such as: the file holds a layer
        raise InputError(f"{parsed.file}: {error}") from error
    if parsed.all:
        console.print(audit)
    else:
        console.print(audit.summary)
        command = f"kmp audit --all {printable(str(parsed.file))}"
        console.print(f"All {len(audit.rows)} rows: {command}", soft_wrap=True)
    if parsed.json:
        parsed.json.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write_json(parsed.json, audit.to_dict())


def _import_modules(names: Sequence[str]) -> None:
    for name in names:
        _imported(name, f"--import {name}")


def _imported(name: str, argument: str) -> ModuleType:
    """Returns a module of the user, for an argument of the command."""
    if "" not in sys.path:
        # As `python -m` does: a console script cannot import from the current folder.
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except Exception as error:  # the module's code may raise anything
        cause = f"{type(error).__name__}: {user_messages.one_line(error)}"
        raise InputError(
            f"{argument}: {cause}. Pass the name of a module, such as `my_layers`."
        ) from error


def _load_model(file: Path, is_compiled: bool = False) -> "keras.Model":
    import keras

    if not file.is_file():
        raise InputError(f"{file}: no such file")
    if not zipfile.is_zipfile(file):  # Keras reports a corrupt file as one that is not found
        raise InputError(f"{file} is not a .keras file: it is not a zip archive, or a corrupt one")
    try:
        with warnings.catch_warnings():  # of the state of an optimizer that has not trained
            warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
            return keras.models.load_model(file, compile=is_compiled)
    except Exception as error:  # a corrupt archive may raise anything
        # The reason stands after the model's configuration.
        _, _, reason = str(error).rpartition("Exception encountered: ")
        shortened = textwrap.shorten(reason, 300, placeholder=" ...")
        raise InputError(f"{file} cannot be loaded: {shortened}") from error


def _report(parsed: argparse.Namespace, console: Console) -> None:
    from kmp.report import load
    from kmp.report.page import check_target, write_summaries
    from kmp.report.run_summary import summaries
    from kmp.report.terminal import summary_of

    paths = [log for path in parsed.runs for log in _logs_in(path)]
    out = parsed.out or _default_report(parsed.runs)
    check_target(out, "--out FILE")
    try:
        runs = load(paths)
    except ValueError as error:
        raise InputError(str(error)) from error
    found = summaries(runs)
    console.print(summary_of(found))
    console.print(f"\nReport: {printable(str(write_summaries(found, out)))}", soft_wrap=True)


def _logs_in(path: Path) -> list[Path]:
    """Returns the `log_dir`s of the runs in a folder; of a run, the path itself."""
    if not path.is_dir() or (path / FILE_NAME).exists():
        return [path]
    folders = [log.parent for log in path.rglob(FILE_NAME)]
    found = [folder for folder in folders if not re.fullmatch(r"earlier-\d+", folder.name)]
    if not found:
        raise InputError(
            f"{path}: no run in this folder: no {FILE_NAME} in it or in the folders below"
        )
    return sorted(found)


def _default_report(runs: Sequence[Path]) -> Path:
    only = runs[0] if len(runs) == 1 else Path()
    folder = only if only.is_dir() else only.parent
    file = folder / "report.html"
    if file.is_symlink():  # a folder from elsewhere may have one
        raise InputError(f"{file} is a link. Delete it, or pass the file to write: --out FILE")
    return file
