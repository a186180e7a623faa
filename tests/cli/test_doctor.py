"""`kmp doctor`, with fakes of what this machine has not: a GPU, its driver, other packages."""

import importlib.metadata
import json
import subprocess

import pytest
import tensorflow as tf

import kmp
from kmp.bench import precision_comparison
from kmp.bench.timing import comparison
from kmp.policy.hardware_support import Gpu, Hardware
from kmp_cli import doctor, gpu_checks, installation, main
from kmp_cli.installation import ERROR, INFO, OK, WARNING, Check, Driver

A100 = Gpu("NVIDIA A100", (8, 0))
BUILT_FOR = [("sm", (6, 0)), ("sm", (7, 0)), ("sm", (8, 0)), ("sm", (8, 9)), ("compute", (9, 0))]  # TensorFlow 2.21
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

    def set_up(cuda=("12.5.1", "9"), gpus=(), libraries=OK, error=None):
        monkeypatch.setattr(gpu_checks, "cuda_build", lambda: cuda)
        monkeypatch.setattr(gpu_checks, "compute_capabilities", lambda: BUILT_FOR)
        monkeypatch.setattr(gpu_checks, "hardware", lambda: Hardware(tuple(gpus)))
        monkeypatch.setattr(gpu_checks, "gpu_error", lambda: error)
        monkeypatch.setattr(gpu_checks, "library_check", lambda *arguments: Check("CUDA libraries", libraries, ""))
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
    checks = list(installation.package_checks("cpu"))
    assert {check.status for check in checks} <= {OK, WARNING}
    assert names <= set(checks[0].text.replace(",", "").split())


@pytest.fixture
def pci(tmp_path, monkeypatch):
    """A PCI bus with a disk, a GPU of NVIDIA, and a device without a class."""
    monkeypatch.setattr(installation, "_PCI", tmp_path)
    for address, vendor, device_class in (
        ("0000:00:04.0", "0x8086", "0x010802"),
        ("0000:01:00.0", "0x10de", "0x030200"),
    ):
        (tmp_path / address).mkdir()
        (tmp_path / address / "vendor").write_text(f"{vendor}\n")
        (tmp_path / address / "class").write_text(f"{device_class}\n")
    (tmp_path / "0000:02:00.0").mkdir()


@pytest.mark.parametrize("output", [FileNotFoundError(), "NVIDIA-SMI has failed."])
def test_gpu_without_a_working_driver_is_an_error(nvidia_smi, pci, output):
    nvidia_smi(output)
    driver, check = installation.nvidia_driver()
    assert (driver, check.status) == (None, ERROR)
    assert "but the machine has an NVIDIA GPU (PCI 0000:01:00.0)" in check.text
    assert "--gpus all" in check.fix


def test_gpu_whose_driver_works_is_not_looked_for_on_the_bus(nvidia_smi, pci):
    nvidia_smi(NVIDIA_SMI)
    assert installation.nvidia_driver()[1].status == OK


@pytest.mark.parametrize(
    ("version", "packages", "status", "text", "fix"),
    [
        ("2.15.0", ["tensorflow"], ERROR, "2.15.0; kmp needs tensorflow>=2.18", "pip install 'tensorflow>=2.18'"),
        ("2.21.0", ["tensorflow", "tensorflow_cpu"], WARNING, "both installed", "pip uninstall -y tensorflow"),
        (None, [], ERROR, "is not installed", "pip install 'kmp[cuda]'"),
    ],
)
def test_tensorflow_that_does_not_fit(monkeypatch, version, packages, status, text, fix):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name in packages else real(name))
    monkeypatch.setattr(installation, "tensorflow_packages", lambda: packages)
    check = list(installation.package_checks("cuda"))[-1]
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
    monkeypatch.setattr("sys.version_info", (3, 9, 1, "final", 0))
    wrong = {check.name: check for check in installation.package_checks("cpu") if check.status == ERROR}
    assert set(wrong) == {"Python", "msgspec"}
    assert wrong["msgspec"].fix == "pip install 'msgspec>=0.19'"
    assert ">=3.11" in wrong["Python"].fix


