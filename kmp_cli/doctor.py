"""`kmp doctor`: whether mixed precision works on this machine, and makes training faster.

Imports Keras and TensorFlow only where it checks them, because they may be missing.
"""

import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    # What TensorFlow logs about GPUs is checked here; other programs may use the GPU's memory.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    to_stdout = json_file == Path("-")
    console = Console(quiet=to_stdout, markup=False, highlight=False, soft_wrap=True)
    checks: list[Check] = []
    for check in _checks():  # printed one at a time: a GPU may take minutes to start
        checks.append(check)
        _print_check(console, check)
    broken = next((check for check in checks if check.status == ERROR), None)
    if broken is None:
        results = _measure(console)
        if results["exit_status"] != BROKEN:
            results.update(_measure_layers(console))
            results.update(_measure_environment(console))
    else:
        verdict = f"Mixed precision does not work here: {broken.name}: {broken.text.rstrip('.')}."
        results = {"exit_status": BROKEN, "verdict": verdict}
    console.print(f"\n{results['verdict']}", style="bold")
    if broken and broken.fix:
        console.print(f"Run: {broken.fix}")
    content = {"checks": [dataclasses.asdict(check) for check in checks], **results}
    text = json.dumps(content, indent=1)
    if to_stdout:
        print(text)
    elif json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(f"{text}\n", encoding="utf-8")
    return results["exit_status"]


def _print_check(console: Console, check: Check) -> None:
    mark, style = _MARKS[check.status]
    console.print(f"{mark:>5}", style=style, end="  ")
    console.print(f"{check.name}: {check.text}")
    if check.fix:
        console.print(f"       {check.fix}", style="bold")


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
    """Asks `nvidia-smi` for the driver and the GPUs. The status is `"ok"` if it reports a GPU."""
    query = ["nvidia-smi", "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return Check("NVIDIA driver", INFO, "none (nvidia-smi is not installed)")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("NVIDIA driver", WARNING, f"nvidia-smi does not run: {error}")
    output = "; ".join((done.stdout + done.stderr).splitlines())
    if done.returncode or not output:
        text = f"nvidia-smi reports no GPU, exit status {done.returncode}: {output}"
        return Check("NVIDIA driver", WARNING, text)
    return Check("NVIDIA driver", OK, output)


def package_checks(extra: str) -> Iterator[Check]:
    """Checks the packages that kmp needs against the versions in kmp's metadata.

    pip has checked the version of Python.

    Args:
        extra: kmp's extra that installs TensorFlow for this machine, `"cuda"` or `"cpu"`.
    """
    metadata = importlib.metadata.metadata("kmp")
    installed = {module: packages_of(module) for module in ("tensorflow", "keras")}
    found = [f"Python {platform.python_version()}", f"kmp {metadata['Version']}"]
    if not installed["tensorflow"]:  # first: the extra also installs whatever else is missing
        yield Check("tensorflow", ERROR, "not installed", f"pip install 'kmp[{extra}]'")
    for module, packages in installed.items():
        if len(packages) > 1:
            both = " and ".join(packages)
            text = f"{both} are both installed, and each overwrites files of the other"
            fix = f"pip uninstall -y {' '.join(packages)}  # then install one of them"
            yield Check(module, WARNING, text, fix)
    for requirement in _requirements(metadata.get_all("Requires-Dist") or (), installed):
        version = installed_version(requirement.name)
        needed = f"{requirement.name}{requirement.specifier}"
        if version is not None and requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name} {version}")
        else:
            text = f"{version or 'not installed'}; kmp needs {needed}"
            yield Check(requirement.name, ERROR, text, f"pip install '{needed}'")
    yield Check("packages", OK, ", ".join(found))


def _requirements(
    lines: Iterable[str], installed: Mapping[str, Sequence[str]]
) -> Iterator[Requirement]:
    """Yields what kmp needs without extras, and TensorFlow.

    TensorFlow and Keras have the name under which they are installed.
    """
    for requirement in map(Requirement, lines):
        packages = installed.get(requirement.name)
        if packages:
            requirement.name = packages[0]  # such as `tensorflow-cpu` or `keras-nightly`
            yield requirement
        elif requirement.marker is None:  # others are in an extra
            yield requirement


def library_check() -> Check:
    """Checks the CUDA libraries that TensorFlow's extra `and-cuda` installs."""
    package = packages_of("tensorflow")[0]
    missing = []
    for requirement in map(Requirement, importlib.metadata.requires(package) or ()):
        if requirement.marker is None or not requirement.marker.evaluate({"extra": "and-cuda"}):
            continue
        version = installed_version(requirement.name)
        if version is None or version not in requirement.specifier:
            needed = f"{requirement.name}{requirement.specifier}"
            missing.append(f"{needed} ({version or 'not installed'})")
    if not missing:
        return Check("CUDA libraries", OK, f"those of {package}[and-cuda] are installed")
    fix = f"pip install '{package}[and-cuda]=={installed_version(package)}'"
    text = f"TensorFlow sees no GPU, and pip has not installed {', '.join(missing)}"
    return Check("CUDA libraries", ERROR, text, fix)


