"""`kmp doctor`: whether mixed precision works on this machine, and whether it makes training faster.

Imports Keras and TensorFlow only where it checks them, because they may be missing.
"""

import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

FASTER, BROKEN, NOT_FASTER = 0, 1, 3  # exit statuses; 2 is that of wrong arguments
OK, INFO, WARNING, ERROR = "ok", "info", "warning", "error"
_MARKS = {
    OK: ("ok", "green"),
    INFO: ("-", "dim"),
    WARNING: ("!", "yellow"),
    ERROR: ("ERROR", "bold red"),
}


@dataclasses.dataclass(frozen=True)
class Check:
    """One fact about this machine.

    Args:
        name: What was checked, such as `"keras"`.
        status: `"ok"`, `"info"`, `"warning"` (it works, but not as well as it could) or `"error"`
            (it does not work).
        text: What was found.
        fix: The command or setting that changes it; empty if nothing has to change.
    """

    name: str
    status: str
    text: str
    fix: str = ""


def run(json_file: Path | None = None) -> int:
    """Checks this machine, measures each precision, prints the results and returns the exit status.

    Args:
        json_file: File to write the results to; `-` prints them instead of all else. `None` for no
            file.
    """
    os.environ.setdefault(
        "TF_CPP_MIN_LOG_LEVEL", "3"
    )  # what TensorFlow logs about GPUs is checked here
    os.environ.setdefault(
        "TF_FORCE_GPU_ALLOW_GROWTH", "true"
    )  # other programs may use the GPU's memory
    to_stdout = json_file == Path("-")
    console = Console(quiet=to_stdout, markup=False, highlight=False, soft_wrap=True)
    checks: list[Check] = []
    for check in _checks():  # printed one at a time: a GPU may take minutes to start
        checks.append(check)
        mark, style = _MARKS[check.status]
        console.print(f"{mark:>5}", style=style, end="  ")
        console.print(f"{check.name}: {check.text}")
        if check.fix:
            console.print(f"       {check.fix}", style="bold")
    broken = next((check for check in checks if check.status == ERROR), None)
    if broken is None:
        results = _measure(console)
        if results["exit_status"] != BROKEN:
            results |= _measure_environment(console)
    else:
        verdict = f"Mixed precision does not work here: {broken.name}: {broken.text.rstrip('.')}."
        results = {"exit_status": BROKEN, "verdict": verdict}
    console.print(f"\n{results['verdict']}", style="bold")
    if broken and broken.fix:
        console.print(f"Run: {broken.fix}")
    text = json.dumps(
        {"checks": [dataclasses.asdict(check) for check in checks], **results}, indent=1
    )
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
    name = "import kmp"
    try:
        import kmp

        yield Check(name, OK, str(Path(kmp.__file__).parent))
        name = "GPU"
        yield from gpu_checks(has_driver=driver.status == OK)
    except Exception as error:  # a broken installation, and TensorFlow, may raise anything
        yield Check(name, ERROR, _text_of(error))


def driver_check() -> Check:
    """Asks `nvidia-smi` for the driver and the GPUs; the status is `"ok"` only if it reports a GPU."""
    query = ["nvidia-smi", "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return Check("NVIDIA driver", INFO, "none (nvidia-smi is not installed)")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("NVIDIA driver", WARNING, f"nvidia-smi does not run: {error}")
    output = "; ".join((done.stdout + done.stderr).splitlines())
    if done.returncode or not output:
        return Check(
            "NVIDIA driver",
            WARNING,
            f"nvidia-smi reports no GPU, exit status {done.returncode}: {output}",
        )
    return Check("NVIDIA driver", OK, output)


def package_checks(extra: str) -> Iterator[Check]:
    """Checks the packages that kmp needs against the versions in kmp's metadata. pip has checked that of Python.

    Args:
        extra: kmp's extra that installs TensorFlow for this machine, `"cuda"` or `"cpu"`.
    """
    metadata, tensorflow = importlib.metadata.metadata("kmp"), tensorflow_packages()
    found = [f"Python {platform.python_version()}", f"kmp {metadata['Version']}"]
    if not tensorflow:  # first: the extra also installs whatever else is missing
        yield Check("tensorflow", ERROR, "not installed", f"pip install 'kmp[{extra}]'")
    elif len(tensorflow) > 1:
        text = (
            f"{' and '.join(tensorflow)} are both installed, and each overwrites files of the other"
        )
        fix = f"pip uninstall -y {' '.join(tensorflow)}  # then install one of them"
        yield Check("tensorflow", WARNING, text, fix)
    for requirement in map(Requirement, metadata.get_all("Requires-Dist") or ()):
        if (
            requirement.name == "tensorflow" and tensorflow
        ):  # in an extra; `tensorflow-cpu` provides it too
            requirement.name = tensorflow[0]
        elif requirement.marker is not None:
            continue
        version, needed = (
            installed_version(requirement.name),
            f"{requirement.name}{requirement.specifier}",
        )
        if version is not None and requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name} {version}")
        else:
            text = f"{version or 'not installed'}; kmp needs {needed}"
            yield Check(requirement.name, ERROR, text, f"pip install '{needed}'")
    yield Check("packages", OK, ", ".join(found))


