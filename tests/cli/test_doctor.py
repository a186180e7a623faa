"""`kmp doctor`, with fakes of what this machine has not: a GPU, its driver, other packages."""

import importlib.metadata
import json
import subprocess

import pytest
import tensorflow as tf

import kmp
from kmp.backend.gpu_info import Gpu, Hardware
from kmp.bench import precision_comparison
from kmp.bench.timing import comparison
from kmp_cli import doctor, gpu_checks, installation, main
from kmp_cli.installation import ERROR, INFO, OK, WARNING, Check, Driver

A100 = Gpu("NVIDIA A100", (8, 0))
DRIVER = Driver("550.54", "12.4", (("NVIDIA A100", "40960 MiB"),))
NVIDIA_SMI = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <driver_version>550.54</driver_version>
  <cuda_version>12.4</cuda_version>
  <gpu id="00000000:01:00.0">
    <product_name>NVIDIA A100</product_name>
    <fb_memory_usage><total>40960 MiB</total><used>3 MiB</used></fb_memory_usage>
  </gpu>
</nvidia_smi_log>
"""


@pytest.fixture
def nvidia_smi(monkeypatch):
    """Returns a function that sets what `nvidia-smi` prints, or the error of starting it."""

    def set_output(output, returncode=0):
        def run(command, **options):
            if isinstance(output, Exception):
                raise output
            return subprocess.CompletedProcess(command, returncode, output, "")

        monkeypatch.setattr(subprocess, "run", run)

    return set_output


@pytest.fixture
def machine(monkeypatch):
    """Returns a function that sets TensorFlow's build and the GPUs that it sees."""

    def set_up(cuda=("12.5.1", "9"), gpus=(), libraries=OK):
        monkeypatch.setattr(gpu_checks, "cuda_build", lambda: cuda)
        monkeypatch.setattr(gpu_checks, "hardware", lambda: Hardware(tuple(gpus)))
        monkeypatch.setattr(
            gpu_checks, "library_check", lambda package, is_needed: Check("CUDA libraries", libraries, "")
        )
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return set_up


def checks_of(driver):
    return {(check.name, check.status): check for check in gpu_checks.gpu_checks(driver)}


def measured(float16, bfloat16, xla=1.0):
    """Results as `precision_comparison.measure` yields them, with these ratios to float32."""
    rates = {"float32": [100.0], "float16": [100.0 * float16], "bfloat16": [100.0 * bfloat16]}
    yield comparison("operations", "matrix product", "graph", rates, "GFLOP/s")
    yield comparison("training step", "block", "graph", rates, "tokens/s")
    compiled = {name: [xla * rate for rate in turns] for name, turns in rates.items()}
    yield comparison("training step", "block", "XLA", compiled, "tokens/s")


def test_driver_and_gpus_are_those_that_nvidia_smi_reports(nvidia_smi):
    nvidia_smi(NVIDIA_SMI)
    driver, check = installation.nvidia_driver()
    assert driver == DRIVER
    assert (check.status, check.text) == (OK, "550.54, for CUDA up to 12.4; NVIDIA A100 with 40960 MiB")


