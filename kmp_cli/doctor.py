"""`kmp doctor`: whether mixed precision works on this machine, and whether it makes training faster."""

import dataclasses
import json
import os
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kmp_cli.installation import (
    ERROR,
    INFO,
    OK,
    WARNING,
    Check,
    driver_check,
    library_check,
    package_checks,
    tensorflow_packages,
)

FASTER, BROKEN, NOT_FASTER = 0, 1, 3  # exit statuses; 2 is that of wrong arguments

_MARKS = {OK: ("ok", "green"), INFO: ("-", "dim"), WARNING: ("!", "yellow"), ERROR: ("ERROR", "bold red")}
_LOG = "python -c \"import tensorflow as tf; tf.config.list_physical_devices('GPU')\"  # logs TensorFlow's reason"


def run(json_file: Path | None = None) -> int:
    """Checks this machine, measures each precision, prints the results and returns the exit status.

    Args:
        json_file: File to write the results to; `-` prints them instead of all else. `None` for no file.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # what TensorFlow logs about GPUs is checked here
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # other programs may use the GPU's memory
    to_stdout = json_file == Path("-")
    console = Console(quiet=to_stdout, markup=False, highlight=False, soft_wrap=True)
    checks: list[Check] = []
    for check in _checks():  # one at a time: a GPU may take minutes to start
        checks.append(check)
        _print(console, check)
    broken = next((check for check in checks if check.status == ERROR), None)
    if broken is None:
        results = _measure(console, checks)
    else:
        separator = " " if broken.text.startswith("is ") else ": "
        verdict = f"Mixed precision does not work here: {broken.name}{separator}{broken.text.rstrip('.')}."
        results = {"exit_status": BROKEN, "verdict": verdict}
    console.print(f"\n{results['verdict']}", style="bold")
    if broken and broken.fix:
        console.print(f"Run: {broken.fix}")
    text = json.dumps({"checks": [dataclasses.asdict(check) for check in checks], **results}, indent=1)
    if to_stdout:
        print(text)
    elif json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(f"{text}\n", encoding="utf-8")
    return results["exit_status"]


def _checks() -> Iterator[Check]:
    driver = driver_check()
    yield driver
    yield from package_checks("cpu" if driver.status == INFO else "cuda")
    try:
        import kmp
    except Exception as error:  # a broken installation may raise anything
        fix = "export KERAS_BACKEND=tensorflow" if "KERAS_BACKEND" in str(error) else ""
        yield Check("import kmp", ERROR, _text_of(error), fix)
        return
    yield Check("import kmp", OK, str(Path(kmp.__file__).parent))
    try:
        yield from gpu_checks(has_driver=driver.status == OK)
    except Exception as error:  # TensorFlow may raise anything
        yield Check("GPU", ERROR, _text_of(error))


def gpu_checks(has_driver: bool) -> Iterator[Check]:
    """Checks TensorFlow's build, its CUDA libraries, the GPUs that it sees, and XLA.

    Args:
        has_driver: Whether NVIDIA's driver reports a GPU.
    """
    import tensorflow as tf

    import kmp
    from kmp.bench import measurement

    build, gpus, package = tf.sysconfig.get_build_info(), kmp.gpus(), tensorflow_packages()[0]
    if build.get("is_cuda_build"):
        text = f"TensorFlow is built with CUDA {build.get('cuda_version')} and cuDNN {build.get('cudnn_version')}"
        yield Check("CUDA build", OK, text)
        yield library_check(package, ERROR if has_driver and not gpus else INFO)
        if has_driver and not gpus:
            is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
            fix = "unset CUDA_VISIBLE_DEVICES" if is_hidden else _LOG
            yield Check("GPU", ERROR, "TensorFlow does not see the GPU", fix)
    elif has_driver:
        fix = f"pip uninstall -y {package} && pip install 'kmp[cuda]'"
        yield Check("CUDA build", ERROR, "TensorFlow is built without CUDA and cannot use the GPU", fix)
    else:
        yield Check("CUDA build", INFO, "TensorFlow is built without CUDA")
    compiled_for = {name.rstrip("af") for name in build.get("cuda_compute_capabilities", [])}
    for gpu in gpus:
        formats = "Tensor Cores for float16" + (" and bfloat16" if gpu.bfloat16 else ", no bfloat16")
        slow = "no Tensor Cores, so float16 saves memory, but hardly any time"
        yield Check("GPU", OK if gpu.tensor_cores else WARNING, f"{gpu}: {formats if gpu.tensor_cores else slow}")
        major, minor = gpu.compute_capability or (0, 0)
        # Machine code runs on all later minor versions of its major one.
        runs = {f"{code}_{major}{lower}" for code in ("sm", "compute") for lower in range(minor + 1)}
        if compiled_for and gpu.compute_capability and not runs & compiled_for:
            text = f"TensorFlow has no machine code for {gpu.name}: its first start can take 30 minutes, or fail"
            yield Check("GPU", WARNING, text, "pip install --upgrade 'tensorflow[and-cuda]'  # or tf-nightly")
    if not gpus and not has_driver:
        yield Check("GPU", INFO, "TensorFlow sees none: everything runs on the CPU")
    try:
        with tf.device("GPU:0" if gpus else "CPU:0"):
            for dtype in (tf.float32, tf.float16):  # a product is NVIDIA's kernel, the others are TensorFlow's
                matrix = tf.cast(tf.random.normal((64, 64)), dtype)
                tf.exp(matrix @ matrix * matrix).numpy()
    except (tf.errors.OpError, RuntimeError) as error:
        yield Check("GPU", ERROR, f"cannot compute: {_text_of(error)}", _LOG)
        return
    error_of_xla = measurement.xla_error()
    if error_of_xla is None:
        yield Check("XLA", OK, "compiles")
    else:
        text = f"does not compile: {textwrap.shorten(error_of_xla, 300)}"
        yield Check("XLA", WARNING, text, "jit_compile=False in compile")


def _measure(console: Console, checks: list[Check]) -> dict[str, Any]:
    from kmp import bench, gpus

    minutes = "; XLA may take two minutes to compile" if gpus() else ""
    console.print(f"\nMeasuring each precision{minutes} ...", style="dim")
    measured: list[Any] = []
    try:
        for compared in bench.precision.measure_machine():
            measured += compared
    except Exception as error:  # TensorFlow may raise anything
        fix = "nvidia-smi  # shows what else uses the GPU" if type(error).__name__ == "ResourceExhaustedError" else ""
        checks.append(Check("measurement", WARNING, f"incomplete: {_text_of(error)}", fix))
        _print(console, checks[-1])
    if measured:
        console.print(_table(measured), soft_wrap=False)
    results = {"results": [dataclasses.asdict(result) for result in measured]}
    best = bench.precision.recommend(measured)
    if best is None:
        verdict = "The speed of mixed precision could not be measured here."
        return {"exit_status": BROKEN, "verdict": verdict} | results
    option = f"jit_compile={best.jit_compile}"
    if best.policy == "float32":
        verdict = f"Mixed precision works but is not faster than float32 here. Recommended: float32 with {option}."
    else:
        verdict = (
            f"Mixed precision is {best.speedup:.2f} times as fast as float32 here: kmp.enable({best.policy!r}) and "
            f"model.compile(..., {option})."
        )
    device = "the first GPU" if gpus() else "the CPU, because TensorFlow sees no GPU"
    verdict += f" Measured on {device}, with one small model; the speed-up of yours may differ."
    status = NOT_FASTER if best.policy == "float32" else FASTER
    return {"exit_status": status, "verdict": verdict, "recommended": dataclasses.asdict(best)} | results


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


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 300)}"


def _print(console: Console, check: Check) -> None:
    mark, style = _MARKS[check.status]
    console.print(f"{mark:>5}", style=style, end="  ")
    console.print(f"{check.name}: {check.text}")
    if check.fix:
        console.print(f"       {check.fix}", style="bold")