def packages_of(module: str) -> list[str]:
    """Returns the names of the installed packages that contain a module."""
    return sorted(set(importlib.metadata.packages_distributions().get(module, [])))


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
    from kmp_bench.measurement import xla_error

    build, gpus = tf.sysconfig.get_build_info(), kmp.gpus()
    yield _build_check(build, has_driver)
    if not gpus and not has_driver:
        yield Check("GPU", INFO, "TensorFlow sees none: everything runs on the CPU")
    elif not gpus and build.get("is_cuda_build"):
        yield from _hidden_gpu_checks()
    for gpu in gpus:
        yield from _capability_checks(gpu, build.get("cuda_compute_capabilities", []))

    with tf.device("GPU:0" if gpus else "CPU:0"):
        for dtype in (tf.float32, tf.float16):
            matrix = tf.cast(tf.random.normal((64, 64)), dtype)
            # The product is NVIDIA's kernel, the others are TensorFlow's.
            tf.exp(matrix @ matrix * matrix).numpy()
    error = xla_error()
    if error is None:
        yield Check("XLA", OK, "compiles")
    else:
        text = f"does not compile: {textwrap.shorten(error, 300)}"
        yield Check("XLA", WARNING, text, "jit_compile=False in compile")


def _build_check(build: Mapping[str, Any], has_driver: bool) -> Check:
    if build.get("is_cuda_build"):
        cuda, cudnn = build.get("cuda_version"), build.get("cudnn_version")
        return Check("CUDA build", OK, f"TensorFlow is built with CUDA {cuda} and cuDNN {cudnn}")
    if not has_driver:
        return Check("CUDA build", INFO, "TensorFlow is built without CUDA")
    text = "TensorFlow is built without CUDA and cannot use the GPU"
    fix = f"pip uninstall -y {' '.join(packages_of('tensorflow'))} && pip install 'kmp[cuda]'"
    return Check("CUDA build", ERROR, text, fix)


def _hidden_gpu_checks() -> Iterator[Check]:
    """Yields why a build with CUDA does not see the GPU that the driver reports."""
    text = "TensorFlow does not see the GPU"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        yield Check("GPU", ERROR, text, "unset CUDA_VISIBLE_DEVICES")
        return
    yield library_check()
    code = "import tensorflow as tf; tf.config.list_physical_devices('GPU')"
    yield Check("GPU", ERROR, text, f'python -c "{code}"  # logs the reason')


def _capability_checks(gpu: Any, compiled_for: Iterable[str]) -> Iterator[Check]:
    """Checks a GPU's formats, and TensorFlow's machine code for it.

    Args:
        gpu: A `kmp.enabling.Gpu`.
        compiled_for: The names of the machine codes in TensorFlow, such as `"sm_80"`.
    """
    if not gpu.tensor_cores:
        slow = "no Tensor Cores, so float16 saves memory, but hardly any time"
        yield Check("GPU", WARNING, f"{gpu}: {slow}")
    else:
        more = " and bfloat16" if gpu.bfloat16 else ", no bfloat16"
        yield Check("GPU", OK, f"{gpu}: Tensor Cores for float16{more}")
    major, minor = gpu.compute_capability or (0, 0)
    # Machine code runs on all later minor versions of its major one.
    versions = [f"{major}{lower}" for lower in range(minor + 1)]
    runs = {f"{code}_{version}" for code in ("sm", "compute") for version in versions}
    built = {name.rstrip("af") for name in compiled_for}
    if built and not runs & built:
        text = (
            f"TensorFlow has no machine code for {gpu.name}: its first start can take 30"
            " minutes, or fail"
        )
        fix = "pip install --upgrade 'tensorflow[and-cuda]'  # or tf-nightly"
        yield Check("GPU", WARNING, text, fix)