@pytest.mark.parametrize(
    ("output", "returncode", "status", "text"),
    [
        (FileNotFoundError(), 0, INFO, "nvidia-smi is not installed"),
        (subprocess.TimeoutExpired("nvidia-smi", 60), 0, WARNING, "does not run"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the driver.", 9, WARNING, "couldn't communicate"),
        ("", 9, WARNING, "exit status 9"),
        ("<nvidia_smi_log><driver_version>1</driver_version></nvidia_smi_log>", 0, INFO, "without a GPU"),
    ],
)
def test_machine_without_a_working_driver(nvidia_smi, output, returncode, status, text):
    nvidia_smi(output, returncode)
    driver, check = installation.nvidia_driver()
    assert (driver, check.status) == (None, status)
    assert text in check.text


def test_packages_of_this_environment_are_in_the_promised_range():
    names = {"Python", "kmp", "keras", "numpy", "tensorflow"}
    checks = list(installation.package_checks())
    assert {check.status for check in checks} <= {OK, WARNING}
    assert names <= set(checks[0].text.replace(",", "").split())


@pytest.mark.parametrize(
    ("version", "packages", "status", "text", "fix"),
    [
        ("2.15.0", ["tensorflow"], ERROR, "2.15.0; kmp needs tensorflow>=2.18", "pip install 'tensorflow>=2.18'"),
        ("2.21.0", ["tensorflow", "tensorflow_cpu"], WARNING, "both installed", "pip uninstall tensorflow"),
        (None, [], ERROR, "is not installed", "pip install 'kmp[cuda]'"),
    ],
)
def test_tensorflow_that_does_not_fit(monkeypatch, version, packages, status, text, fix):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name in packages else real(name))
    monkeypatch.setattr(installation, "tensorflow_packages", lambda: packages)
    check = list(installation.package_checks())[-1]
    assert (check.name, check.status) == ("tensorflow", status)
    assert text in check.text
    assert fix in check.fix


def test_missing_package_and_python_are_errors_with_the_command_that_installs_them(monkeypatch):
    def version(name):
        if name == "msgspec":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr("platform.python_version", lambda: "3.9.1")
    wrong = {check.name: check for check in installation.package_checks() if check.status == ERROR}
    assert set(wrong) == {"Python", "msgspec"}
    assert wrong["msgspec"].fix == "pip install 'msgspec>=0.19'"
    assert ">=3.11" in wrong["Python"].fix


@pytest.mark.parametrize("is_needed", [True, False])
def test_cuda_libraries_are_those_that_the_package_asks_for(monkeypatch, is_needed):
    requires = [
        "numpy>=1.26",
        'nvidia-cudnn-cu12<10,>=9.3; extra == "and-cuda"',
        'nvidia-cublas-cu12<13,>=12.5; extra == "and-cuda"',
        'nvidia-no-such-library-cu12>=12.5; extra == "and-cuda"',
    ]
    versions = {"nvidia-cudnn-cu12": "9.3.0", "nvidia-cublas-cu12": "11.0", "tensorflow": "2.21.0"}

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "requires", lambda package: requires)
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr("ctypes.CDLL", lambda file: {"libcublas.so.12": file}.get(file) or exec("raise OSError"))
    check = installation.library_check("tensorflow", is_needed)
    assert check.text.startswith("missing: no-such-library; found: cudnn 9.3.0, cublas libcublas.so.12")
    assert (check.status, check.fix) == (
        (ERROR, "pip install 'tensorflow[and-cuda]==2.21.0'") if is_needed else (INFO, "")
    )


def test_gpu_that_works(machine):
    machine(gpus=[A100])
    checks = checks_of(DRIVER)
    assert {status for _, status in checks} == {OK}
    assert checks["GPU", OK].text == "NVIDIA A100, compute capability 8.0: Tensor Cores for float16 and bfloat16"


def test_gpu_without_tensor_cores_is_a_warning(machine):
    machine(gpus=[Gpu("P100", (6, 0)), Gpu("T4", (7, 5))])
    checks = checks_of(DRIVER)
    assert "no Tensor Cores" in checks["GPU", WARNING].text
    assert checks["GPU", OK].text.endswith("float16, no bfloat16")


def test_gpu_that_a_build_without_cuda_cannot_use_is_an_error(machine):
    machine(cuda=None)
    assert checks_of(DRIVER)["CUDA build", ERROR].fix.endswith("pip install 'kmp[cuda]'")
    assert checks_of(None)["CUDA build", INFO].fix == ""


def test_driver_that_is_too_old_is_an_error(machine):
    machine()
    check = checks_of(Driver("470.1", "11.4", DRIVER.gpus))["NVIDIA driver", ERROR]
    assert "for CUDA up to 11.4, and TensorFlow is built with CUDA 12.5.1" in check.text
    assert ("NVIDIA driver", ERROR) not in checks_of(DRIVER)