@pytest.mark.parametrize("missing_is", [ERROR, INFO])
def test_cuda_libraries_are_those_that_the_package_asks_for(monkeypatch, missing_is):
    requires = [
        "numpy>=1.26",
        'nvidia-cudnn-cu12<10,>=9.3; extra == "and-cuda"',
        'nvidia-cublas-cu12<13,>=12.5; extra == "and-cuda"',
        'nvidia-cuda-runtime-cu12==12.5.82; extra == "and-cuda"',
        'nvidia-nccl-cu12<3,>=2.25; extra == "and-cuda"',
        'nvidia-no-such-library-cu12>=12.5; extra == "and-cuda"',
    ]
    versions = {"nvidia-cudnn-cu12": "9.3.0", "nvidia-cublas-cu12": "11.0", "tensorflow": "2.21.0"}
    versions["nvidia-nccl-cu12"] = "2.20"

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "requires", lambda package: requires)
    monkeypatch.setattr(importlib.metadata, "version", version)
    on_system = ("libcublas.so.12", "libcudart.so.12")
    monkeypatch.setattr("ctypes.CDLL", lambda file: file if file in on_system else exec("raise OSError"))
    check = installation.library_check("tensorflow", missing_is, "not needed")
    found = "cudnn 9.3.0, cublas libcublas.so.12, cuda-runtime libcudart.so.12"
    missing = "nccl (2.20 is installed, not <3,>=2.25), no-such-library"
    assert check.text == f"missing: {missing}; found: {found}" + ("; not needed" if missing_is == INFO else "")
    fix = "pip install 'tensorflow[and-cuda]==2.21.0'" if missing_is == ERROR else ""
    assert (check.status, check.fix) == (missing_is, fix)


def test_gpu_that_works(machine):
    machine(gpus=[A100])
    checks = checks_of(DRIVER)
    assert {status for _, status in checks} == {OK}
    assert checks["GPU", OK].text == "NVIDIA A100, compute capability 8.0: Tensor Cores for float16 and bfloat16"


def test_gpu_without_tensor_cores_is_a_warning(machine):
    for gpu in (Gpu("P100", (6, 0)), Gpu("NVIDIA GeForce GTX 1660 Ti", (7, 5)), Gpu("NVIDIA T1000", (7, 5))):
        machine(gpus=[gpu, Gpu("Tesla T4", (7, 5))])
        checks = checks_of(DRIVER)
        assert "no Tensor Cores" in checks["GPU", WARNING].text
        assert checks["GPU", OK].text.endswith("float16, no bfloat16")


@pytest.mark.parametrize(
    ("capability", "text"),
    [
        ((7, 5), None),
        ((8, 6), None),
        ((9, 0), None),
        ((12, 0), "the driver compiles them at the first start, which can take 30 minutes"),
        ((5, 2), "TensorFlow has no kernels for NVIDIA GPU"),
    ],
)
def test_gpu_for_which_tensorflow_has_no_machine_code(machine, capability, text):
    machine(gpus=[Gpu("NVIDIA GPU", capability)])
    found = list(gpu_checks._kernel_check(Gpu("NVIDIA GPU", capability)))
    assert [check.status for check in found] == ([WARNING] if text else [])
    assert all(text in check.text for check in found)


def test_driver_that_nvidia_smi_does_not_find_is_no_error_if_tensorflow_sees_the_gpu(machine):
    missing = Check("NVIDIA driver", ERROR, "none, but the machine has an NVIDIA GPU", "install it")
    machine()
    assert gpu_checks.without_errors_of_driver(missing) == missing
    machine(gpus=[A100])
    assert gpu_checks.without_errors_of_driver(missing).status == INFO


def test_gpu_that_cannot_start_is_an_error_of_the_gpu_and_not_of_xla(machine):
    machine(gpus=[A100], error="failed call to cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH")
    checks = checks_of(DRIVER)
    assert "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" in checks["GPU", ERROR].text
    assert not any(name == "XLA" for name, _ in checks)


def test_libraries_that_a_working_gpu_does_not_miss_are_no_error(machine, monkeypatch):
    machine(gpus=[A100])
    monkeypatch.setattr(gpu_checks, "library_check", lambda package, *rest: Check("CUDA libraries", rest[0], rest[1]))
    assert checks_of(DRIVER)["CUDA libraries", INFO].text == "the GPU works without them"


def test_gpu_that_a_build_without_cuda_cannot_use_is_an_error(machine):
    machine(cuda=None)
    assert checks_of(DRIVER)["CUDA build", ERROR].fix.endswith("pip install 'kmp[cuda]'")
    assert checks_of(None)["CUDA build", INFO].fix == ""


def test_driver_that_is_too_old_is_an_error(machine):
    machine()
    old = Driver("470.1", "11.4", DRIVER.gpus)
    check = checks_of(old)["NVIDIA driver", ERROR]
    assert "supports CUDA up to 11.4, and TensorFlow is built with CUDA 12.5.1" in check.text
    assert ("NVIDIA driver", ERROR) not in checks_of(DRIVER)
    machine(gpus=[A100])  # with a compatibility library
    assert ("NVIDIA driver", WARNING) in checks_of(old)