def _measure(console: Console) -> dict[str, Any]:
    from kmp import gpus
    from kmp_bench import precision

    device = "the first GPU" if gpus() else "the CPU, because TensorFlow sees no GPU"
    minutes = "; XLA may take two minutes to compile" if gpus() else ""
    console.print(f"\nMeasuring each precision{minutes} ...", style="dim")
    measured: list[Any] = []
    incomplete = ""
    try:
        for compared in precision.measure_machine():
            measured += compared
    except Exception as error:  # TensorFlow may raise anything
        incomplete = f" The measurement is incomplete: {_text_of(error)}"
        if type(error).__name__ == "ResourceExhaustedError":
            incomplete += " (`nvidia-smi` shows what else uses the GPU's memory)"
    if measured:
        console.print(_table(measured), soft_wrap=False)
    results = {"results": [dataclasses.asdict(result) for result in measured]}
    best = precision.recommend(measured)
    if best is None:
        verdict = f"The speed of mixed precision could not be measured here.{incomplete}"
        return {"exit_status": BROKEN, "verdict": verdict, **results}
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
    recommended = dataclasses.asdict(best)
    return {"exit_status": status, "verdict": verdict, "recommended": recommended, **results}


def _measure_layers(console: Console) -> dict[str, Any]:
    """Measures what kmp's ways of some layers gain on a GPU; returns nothing without one."""
    from kmp import gpus
    from kmp_bench import layer_times

    if not gpus():
        return {}
    console.print("\nMeasuring layers in float16 in graph mode: half a minute ...", style="dim")
    measured: list[Any] = []
    incomplete = ""
    try:
        for compared in layer_times.measure_layers(layer_times.ROWS[1:2], layer_times.IMAGES):
            measured += compared
    except Exception as error:  # TensorFlow may raise anything
        incomplete = f" The measurement is incomplete: {_text_of(error)}"
    table = Table(
        "layer, forward and backward", "way", "microseconds", "\N{MULTIPLICATION SIGN} Keras"
    )
    for result in measured:
        ratio = f"{result.ratio:.2f}" if result.ratio else ""
        table.add_row(result.case, result.variant, f"{result.value * 1e6:,.0f}", ratio)
    for column in table.columns[2:]:
        column.justify = "right"
    if measured:
        console.print(table, soft_wrap=False)
    ours = [result for result in measured if result.variant == layer_times.OURS]
    slower = [result.case for result in ours if (result.ratio or 0.0) > 1.0]
    advice = f"kmp.enable() uses the ways named {layer_times.OURS} in graph mode."
    if slower:
        advice += (
            f" Slower than Keras' here: {'; '.join(slower)}. kmp.enable(jit_compile=False) uses"
            " Keras' for all but BatchNormalization, FusedBatchNormV3 for that, and does not"
            " compile the optimizer's step."
        )
    console.print(f"{advice}{incomplete}")
    results = [dataclasses.asdict(result) for result in measured]
    return {"layers": {"advice": f"{advice}{incomplete}", "results": results}}


def _measure_environment(console: Console) -> dict[str, Any]:
    """Measures what NVIDIA's environment variables gain on a GPU; returns nothing without one."""
    from kmp import gpus
    from kmp_bench import MeasurementError, environment_variables

    if not gpus():
        return {}
    text = "Measuring environment variables, in graph mode and each in a new process: a minute ..."
    console.print(f"\n{text}", style="dim")
    try:
        measured = environment_variables.measure_environment()
    except MeasurementError as error:
        advice = f"The environment variables could not be measured: {_text_of(error)}"
        console.print(advice)
        return {"environment": {"export": "", "advice": advice, "results": []}}

    best = environment_variables.fastest_setting(measured)
    if best is None:
        export = ""
        listed = " and ".join(f"`{result.variant}`" for result in measured[1:])
        advice = f"None of NVIDIA's environment variables makes training 3 % faster here: {listed}."
    else:
        export = f"export {best.variant}"
        gain = f"{best.ratio:.2f} times as fast"
        advice = f"Set before Python starts, this trains {gain} in graph mode here."
        if any(name in best.variant for name in environment_variables.PERSISTENT):
            advice += " cuDNN's spatial persistent mode restricts the range of the data:"
            advice += " an overflow may give NaN."
        console.print(export, style="bold")
    console.print(advice)
    results = [dataclasses.asdict(result) for result in measured]
    return {"environment": {"export": export, "advice": advice, "results": results}}


def _table(measured: Sequence[Any]) -> Table:
    """Returns a table with the throughput of float32, and the ratio to it of each other format."""
    formats = list(dict.fromkeys(result.variant for result in measured))
    ratios_to_first = [f"{name} \N{MULTIPLICATION SIGN}" for name in formats[1:]]
    table = Table("", "mode", formats[0], *ratios_to_first)
    for start in range(0, len(measured), len(formats)):
        first, *others = measured[start : start + len(formats)]
        ratios = (f"{result.ratio:.2f}" for result in others)
        table.add_row(first.case, first.mode, f"{first.value:,.0f} {first.unit}", *ratios)
    for column in table.columns[2:]:
        column.justify = "right"
    return table


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 300)}"
