"""What is installed, and what is missing, found out without importing Keras or TensorFlow."""

import ctypes
import importlib.metadata
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

OK, INFO, WARNING, ERROR = "ok", "info", "warning", "error"

_DRIVERS = "https://www.nvidia.com/drivers"
_NVIDIA_SMI_ON_WSL = "/usr/lib/wsl/lib/nvidia-smi"  # not always on the PATH
_PCI = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # the vendor, and the class of display controllers

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


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver, as `nvidia-smi` describes it.

    Args:
        version: The version of the driver.
        cuda_version: The newest version of CUDA that the driver supports, such as `"12.4"`.
        gpus: The name and the total memory of each GPU, such as `("NVIDIA A100", "40960 MiB")`.
    """

    version: str
    cuda_version: str
    gpus: tuple[tuple[str, str], ...]


def nvidia_gpus_on_pci() -> list[str]:
    """Returns the addresses of NVIDIA's GPUs on the PCI bus, with or without a driver."""

    def is_gpu(device: Path) -> bool:
        try:
            return (device / "vendor").read_text().startswith(_NVIDIA) and (device / "class").read_text().startswith(
                _DISPLAY
            )
        except OSError:
            return False

    return sorted(device.name for device in _PCI.glob("*") if is_gpu(device))


def nvidia_driver() -> tuple[Driver | None, Check]:
    """Asks `nvidia-smi` for the driver and its GPUs; returns `None` if it reports none, and what was found."""
    driver, check = _ask_nvidia_smi()
    gpus = nvidia_gpus_on_pci()
    if driver is None and gpus:
        text = f"{check.text}, but the machine has an NVIDIA GPU (PCI {', '.join(gpus)})"
        fix = f"nvidia-smi  # after installing the driver from {_DRIVERS}; start a container with --gpus all"
        return None, Check(check.name, ERROR, text, fix)
    return driver, check


def _ask_nvidia_smi() -> tuple[Driver | None, Check]:
    name = "NVIDIA driver"
    try:
        command = shutil.which("nvidia-smi") or _NVIDIA_SMI_ON_WSL
        query = subprocess.run([command, "-q", "-x"], capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return None, Check(name, INFO, "none (nvidia-smi is not installed)")
    except (OSError, subprocess.SubprocessError) as error:
        return None, Check(name, WARNING, f"nvidia-smi does not run: {error}")
    try:
        root = ElementTree.fromstring(query.stdout[query.stdout.find("<") :])
    except ElementTree.ParseError:
        reason = textwrap.shorten(query.stdout + query.stderr, 300) or f"exit status {query.returncode}"
        return None, Check(name, WARNING, f"nvidia-smi reports: {reason}")
    gpus = tuple(
        (gpu.findtext("product_name", "unknown"), gpu.findtext("fb_memory_usage/total", "unknown"))
        for gpu in root.iter("gpu")
    )
    found = Driver(root.findtext("driver_version", "unknown"), root.findtext("cuda_version", "unknown"), gpus)
    if not gpus:
        return None, Check(name, INFO, f"{found.version}, without a GPU")
    names = ", ".join(f"{gpu} with {memory}" for gpu, memory in gpus)
    return found, Check(name, OK, f"{found.version}, for CUDA up to {found.cuda_version}; {names}")


def package_checks(extra: str) -> Iterator[Check]:
    """Checks Python, and the packages that kmp needs, against the versions that kmp supports.

    Args:
        extra: kmp's extra that installs TensorFlow for this machine, `"cuda"` or `"cpu"`.
    """
    metadata = importlib.metadata.metadata("kmp")
    supported = SpecifierSet(metadata["Requires-Python"] or "")
    python = ".".join(map(str, sys.version_info[:3]))
    if python not in supported:
        text = f"{python}; kmp needs {supported}"
        yield Check("Python", ERROR, text, f"uv venv --python '{supported}'")
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist") or ()]
    packages = tensorflow_packages()
    install_all = (
        None if packages else install_command(extra)
    )  # with TensorFlow installed, it might install another one
    checks = [
        _version_check(found, [found.name], install_all or f"pip install '{found}'")
        for found in requirements
        if found.marker is None
    ]
    tensorflow = next(found for found in requirements if found.name == "tensorflow")
    checks.append(_version_check(tensorflow, packages, install_command(extra)))
    good = [f"{check.name} {check.text}" for check in checks if check.status == OK]
    names = [f"Python {python}", f"kmp {metadata['Version']}", *good]
    yield Check("packages", OK, ", ".join(names))
    yield from (check for check in checks if check.status != OK)


def install_command(extra: str) -> str:
    """Returns the command that installs kmp with TensorFlow."""
    return f"pip install 'kmp[{extra}]'"


def _version_check(requirement: Requirement, packages: list[str], install: str) -> Check:
    name, installed = requirement.name, " and ".join(packages)
    try:
        version = importlib.metadata.version(packages[0])
    except (IndexError, importlib.metadata.PackageNotFoundError):
        return Check(name, ERROR, "is not installed", install)
    if not requirement.specifier.contains(version, prereleases=True):
        needed = f"{packages[0]}{requirement.specifier}"
        return Check(name, ERROR, f"{version}; kmp needs {needed}", f"pip install '{needed}'")
    if len(packages) > 1:
        text = f"{version}; {installed} are both installed, and each overwrites files of the other"
        return Check(name, WARNING, text, f"pip uninstall -y {' '.join(packages)}  # then install one of them")
    return Check(name, OK, version if installed == name else f"{version} ({installed})")


def tensorflow_packages() -> list[str]:
    """Returns the names of the installed packages that contain TensorFlow; there should be one."""
    return sorted(set(importlib.metadata.packages_distributions().get("tensorflow", [])))


def library_check(package: str, missing_is: str, without: str = "") -> Check:
    """Checks that the CUDA libraries that a TensorFlow package needs are installed, by pip or on the system.

    Args:
        package: The name of an installed package, such as `"tensorflow"`. Its extra `and-cuda` lists the libraries.
        missing_is: The status if libraries are missing.
        without: What missing libraries mean on this machine, if they are no error.
    """
    requirements = [Requirement(text) for text in importlib.metadata.requires(package) or ()]
    needed = [found for found in requirements if found.marker and found.marker.evaluate({"extra": "and-cuda"})]
    found: list[str] = []
    missing: list[str] = []
    for requirement in (requirement for requirement in needed if requirement.name.startswith("nvidia-")):
        name = re.sub(r"^nvidia-|-cu\d+$", "", requirement.name)
        installed = _installed_version(requirement.name)
        fits = installed is not None and installed in requirement.specifier
        version = installed if fits else _from_system(name, requirement)
        if version:
            found.append(f"{name} {version}")
        else:
            missing.append(f"{name} ({installed} is installed, not {requirement.specifier})" if installed else name)
    if not missing:
        return Check("CUDA libraries", OK, ", ".join(found) or f"{package} does not say which it needs")
    text = f"missing: {', '.join(missing)}" + (f"; found: {', '.join(found)}" if found else "")
    if missing_is == ERROR:
        fix = f"pip install '{package}[and-cuda]=={importlib.metadata.version(package)}'"
        return Check("CUDA libraries", ERROR, text, fix)
    return Check("CUDA libraries", missing_is, f"{text}; {without}")


def _installed_version(package: str) -> str | None:
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