def test_gpu_that_tensorflow_does_not_see_is_an_error(machine, monkeypatch):
    machine()
    assert "does not see" in checks_of(DRIVER)["GPU", ERROR].text
    for hidden in ("-1", "", "1", "none"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert checks_of(DRIVER)["GPU", ERROR].fix == "unset CUDA_VISIBLE_DEVICES"
    for visible in ("0", "0,1", "GPU-8f6c"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert "does not see" in checks_of(DRIVER)["GPU", ERROR].text


def test_machine_without_a_gpu_has_no_error(machine):
    machine(libraries=INFO)
    assert not any(status == ERROR for _, status in checks_of(None))


def test_xla_that_does_not_compile_is_a_warning(machine, monkeypatch):
    machine()
    monkeypatch.setattr("kmp.policy.hardware_support.tf.function", lambda *args, **options: _raise)
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
        (1.3, 1.3, 1.09, ("mixed_bfloat16", False, 1.3 / 1.09)),
        (1.12, 1.02, 1.0, ("mixed_float16", False, 1.12)),
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
    error = Check("import kmp", ERROR, "kmp needs TensorFlow.")
    monkeypatch.setattr(doctor, "_import_check", lambda extra: error)
    for driver, extra in ((None, "cpu"), (DRIVER, "cuda")):
        found = driver, Check("NVIDIA driver", OK if driver else INFO, "")
        monkeypatch.setattr(installation, "nvidia_driver", lambda found=found: found)
        assert main(["doctor"]) == 1
        printed = capsys.readouterr().out
        assert "does not work here: tensorflow is not installed" in printed
        assert printed.endswith(f"Run: pip install 'kmp[{extra}]'\n")


def test_file_that_cannot_be_written_is_an_error_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_examine", lambda console: pytest.fail("measured"))
    assert main(["doctor", "--json", str(tmp_path / "no" / "folder" / "file.json")]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(("count", "status"), [(0, 1), (1, 1), (2, 0)])
def test_error_while_measuring_keeps_what_was_measured(tmp_path, monkeypatch, capsys, count, status):
    def out_of_memory():
        yield from list(measured(2.0, 1.0))[:count]  # the second is the training step
        raise tf.errors.ResourceExhaustedError(None, None, "failed to allocate memory")

    monkeypatch.setattr(precision_comparison, "measure", out_of_memory)
    assert main(["doctor", "--json", str(tmp_path / "doctor.json")]) == status
    written = json.loads((tmp_path / "doctor.json").read_text())
    assert len(written["results"]) == 3 * count
    assert written["checks"][-1]["text"] == "incomplete: ResourceExhaustedError: failed to allocate memory"
    assert ("could not be measured" in written["verdict"]) == (count < 2)
    assert written["verdict"] in " ".join(capsys.readouterr().out.split())


def test_exception_of_a_check_is_an_error_of_the_gpu(monkeypatch, capsys):
    def fail(driver):
        yield Check("CUDA build", OK, "TensorFlow is built with CUDA 12.5.1")
        raise RuntimeError("broken installation")

    monkeypatch.setattr(gpu_checks, "gpu_checks", fail)
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "CUDA build: TensorFlow is built" in printed
    assert "does not work here: GPU: RuntimeError: broken installation." in printed


def test_training_step_is_smaller_if_the_memory_is_not_enough(monkeypatch):
    def compare(size, mode, formats):
        if size[0] > 8:
            raise tf.errors.ResourceExhaustedError(None, None, "out of memory")
        return size

    monkeypatch.setattr(precision_comparison, "_compare_step_of", compare)
    sizes = precision_comparison._sizes_of_step(Hardware((A100,)))
    assert precision_comparison._compare_training("graph", ["float32"], sizes) == sizes[-1]


def test_interrupted_doctor_prints_one_line_and_leaves_no_empty_file(tmp_path, monkeypatch, capsys):
    def interrupt(console):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "_examine", interrupt)
    assert main(["doctor", "--json", str(tmp_path / "doctor.json")]) == 130
    assert capsys.readouterr().err == "kmp: interrupted\n"
    assert not (tmp_path / "doctor.json").exists()


def test_formats_are_those_that_the_gpu_computes_in():
    t4, a100 = Hardware((Gpu("T4", (7, 5)),)), Hardware((A100,))
    assert precision_comparison.formats_on(t4) == ["float32", "float16"]
    assert precision_comparison.formats_on(a100) == ["float32", "float32 without TF32", "float16", "bfloat16"]
    assert precision_comparison.formats_on(Hardware(())) == ["float32", "float16", "bfloat16"]


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
