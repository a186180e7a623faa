"""What is installed, and what is missing, found out without importing Keras or TensorFlow."""

import ctypes
import importlib.metadata
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

OK, INFO, WARNING, ERROR = "ok", "info", "warning", "error"

# The names of libraries, where they differ from the name of NVIDIA's package.
_LIBRARIES = {"cuda-runtime": "cudart", "cuda-cupti": "cupti", "cuda-nvrtc": "nvrtc", "nvjitlink": "nvJitLink"}


@dataclass(frozen=True)
class Check:
    """One fact about this machine.

    Args:
        name: What was checked, such as `"keras"`.
        status: `"ok"`, `"info"`, `"warning"` (it works, but not as well as it could) or `"error"` (it does not work).
        text: What was found, in one sentence.
        fix: The command or setting that changes it; empty if nothing has to change.
    """

    name: str
    status: str
    text: str
    fix: str = ""


def driver_check() -> Check:
    """Asks `nvidia-smi` for the driver and the GPUs; the status is `"ok"` only if it reports a GPU."""
    name = "NVIDIA driver"
    query = ["nvidia-smi", "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return Check(name, INFO, "none (nvidia-smi is not installed)")
    except (OSError, subprocess.SubprocessError) as error:
        return Check(name, WARNING, f"nvidia-smi does not run: {error}")
    output = "; ".join((done.stdout + done.stderr).split("\n")).strip("; ")
    if done.returncode or not output:
        return Check(name, WARNING, f"nvidia-smi reports: {output or f'exit status {done.returncode}'}")
    return Check(name, OK, output)


def package_checks(extra: str) -> Iterator[Check]:
    """Checks Python, and the packages that kmp needs, against the versions that kmp supports.

    Args:
        extra: kmp's extra that installs TensorFlow for this machine, `"cuda"` or `"cpu"`.
    """
    metadata = importlib.metadata.metadata("kmp")
    good, wrong = [f"kmp {metadata['Version']}"], []
    python, supported = ".".join(map(str, sys.version_info[:3])), metadata["Requires-Python"] or ""
    if python in SpecifierSet(supported):
        good.insert(0, f"Python {python}")
    else:
        wrong.append(Check("Python", ERROR, f"{python}; kmp needs {supported}", f"uv venv --python '{supported}'"))
    tensorflow = tensorflow_packages()
    if not tensorflow:  # the extra also installs whatever else is missing
        wrong.append(Check("tensorflow", ERROR, "is not installed", f"pip install 'kmp[{extra}]'"))
    elif len(tensorflow) > 1:
        text = f"{' and '.join(tensorflow)} are both installed, and each overwrites files of the other"
        fix = f"pip uninstall -y {' '.join(tensorflow)}  # then install one of them"
        wrong.append(Check("tensorflow", WARNING, text, fix))
    for requirement in map(Requirement, metadata.get_all("Requires-Dist") or ()):
        if requirement.name == "tensorflow" and tensorflow:  # in an extra; `tensorflow-cpu` provides it too
            requirement.name = tensorflow[0]
        elif requirement.marker is not None:
            continue
        version, needed = installed_version(requirement.name), f"{requirement.name}{requirement.specifier}"
        if version is None:
            wrong.append(Check(requirement.name, ERROR, "is not installed", f"pip install '{needed}'"))
        elif not requirement.specifier.contains(version, prereleases=True):
            text = f"{version}; kmp needs {needed}"
            wrong.append(Check(requirement.name, ERROR, text, f"pip install '{needed}'"))
        else:
            good.append(f"{requirement.name} {version}")
    yield Check("packages", OK, ", ".join(good))
    yield from wrong


def tensorflow_packages() -> list[str]:
    """Returns the names of the installed packages that contain TensorFlow; there should be one."""
    return sorted(set(importlib.metadata.packages_distributions().get("tensorflow", [])))


def library_check(package: str, missing_is: str) -> Check:
    """Checks that the CUDA libraries that a TensorFlow package needs are installed, by pip or on the system.

    Args:
        package: The name of an installed package, such as `"tensorflow"`. Its extra `and-cuda` lists the libraries.
        missing_is: The status if libraries are missing.
    """
    found: list[str] = []
    missing: list[str] = []
    for requirement in map(Requirement, importlib.metadata.requires(package) or ()):
        is_in_extra = requirement.marker is not None and requirement.marker.evaluate({"extra": "and-cuda"})
        if not is_in_extra or not requirement.name.startswith("nvidia-"):
            continue
        name, version = re.sub(r"^nvidia-|-cu\d+$", "", requirement.name), installed_version(requirement.name)
        if version is None or version not in requirement.specifier:
            other = f" ({version} is installed, not {requirement.specifier})" if version else ""
            version = _from_system(name, requirement)
        found.append(f"{name} {version}") if version else missing.append(f"{name}{other}")
    if not missing:
        return Check("CUDA libraries", OK, ", ".join(found) or f"{package} does not say which it needs")
    text = f"missing: {', '.join(missing)}" + (f"; found: {', '.join(found)}" if found else "")
    if missing_is != ERROR:
        return Check("CUDA libraries", missing_is, f"{text}; not needed here")
    return Check("CUDA libraries", ERROR, text, f"pip install '{package}[and-cuda]=={installed_version(package)}'")


def installed_version(package: str) -> str | None:
    """Returns the version of an installed package; `None` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _from_system(name: str, requirement: Requirement) -> str | None:
    """Returns a library that the dynamic linker finds; the major version of a package is that of its library."""
    if name == "cuda-nvcc":
        return shutil.which("ptxas")
    lowest = next((found.version for found in requirement.specifier if found.operator in (">=", "==", "~=")), "0")
    file = f"lib{_LIBRARIES.get(name, name)}.so.{lowest.partition('.')[0]}"
    try:
        ctypes.CDLL(file)
    except OSError:
        return None
    return file
