"""`kmp doctor`: whether mixed precision works on this machine, and whether it makes training faster."""

import dataclasses
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kmp_cli import installation
from kmp_cli.installation import ERROR, INFO, OK, WARNING, Check

FASTER, BROKEN, WRONG_ARGUMENTS, NOT_FASTER, INTERRUPTED = 0, 1, 2, 3, 130  # exit statuses

_PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}
_MARKS = {OK: ("ok", "green"), INFO: ("-", "dim"), WARNING: ("!", "yellow"), ERROR: ("ERROR", "bold red")}


def run(json_file: Path | None = None) -> int:
    """Checks this machine, measures each precision, prints the results and returns the exit status.

    Args:
        json_file: File to write the results to; `-` prints them instead of all else. `None` for no file.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # what TensorFlow logs about GPUs is checked here
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # other programs may use the GPU's memory
    to_stdout = json_file is not None and str(json_file) == "-"
    file = None if to_stdout else json_file
    is_new = file is not None and not file.exists()
    try:
        if file:
            file.open("a").close()  # a file that cannot be written fails now, not after measuring
        results = _examine(Console(quiet=to_stdout))
        text = json.dumps(results, indent=1)
        if to_stdout:
            print(text)
        elif file:
            file.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        print(f"kmp: {json_file}: {error.strerror}", file=sys.stderr)
        return WRONG_ARGUMENTS
    except KeyboardInterrupt:
        print("kmp: interrupted", file=sys.stderr)
        if file and is_new:
            file.unlink(missing_ok=True)
        return INTERRUPTED
    return results["exit_status"]


def _examine(console: Console) -> dict[str, Any]:
    checks: list[Check] = []

    def add(*found: Check) -> None:
        for check in found:
            checks.append(check)
            _print(console, check)

    driver, driver_check = installation.nvidia_driver()
    extra = "cpu" if driver_check.status == INFO else "cuda"
    add(*installation.package_checks(extra))
    import_check = _import_check(extra)
    if import_check.status != OK:
        add(driver_check, import_check)
    else:
        from kmp_cli.gpu_checks import gpu_checks, without_errors_of_driver

        add(without_errors_of_driver(driver_check), import_check)
        try:
            for check in gpu_checks(driver):  # one at a time: a GPU may take minutes to start
                add(check)
        except Exception as error:  # TensorFlow may raise anything
            add(Check("GPU", ERROR, _text_of(error)))
    broken = [check for check in checks if check.status == ERROR]
    return _broken(console, checks, broken[0]) if broken else _measure(console, checks)


def _broken(console: Console, checks: list[Check], reason: Check) -> dict[str, Any]:
    separator = " " if reason.text.startswith("is ") else ": "
    verdict = f"Mixed precision does not work here: {reason.name}{separator}{reason.text.rstrip('.')}."
    console.print(f"\n{verdict}", style="bold", **_PLAIN)
    if reason.fix:
        console.print(f"Run: {reason.fix}", **_PLAIN)
    return _result(checks, BROKEN, verdict)


def _measure(console: Console, checks: list[Check]) -> dict[str, Any]:
    from kmp import bench, hardware

    console.print("\nMeasuring each precision ...", style="dim")
    measured: list[Any] = []
    try:
        for compared in bench.precision_comparison.measure():
            measured += compared
    except Exception as error:  # TensorFlow may raise anything
        fix = "nvidia-smi  # shows what else uses the GPU" if type(error).__name__ == "ResourceExhaustedError" else ""
        checks.append(Check("measurement", WARNING, f"incomplete: {_text_of(error)}", fix))
        _print(console, checks[-1])
    if measured:
        console.print(_table(measured))
    results = {"results": [dataclasses.asdict(result) for result in measured]}
    best = bench.precision_comparison.recommend(measured)
    if best is None:
        verdict = "The speed of mixed precision could not be measured here."
        console.print(f"\n{verdict}", style="bold", **_PLAIN)
        return _result(checks, BROKEN, verdict) | results
    status = NOT_FASTER if best.policy == "float32" else FASTER
    option = f"jit_compile={best.jit_compile}"
    if status == FASTER:
        verdict = (
            f"Mixed precision is {best.speedup:.2f} times as fast as float32 here: kmp.enable({best.policy!r}) and "
            f"model.compile(..., {option})."
        )
    else:
        verdict = f"Mixed precision works but is not faster than float32 here. Recommended: float32 with {option}."
    device = "the first GPU" if hardware().gpus else "the CPU, because TensorFlow sees no GPU"
    note = f"Measured on {device}, with one small model; the speed-up of yours may differ."
    console.print(f"\n{verdict}", style="bold", **_PLAIN)
    console.print(note, **_PLAIN)
    return _result(checks, status, verdict) | {"recommended": dataclasses.asdict(best)} | results


def _table(measured: Sequence[Any]) -> Table:
    """Returns a table with the throughput of float32, and the ratio to it of each other format."""
    formats = list(dict.fromkeys(result.variant for result in measured))
    table = Table("", "mode", formats[0], *(f"{name} \N{MULTIPLICATION SIGN}" for name in formats[1:]))
    for start in range(0, len(measured), len(formats)):
        first, *others = measured[start : start + len(formats)]
        ratios = (f"{result.ratio:.2f}" for result in others)
        table.add_row(first.case, first.mode, f"{first.value:,.0f} {first.unit}", *ratios)
    for column in table.columns[2:]:
        column.justify = "right"
    return table


def _result(checks: list[Check], status: int, verdict: str) -> dict[str, Any]:
    return {"checks": [dataclasses.asdict(check) for check in checks], "exit_status": status, "verdict": verdict}


def _import_check(extra: str) -> Check:
    """Imports kmp, and with it Keras and TensorFlow."""
    try:
        import kmp
    except Exception as error:  # a broken installation may raise anything
        text = textwrap.shorten(str(error), 400) if isinstance(error, ImportError) else _text_of(error)
        fix = "" if installation.tensorflow_packages() else installation.install_command(extra)
        if "KERAS_BACKEND" in text:
            fix = "export KERAS_BACKEND=tensorflow"
        return Check("import kmp", ERROR, text, fix)
    return Check("import kmp", OK, f"{Path(kmp.__file__).parent}")


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 300)}"


def _print(console: Console, check: Check) -> None:
    mark, style = _MARKS[check.status]
    console.print(f"{mark:>5}", style=style, end="  ")
    console.print(f"{check.name}: {check.text}", **_PLAIN)
    if check.fix:
        console.print(f"       {check.fix}", style="bold", **_PLAIN)
