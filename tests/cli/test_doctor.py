"""`kmp doctor`, with fakes of what this machine has not: a GPU, its driver, other packages."""

import functools
import importlib.metadata
import json
import re
import subprocess
from unittest.mock import Mock

import pytest
import tensorflow as tf
from conftest import training_rates

import kmp
from kmp.bench import precision
from kmp.policy import Gpu
from kmp_cli import doctor, installation, main
from kmp_cli.installation import ERROR, INFO, OK, WARNING, Check

A100, T4 = Gpu("NVIDIA A100", (8, 0)), Gpu("Tesla T4", (7, 5))
CUDA_BUILD = {  # of TensorFlow 2.21
    "is_cuda_build": True,
    "cuda_version": "12.5.1",
    "cudnn_version": "9",
    "cuda_compute_capabilities": ["sm_60", "sm_70", "sm_80", "sm_89", "compute_90"],
}


PACKAGES = functools.cache(importlib.metadata.packages_distributions)


@pytest.fixture(autouse=True)
def packages_are_listed_once(monkeypatch):
    """Keeps the list of all installed packages, which takes most of the time of a check."""
    monkeypatch.setattr(importlib.metadata, "packages_distributions", PACKAGES)


@pytest.fixture
def nvidia_smi(monkeypatch):
    """Returns a function that sets what `nvidia-smi` prints, or the error of starting it."""

    def set_output(output, returncode=0):
        done = subprocess.CompletedProcess("nvidia-smi", returncode, output, "")
        monkeypatch.setattr(subprocess, "run", Mock(side_effect=[output if isinstance(output, Exception) else done]))

    return set_output


@pytest.fixture
def machine(monkeypatch):
    """Returns a function that sets TensorFlow's build and the GPUs that it sees."""

    def set_up(build=CUDA_BUILD, gpus=()):
        monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: build)
        monkeypatch.setattr(kmp, "gpus", lambda: tuple(gpus))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return set_up


@pytest.fixture
def versions(monkeypatch):
    """The versions of packages that replace those of this environment; `None` where one is not installed."""
    replaced, real = {}, importlib.metadata.version

    def version(name):
        found = replaced[name] if name in replaced else real(name)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    return replaced


def first_check(name, has_driver):
    """Returns the first check of the GPUs with this name. The checks after it, such as a compilation, do not run."""
    return next(check for check in doctor.gpu_checks(has_driver) if check.name == name)