def test_gpu_that_tensorflow_does_not_see_is_an_error(machine, monkeypatch):
    machine()
    assert "does not see" in checks_of(DRIVER)["GPU", ERROR].text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert checks_of(DRIVER)["GPU", ERROR].fix == "unset CUDA_VISIBLE_DEVICES"


def test_machine_without_a_gpu_has_no_error(machine):
    machine(libraries=INFO)
    assert not any(status == ERROR for _, status in checks_of(None))


def test_xla_that_does_not_compile_is_a_warning(machine, monkeypatch):
    machine()
    monkeypatch.setattr("kmp.backend.xla.tf.function", lambda *args, **options: _raise)
    check = checks_of(None)["XLA", WARNING]
    assert "libdevice not found" in check.text
    assert "jit_compile=False" in check.fix


def _raise(*args):
    raise tf.errors.InternalError(None, None, "libdevice not found")


@pytest.mark.parametrize(
    ("float16", "bfloat16", "xla", "expected"),
    [
        (0.5, 0.9, 1.0, ("float32", False, 1.0)),
        (0.5, 0.9, 2.0, ("float32", True, 1.0)),
        (2.0, 1.95, 1.0, ("mixed_bfloat16", False, 1.95)),
        (2.0, 1.0, 1.5, ("mixed_float16", True, 2.0)),
        (1.05, 1.05, 1.0, ("float32", False, 1.0)),
    ],
)
def test_recommended_is_the_fastest_policy_if_it_is_clearly_faster(float16, bfloat16, xla, expected):
    results = [result for compared in measured(float16, bfloat16, xla) for result in compared]
    best = precision_comparison.recommend(results)
    assert (best.policy, best.jit_compile, pytest.approx(best.speedup)) == expected


@pytest.mark.parametrize(
    ("float16", "status", "text"), [(2.0, 0, "2.00 times as fast as float32 here"), (0.5, 3, "is not faster")]
)
def test_doctor_prints_a_verdict_and_writes_it_as_json(tmp_path, monkeypatch, capsys, float16, status, text):
    monkeypatch.setattr(precision_comparison, "measure", lambda: measured(float16, 1.0))
    assert main(["doctor", "--json", str(tmp_path / "doctor.json")]) == status
    printed = " ".join(capsys.readouterr().out.split())
    assert text in printed
    written = json.loads((tmp_path / "doctor.json").read_text())
    assert written["exit_status"] == status
    assert written["verdict"] in printed
    assert written["recommended"]["policy"] == ("mixed_float16" if float16 > 1 else "float32")
    assert main(["doctor", "--json", "-"]) == status
    assert json.loads(capsys.readouterr().out)["verdict"] == written["verdict"]


def test_doctor_without_tensorflow_names_the_command_that_installs_it(monkeypatch, capsys):
    monkeypatch.setattr(installation, "tensorflow_packages", list)
    error = Check("import kmp", ERROR, "kmp needs TensorFlow.", "pip install 'kmp[cpu]'")
    monkeypatch.setattr(doctor, "_import_check", lambda driver: error)
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "does not work here: tensorflow: is not installed" in printed
    assert "pip install 'kmp[cuda]'" in printed


def test_file_that_cannot_be_written_is_an_error_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_examine", lambda console: pytest.fail("measured"))
    assert main(["doctor", "--json", str(tmp_path / "no" / "folder" / "file.json")]) == 1
    assert "No such file" in capsys.readouterr().err


@pytest.mark.slow
def test_each_precision_is_measured_on_this_machine():
    is_tf32_allowed = tf.config.experimental.tensor_float_32_execution_enabled()
    results = [result for compared in precision_comparison.measure() for result in compared]
    assert {result.variant for result in results} >= {"float32", "float16", "bfloat16"}
    assert {(result.section, result.mode) for result in results} == {
        ("operations", "graph"),
        ("training step", "graph"),
        ("training step", "XLA"),
    }
    assert all(result.value > 0 for result in results)
    assert tf.config.experimental.tensor_float_32_execution_enabled() == is_tf32_allowed
    assert kmp.hardware().gpus or "float32 without TF32" not in {result.variant for result in results}