def library_check() -> Check:
    """Checks the CUDA libraries that TensorFlow's extra `and-cuda` installs."""
    package = tensorflow_packages()[0]
    missing = []
    for requirement in map(Requirement, importlib.metadata.requires(package) or ()):
        if requirement.marker is not None and requirement.marker.evaluate({"extra": "and-cuda"}):
            version = installed_version(requirement.name)
            if version is None or version not in requirement.specifier:
                missing.append(
                    f"{requirement.name}{requirement.specifier} ({version or 'not installed'})"
                )
    if not missing:
        return Check("CUDA libraries", OK, f"those of {package}[and-cuda] are installed")
    fix = f"pip install '{package}[and-cuda]=={installed_version(package)}'"
    return Check(
        "CUDA libraries",
        ERROR,
        f"TensorFlow sees no GPU, and pip has not installed {', '.join(missing)}",
        fix,
    )


def tensorflow_packages() -> list[str]:
    """Returns the names of the installed packages that contain TensorFlow, such as `tensorflow` or `tensorflow-cpu`."""
    return sorted(set(importlib.metadata.packages_distributions().get("tensorflow", [])))


def installed_version(package: str) -> str | None:
    """Returns the version of an installed package; `None` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpu_checks(has_driver: bool) -> Iterator[Check]:
    """Checks TensorFlow's build, the GPUs that it sees, a computation, and XLA.

    Args:
        has_driver: Whether NVIDIA's driver reports a GPU.

    Raises:
        Exception: Of any class, if TensorFlow cannot compute.
    """
    import tensorflow as tf

    import kmp
    from kmp import bench

    build, gpus = tf.sysconfig.get_build_info(), kmp.gpus()
    if build.get("is_cuda_build"):
        text = (
            f"TensorFlow is built with CUDA {build.get('cuda_version')} and cuDNN"
            f" {build.get('cudnn_version')}"
        )
        yield Check("CUDA build", OK, text)
        if has_driver and not gpus and os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            yield Check(
                "GPU", ERROR, "TensorFlow does not see the GPU", "unset CUDA_VISIBLE_DEVICES"
            )
        elif has_driver and not gpus:
            yield library_check()
            fix = (
                "python -c \"import tensorflow as tf; tf.config.list_physical_devices('GPU')\"  #"
                " logs the reason"
            )
            yield Check("GPU", ERROR, "TensorFlow does not see the GPU", fix)
    elif has_driver:
        fix = f"pip uninstall -y {' '.join(tensorflow_packages())} && pip install 'kmp[cuda]'"
        yield Check(
            "CUDA build", ERROR, "TensorFlow is built without CUDA and cannot use the GPU", fix
        )
    else:
        yield Check("CUDA build", INFO, "TensorFlow is built without CUDA")
    if not gpus and not has_driver:
        yield Check("GPU", INFO, "TensorFlow sees none: everything runs on the CPU")

    compiled_for = {name.rstrip("af") for name in build.get("cuda_compute_capabilities", [])}
    for gpu in gpus:
        formats = "Tensor Cores for float16" + (
            " and bfloat16" if gpu.bfloat16 else ", no bfloat16"
        )
        slow = "no Tensor Cores, so float16 saves memory, but hardly any time"
        yield Check(
            "GPU",
            OK if gpu.tensor_cores else WARNING,
            f"{gpu}: {formats if gpu.tensor_cores else slow}",
        )
        major, minor = gpu.compute_capability or (0, 0)
        # Machine code runs on all later minor versions of its major one.
        runs = {
            f"{code}_{major}{lower}" for code in ("sm", "compute") for lower in range(minor + 1)
        }
        if compiled_for and not runs & compiled_for:
            text = (
                f"TensorFlow has no machine code for {gpu.name}: its first start can take 30"
                " minutes, or fail"
            )
            yield Check(
                "GPU",
                WARNING,
                text,
                "pip install --upgrade 'tensorflow[and-cuda]'  # or tf-nightly",
            )

    with tf.device("GPU:0" if gpus else "CPU:0"):
        for dtype in (
            tf.float32,
            tf.float16,
        ):  # a product is NVIDIA's kernel, the others are TensorFlow's
            matrix = tf.cast(tf.random.normal((64, 64)), dtype)
            tf.exp(matrix @ matrix * matrix).numpy()
    error = bench.measurement.xla_error()
    if error is None:
        yield Check("XLA", OK, "compiles")
    else:
        yield Check(
            "XLA",
            WARNING,
            f"does not compile: {textwrap.shorten(error, 300)}",
            "jit_compile=False in compile",
        )


def _measure(console: Console) -> dict[str, Any]:
    from kmp import bench, gpus

    device = "the first GPU" if gpus() else "the CPU, because TensorFlow sees no GPU"
    minutes = "; XLA may take two minutes to compile" if gpus() else ""
    console.print(f"\nMeasuring each precision{minutes} ...", style="dim")
    measured: list[Any] = []
    incomplete = ""
    try:
        for compared in bench.precision.measure_machine():
            measured += compared
    except Exception as error:  # TensorFlow may raise anything
        incomplete = f" The measurement is incomplete: {_text_of(error)}"
        if type(error).__name__ == "ResourceExhaustedError":
            incomplete += " (`nvidia-smi` shows what else uses the GPU's memory)"
    if measured:
        console.print(_table(measured), soft_wrap=False)
    results = {"results": [dataclasses.asdict(result) for result in measured]}
    best = bench.precision.recommend(measured)
    if best is None:
        verdict = f"The speed of mixed precision could not be measured here.{incomplete}"
        return {"exit_status": BROKEN, "verdict": verdict} | results
    option = f"jit_compile={best.jit_compile}"
    if best.policy == "float32":
        status = NOT_FASTER
        verdict = (
            "Mixed precision works but is not faster than float32 here. Recommended: float32 with"
            f" {option}."
        )
    else:
        status = FASTER
        verdict = (
            f"Mixed precision is {best.speedup:.2f} times as fast as float32 here:"
            f" kmp.enable({best.policy!r}) and model.compile(..., {option})."
        )
    verdict += (
        f" Measured on {device}, with one small model; the speed-up of yours may"
        f" differ.{incomplete}"
    )
    return {
        "exit_status": status,
        "verdict": verdict,
        "recommended": dataclasses.asdict(best),
    } | results


def _measure_environment(console: Console) -> dict[str, Any]:
    """Measures what NVIDIA's environment variables gain on a GPU; returns nothing without one."""
    from kmp import bench, gpus

    if not gpus():
        return {}
    variables = bench.environment_variables
    text = "Measuring environment variables, in graph mode and each in a new process: a minute ..."
    console.print(f"\n{text}", style="dim")
    try:
        measured = variables.measure_environment()
    except bench.MeasurementError as error:
        advice = f"The environment variables could not be measured: {_text_of(error)}"
        console.print(advice)
        return {"environment": {"export": "", "advice": advice, "results": []}}

    best = variables.fastest_setting(measured)
    if best is None:
        export = ""
        listed = " and ".join(f"`{result.variant}`" for result in measured[1:])
        advice = f"None of NVIDIA's environment variables makes training 3 % faster here: {listed}."
    else:
        export = f"export {best.variant}"
        gain = f"{best.ratio:.2f} times as fast"
        advice = f"Set before Python starts, this trains {gain} in graph mode here."
        if any(name in best.variant for name in variables.PERSISTENT):
            advice += " cuDNN's spatial persistent mode restricts the range of the data:"
            advice += " an overflow may give NaN."
        console.print(export, style="bold")
    console.print(advice)
    results = [dataclasses.asdict(result) for result in measured]
    return {"environment": {"export": export, "advice": advice, "results": results}}


def _table(measured: Sequence[Any]) -> Table:
    """Returns a table with the throughput of float32, and the ratio to it of each other format."""
    formats = list(dict.fromkeys(result.variant for result in measured))
    table = Table(
        "", "mode", formats[0], *(f"{name} \N{MULTIPLICATION SIGN}" for name in formats[1:])
    )
    for start in range(0, len(measured), len(formats)):
        first, *others = measured[start : start + len(formats)]
        ratios = (f"{result.ratio:.2f}" for result in others)
        table.add_row(first.case, first.mode, f"{first.value:,.0f} {first.unit}", *ratios)
    for column in table.columns[2:]:
        column.justify = "right"
    return table


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 300)}"