@pytest.mark.parametrize(
    ("output", "returncode", "status", "text"),
    [
        ("550.54, Tesla T4, 15360 MiB\n" * 2, 0, OK, "550.54, Tesla T4, 15360 MiB; 550.54, Te"),
        (FileNotFoundError(), 0, INFO, "nvidia-smi is not installed"),
        (subprocess.TimeoutExpired("nvidia-smi", 60), 0, WARNING, "does not run"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the driver.", 9, WARNING, "couldn't communicate"),
        ("", 9, WARNING, "exit status 9"),
    ],
)
def test_driver_and_gpus_are_those_that_nvidia_smi_reports(nvidia_smi, output, returncode, status, text):
    nvidia_smi(output, returncode)
    check = installation.driver_check()
    assert (check.status, text in check.text) == (status, True)


def test_packages_of_this_environment_are_in_the_promised_range():
    checks = list(installation.package_checks("cpu"))
    assert {check.status for check in checks} <= {OK, WARNING}
    assert {"Python", "kmp", "keras", "numpy"} <= set(checks[0].text.replace(",", "").split())
    assert "tensorflow" in checks[0].text


@pytest.mark.parametrize(
    ("version", "packages", "status", "text", "fix"),
    [
        ("2.15.0", ["tensorflow"], ERROR, "2.15.0; kmp needs tensorflow>=2.18", "pip install 'tensorflow>=2.18'"),
        ("2.21.0", ["tensorflow", "tensorflow_cpu"], WARNING, "both installed", "pip uninstall -y tensorflow"),
        (None, [], ERROR, "is not installed", "pip install 'kmp[cuda]'"),
    ],
)
def test_tensorflow_that_does_not_fit(monkeypatch, versions, version, packages, status, text, fix):
    versions |= dict.fromkeys(packages, version)
    monkeypatch.setattr(installation, "tensorflow_packages", lambda: packages)
    (check,) = list(installation.package_checks("cuda"))[1:]
    assert (check.name, check.status) == ("tensorflow", status)
    assert text in check.text
    assert fix in check.fix


def test_missing_package_and_python_are_errors_with_the_command_that_installs_them(monkeypatch, versions):
    versions["msgspec"] = None
    monkeypatch.setattr("sys.version_info", (3, 9, 1, "final", 0))
    wrong = {check.name: check for check in installation.package_checks("cpu") if check.status == ERROR}
    assert set(wrong) == {"Python", "msgspec"}
    assert wrong["msgspec"].fix == "pip install 'msgspec>=0.19'"
    assert ">=3.11" in wrong["Python"].fix


CUDA_LIBRARIES = {
    **{"nvidia-cudnn-cu12<10,>=9.3": "9.3.0", "nvidia-cublas-cu12<13,>=12.5": "11.0"},
    **{"nvidia-cuda-runtime-cu12==12.5.82": None, "nvidia-nccl-cu12<3,>=2.25": "2.20"},
    "nvidia-no-such-library-cu12>=12.5": None,
}


@pytest.mark.parametrize("missing_is", [ERROR, INFO])
def test_cuda_libraries_are_those_that_the_package_asks_for(monkeypatch, versions, missing_is):
    requires = ["numpy>=1.26", *(f'{requirement}; extra == "and-cuda"' for requirement in CUDA_LIBRARIES)]
    versions |= {re.split("[<>=]", name)[0]: version for name, version in CUDA_LIBRARIES.items()}
    versions["tensorflow"] = "2.21.0"

    def load(file):
        if file not in ("libcublas.so.12", "libcudart.so.12"):
            raise OSError

    monkeypatch.setattr(importlib.metadata, "requires", lambda package: requires)
    monkeypatch.setattr("ctypes.CDLL", load)
    check = installation.library_check("tensorflow", missing_is)
    found = "cudnn 9.3.0, cublas libcublas.so.12, cuda-runtime libcudart.so.12"
    missing = "nccl (2.20 is installed, not <3,>=2.25), no-such-library"
    assert check.text == f"missing: {missing}; found: {found}" + ("; not needed here" if missing_is == INFO else "")
    fix = "pip install 'tensorflow[and-cuda]==2.21.0'" if missing_is == ERROR else ""
    assert (check.status, check.fix) == (missing_is, fix)


def test_gpu_that_works_is_named_with_its_capability(machine):
    machine(gpus=[A100, T4, Gpu("NVIDIA GeForce GTX 1660 Ti", (7, 5))])
    checks = [check for check in doctor.gpu_checks(has_driver=True) if check.name != "CUDA libraries"]
    assert [(check.name, check.status) for check in checks] == [
        *(("CUDA build", OK), ("GPU", OK), ("GPU", OK), ("GPU", WARNING), ("XLA", OK))
    ]
    texts = [check.text for check in checks]
    assert texts[1] == "NVIDIA A100 (compute capability 8.0): Tensor Cores for float16 and bfloat16"
    assert texts[2].endswith("(compute capability 7.5): Tensor Cores for float16, no bfloat16")
    assert "no Tensor Cores" in texts[3]


def failing(text):
    """Returns a function that raises TensorFlow's error with this text."""
    return Mock(side_effect=tf.errors.InternalError(None, None, text))


def test_gpu_that_cannot_compute_is_an_error_of_the_gpu_and_not_of_xla(machine, monkeypatch):
    machine(gpus=[A100])
    monkeypatch.setattr(tf, "exp", failing("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"))
    *_, last = doctor.gpu_checks(has_driver=True)
    assert (last.name, last.status) == ("GPU", ERROR)
    assert "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" in last.text


def test_gpu_for_which_tensorflow_has_no_machine_code_is_a_warning(machine, monkeypatch):
    monkeypatch.setattr(tf, "exp", failing("ends the checks"))
    capabilities = ((5, 2), (7, 5), (8, 6), (9, 0), (12, 0))
    machine(gpus=[Gpu(f"GPU {major}.{minor}", (major, minor)) for major, minor in capabilities])
    texts = [check.text for check in doctor.gpu_checks(has_driver=True) if check.status == WARNING]
    found = [re.search("no machine code for GPU (.*?):", text) for text in texts]
    assert [match[1] for match in found if match] == ["5.2", "12.0"]


@pytest.mark.parametrize(
    ("gpus", "has_driver", "status"),
    [([], True, ERROR), ([], False, INFO), ([A100], True, INFO)],
)
def test_missing_libraries_are_an_error_only_where_the_gpu_is_not_seen(machine, monkeypatch, gpus, has_driver, status):
    machine(gpus=gpus)
    monkeypatch.setattr(doctor, "library_check", lambda package, missing_is: Check("CUDA libraries", missing_is, ""))
    assert first_check("CUDA libraries", has_driver).status == status


def test_gpu_that_a_build_without_cuda_cannot_use_is_an_error(machine):
    machine(build={})
    build = first_check("CUDA build", has_driver=True)
    assert (build.status, build.fix.endswith("pip install 'kmp[cuda]'")) == (ERROR, True)
    checks = list(doctor.gpu_checks(has_driver=False))
    assert [(check.name, check.status) for check in checks] == [("CUDA build", INFO), ("GPU", INFO), ("XLA", OK)]
    assert checks[1].text == "TensorFlow sees none: everything runs on the CPU"


HIDDEN = "unset CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(("visible", "fix"), [(None, "list_physical_devices"), ("-1", HIDDEN), ("", HIDDEN)])
def test_gpu_that_tensorflow_does_not_see_is_an_error(machine, monkeypatch, visible, fix):
    machine()
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    check = first_check("GPU", has_driver=True)
    assert check.status == ERROR
    assert fix in check.fix


def test_xla_that_does_not_compile_is_a_warning(machine, monkeypatch):
    machine()
    monkeypatch.setattr("kmp.policy.gpu_support.tf.function", lambda *_, **options: failing("libdevice not found"))
    check = first_check("XLA", has_driver=False)
    assert check.status == WARNING
    assert "libdevice not found" in check.text
    assert "jit_compile=False" in check.fix


@pytest.fixture
def without_gpu_checks(monkeypatch):
    """Replaces the checks of TensorFlow, the GPUs and XLA, which take most of the time of the command."""
    monkeypatch.setattr(doctor, "gpu_checks", lambda has_driver: ())


@pytest.mark.parametrize(
    ("float16", "status", "text"), [(2.0, 0, "2.00 times as fast as float32 here"), (0.5, 3, "is not faster")]
)
@pytest.mark.usefixtures("without_gpu_checks")
def test_doctor_prints_a_verdict_and_writes_it_as_json(tmp_path, monkeypatch, capsys, float16, status, text):
    monkeypatch.setattr(precision, "measure_machine", lambda: training_rates(float16, 1.0))
    assert main(["doctor", "--json", str(tmp_path / "new" / "doctor.json")]) == status
    printed = " ".join(capsys.readouterr().out.split())
    assert text in printed
    written = json.loads((tmp_path / "new" / "doctor.json").read_text())
    assert written["exit_status"] == status
    assert written["verdict"] in printed
    assert written["recommended"]["policy"] == ("mixed_float16" if float16 > 1 else "float32")


@pytest.mark.usefixtures("without_gpu_checks")
def test_json_on_the_standard_output_is_all_that_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(precision, "measure_machine", lambda: training_rates(2.0, 1.0))
    assert main(["doctor", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["recommended"]["policy"] == "mixed_float16"


@pytest.mark.parametrize(("output", "extra"), [(FileNotFoundError(), "cpu"), ("550.54, Tesla T4, 15360 MiB\n", "cuda")])
def test_doctor_without_tensorflow_names_the_command_that_installs_it(monkeypatch, capsys, nvidia_smi, output, extra):
    nvidia_smi(output)
    monkeypatch.setattr(installation, "tensorflow_packages", list)
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "does not work here: tensorflow is not installed" in printed
    assert printed.endswith(f"Run: pip install 'kmp[{extra}]'\n")


@pytest.mark.parametrize(("count", "status"), [(0, 1), (1, 1), (2, 0)])
@pytest.mark.usefixtures("without_gpu_checks")
def test_error_while_measuring_keeps_what_was_measured(tmp_path, monkeypatch, capsys, count, status):
    def out_of_memory():
        yield from training_rates(2.0, 1.0)[:count]  # the second is the training step
        raise tf.errors.ResourceExhaustedError(None, None, "failed to allocate memory")

    monkeypatch.setattr(precision, "measure_machine", out_of_memory)
    assert main(["doctor", "--json", str(tmp_path / "doctor.json")]) == status
    written = json.loads((tmp_path / "doctor.json").read_text())
    assert len(written["results"]) == 3 * count
    assert written["checks"][-1]["text"] == "incomplete: ResourceExhaustedError: failed to allocate memory"
    assert ("could not be measured" in written["verdict"]) == (count < 2)
    assert written["verdict"] in " ".join(capsys.readouterr().out.split())


def test_exception_of_a_check_is_an_error_of_the_gpu(monkeypatch, capsys):
    monkeypatch.setattr(tf.sysconfig, "get_build_info", failing("broken installation"))
    assert main(["doctor"]) == 1
    assert "does not work here: GPU: InternalError: broken installation." in capsys.readouterr().out


def test_interrupt_is_one_line_and_leaves_no_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "driver_check", Mock(side_effect=KeyboardInterrupt))
    assert main(["doctor", "--json", str(tmp_path / "doctor.json")]) == 130
    assert capsys.readouterr().err == "kmp: interrupted\n"
    assert not (tmp_path / "doctor.json").exists()
