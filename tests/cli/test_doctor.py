"""`kmp doctor`, with fakes of what this machine has not: a GPU, its driver, other packages."""

import importlib.metadata
import json
import os
import re
from unittest.mock import Mock

import pytest
import tensorflow as tf
from conftest import training_rates

import kmp
from kmp.enabling import Gpu
from kmp_bench import environment_variables, layer_times, precision
from kmp_bench.measurement import MeasurementError, comparison
from kmp_cli import doctor, main
from kmp_cli.doctor import ERROR, INFO, OK, WARNING

A100, T4 = Gpu("NVIDIA A100", (8, 0)), Gpu("Tesla T4", (7, 5))
CUDA_BUILD = {  # of TensorFlow 2.21
    "is_cuda_build": True,
    "cuda_version": "12.5.1",
    "cudnn_version": "9",
    "cuda_compute_capabilities": ["sm_60", "sm_70", "sm_80", "sm_89", "compute_90"],
}


@pytest.fixture(scope="module")
def packages():
    """The packages of this environment: to list them takes most of a second."""
    return importlib.metadata.packages_distributions()


@pytest.fixture(autouse=True)
def listed_once(monkeypatch, packages):
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: packages)


@pytest.fixture
def nvidia_smi(monkeypatch, tmp_path):
    """Returns a function that installs a `nvidia-smi` with an output and exit status."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def install(output, status=0, mode=0o755):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{output}'\nexit {status}\n")
        (tmp_path / "nvidia-smi").chmod(mode)

    return install


@pytest.fixture
def machine(monkeypatch):
    """Returns a function that sets TensorFlow's build and the GPUs that it sees."""

    def set_up(build=CUDA_BUILD, gpus=()):
        monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: build)
        monkeypatch.setattr(kmp, "gpus", lambda: tuple(gpus))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return set_up


@pytest.fixture
def install(monkeypatch):
    """Returns a function that sets the packages which contain TensorFlow and Keras.

    Those of Keras are by default the installed ones.
    """
    of_keras = doctor.packages_of("keras")

    def set_up(tensorflow, keras=of_keras):
        packages = {"tensorflow": list(tensorflow), "keras": list(keras)}
        monkeypatch.setattr(doctor, "packages_of", packages.__getitem__)

    return set_up


@pytest.fixture
def versions(monkeypatch):
    """The versions of packages that replace those of this environment.

    `None` where one is not installed.
    """
    replaced, real = {}, importlib.metadata.version

    def version(name):
        found = replaced[name] if name in replaced else real(name)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    return replaced


@pytest.mark.parametrize(
    ("script", "status", "text"),
    [
        (
            ["550.54, Tesla T4, 15360 MiB\n550.54, Tesla T4, 15360 MiB"],
            OK,
            "550.54, Tesla T4, 15360 MiB; 550.54, Te",
        ),
        (None, INFO, "nvidia-smi is not installed"),
        (["", 0, 0o644], WARNING, "nvidia-smi does not run: [Errno 13] Permission denied"),
        (["", 0], WARNING, "nvidia-smi reports no GPU"),
        (
            ["It failed because it could not\ncommunicate with the driver.", 9],
            WARNING,
            "status 9: It failed because it could not; communicate",
        ),
    ],
)
def test_driver_and_gpus_are_those_that_nvidia_smi_reports(nvidia_smi, script, status, text):
    if script is not None:
        nvidia_smi(*script)
    check = doctor.driver_check()
    assert (check.status, text in check.text) == (status, True)


def test_packages_of_this_environment_are_in_the_promised_range():
    (check,) = doctor.package_checks("cpu")
    assert check.status == OK
    expected = {"Python", "kmp", "numpy", *doctor.packages_of("keras")}
    assert expected <= set(check.text.replace(",", "").split())
    assert "tensorflow" in check.text


@pytest.mark.parametrize(
    ("package", "version", "text", "fix"),
    [
        (
            "tensorflow",
            "2.15.0",
            "2.15.0; kmp needs tensorflow>=2.18",
            "pip install 'tensorflow>=2.18'",
        ),
        ("tensorflow", None, "not installed", "pip install 'kmp[cuda]'"),
        ("msgspec", None, "not installed; kmp needs msgspec>=0.19", "pip install 'msgspec>=0.19'"),
    ],
)
def test_package_that_does_not_fit_is_an_error(install, versions, package, version, text, fix):
    versions |= {"tensorflow": "2.21.0", package: version}
    install(["tensorflow"] if versions["tensorflow"] else [])
    wrong, rest = doctor.package_checks("cuda")
    assert wrong == doctor.Check(package, ERROR, text, fix)
    assert rest.status == OK


@pytest.mark.parametrize(
    ("module", "other"), [("tensorflow", "tensorflow-cpu"), ("keras", "keras-nightly")]
)
def test_two_packages_that_contain_the_same_are_a_warning(install, versions, module, other):
    versions |= {"tensorflow": "2.21.0", "keras": "3.15.1"}
    install(**{"tensorflow": ["tensorflow"], module: [module, other]})
    warning, rest = doctor.package_checks("cuda")
    assert (warning.name, warning.status, rest.status) == (module, WARNING, OK)
    assert warning.text.startswith(f"{module} and {other} are both installed")
    assert warning.fix.startswith(f"pip uninstall -y {module} {other}")


def test_nightly_package_of_keras_is_keras(install, versions):
    versions |= {"keras-nightly": "3.16.0.dev2026102704", "keras": None, "tensorflow": "2.21.0"}
    install(["tensorflow"], keras=["keras-nightly"])
    (check,) = doctor.package_checks("cpu")
    assert check.status == OK
    assert "keras-nightly 3.16.0.dev2026102704" in check.text


@pytest.mark.parametrize("is_installed", [False, True])
def test_cuda_libraries_are_those_that_the_package_asks_for(
    monkeypatch, install, versions, is_installed
):
    libraries = [
        "nvidia-cudnn-cu12<10,>=9.3",
        "nvidia-cublas-cu12<13,>=12.5",
        "nvidia-nccl-cu12<3,>=2.25",
    ]
    requires = ["numpy>=1.26", *(f'{library}; extra == "and-cuda"' for library in libraries)]
    monkeypatch.setattr(importlib.metadata, "requires", lambda package: requires)
    install(["tensorflow"])
    versions |= {"tensorflow": "2.21.0", "nvidia-cudnn-cu12": "9.3.0"}
    installed = ("12.6", "2.26") if is_installed else (None, "2.20")
    versions["nvidia-cublas-cu12"], versions["nvidia-nccl-cu12"] = installed
    check = doctor.library_check()
    if is_installed:
        assert (check.status, check.text) == (OK, "those of tensorflow[and-cuda] are installed")
    else:
        missing = "nvidia-cublas-cu12<13,>=12.5 (not installed), nvidia-nccl-cu12<3,>=2.25 (2.20)"
        assert (check.status, check.text) == (
            ERROR,
            f"TensorFlow sees no GPU, and pip has not installed {missing}",
        )
        assert check.fix == "pip install 'tensorflow[and-cuda]==2.21.0'"


def test_gpu_that_works_is_named_with_its_capability(machine):
    machine(gpus=[A100, T4, Gpu("NVIDIA GeForce GTX 1660 Ti", (7, 5))])
    checks = list(doctor.gpu_checks(has_driver=True))
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


def test_gpu_that_cannot_compute_is_an_error_of_the_gpu_and_not_of_xla(
    nvidia_smi, machine, monkeypatch, capsys
):
    nvidia_smi("550.54, NVIDIA A100, 40960 MiB")
    machine(gpus=[A100])
    monkeypatch.setattr(tf, "exp", failing("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"))
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "does not work here: GPU: InternalError: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH." in printed
    assert "XLA" not in printed


def test_gpu_for_which_tensorflow_has_no_machine_code_is_a_warning(machine):
    capabilities = ((5, 2), (7, 5), (8, 6), (9, 0), (12, 0))
    machine(gpus=[Gpu(f"GPU {major}.{minor}", (major, minor)) for major, minor in capabilities])
    texts = [check.text for check in doctor.gpu_checks(has_driver=True) if check.status == WARNING]
    found = [re.search("no machine code for GPU (.*?):", text) for text in texts]
    assert [match[1] for match in found if match] == ["5.2", "12.0"]


def test_gpu_that_a_build_without_cuda_cannot_use_is_an_error(machine):
    machine(build={})
    build, *_ = doctor.gpu_checks(has_driver=True)
    assert (build.status, build.fix.endswith("pip install 'kmp[cuda]'")) == (ERROR, True)
    checks = list(doctor.gpu_checks(has_driver=False))
    assert [(check.name, check.status) for check in checks] == [
        ("CUDA build", INFO),
        ("GPU", INFO),
        ("XLA", OK),
    ]
    assert checks[1].text == "TensorFlow sees none: everything runs on the CPU"


LOG = "list_physical_devices"
HIDDEN = ("GPU", "unset CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("0", [("CUDA libraries", "pip install"), ("GPU", LOG)]), ("-1", [HIDDEN]), ("", [HIDDEN])],
)
def test_gpu_that_tensorflow_does_not_see_is_hidden_or_else_libraries_may_be_missing(
    machine, monkeypatch, visible, expected
):
    machine()
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda package: ['nvidia-nosuch-cu12; extra == "and-cuda"']
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    errors = [check for check in doctor.gpu_checks(has_driver=True) if check.status == ERROR]
    assert [check.name for check in errors] == [name for name, _ in expected]
    assert all(fix in check.fix for check, (_, fix) in zip(errors, expected, strict=True))


def test_xla_that_does_not_compile_is_a_warning(machine, monkeypatch):
    machine()
    monkeypatch.setattr(tf, "function", lambda *_, **options: failing("libdevice not found"))
    # Nor is a machine without a GPU an error of the CUDA build.
    checks = list(doctor.gpu_checks(has_driver=False))
    assert [(check.name, check.status) for check in checks] == [
        ("CUDA build", OK),
        ("GPU", INFO),
        ("XLA", WARNING),
    ]
    assert "libdevice not found" in checks[-1].text
    assert "jit_compile=False" in checks[-1].fix


@pytest.fixture
def without_gpu_checks(monkeypatch):
    """Replaces the checks of TensorFlow, the GPUs and XLA, which take most of the time."""
    monkeypatch.setattr(doctor, "gpu_checks", lambda has_driver: ())
    monkeypatch.setattr(kmp, "gpus", tuple)  # for one, more is measured in other processes


@pytest.mark.parametrize(
    ("float16", "status", "text"),
    [(2.0, 0, "2.00 times as fast as float32 here"), (0.5, 3, "is not faster")],
)
@pytest.mark.usefixtures("without_gpu_checks")
def test_doctor_prints_a_verdict_and_writes_it_as_json(
    tmp_path, monkeypatch, capsys, float16, status, text
):
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


@pytest.mark.parametrize("extra", ["cpu", "cuda"])
def test_doctor_without_tensorflow_names_the_command_that_installs_it(
    install, capsys, nvidia_smi, extra
):
    if extra == "cuda":
        nvidia_smi("550.54, Tesla T4, 15360 MiB")
    install([])
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "does not work here: tensorflow: not installed." in printed
    assert printed.endswith(f"Run: pip install 'kmp[{extra}]'\n")


@pytest.mark.parametrize(("count", "status"), [(0, 1), (1, 1), (2, 0)])
@pytest.mark.usefixtures("without_gpu_checks")
def test_error_while_measuring_keeps_what_was_measured(
    tmp_path, monkeypatch, capsys, count, status
):
    def out_of_memory():
        yield from training_rates(2.0, 1.0)[:count]  # the second is the training step
        raise tf.errors.ResourceExhaustedError(None, None, "failed to allocate memory")

    monkeypatch.setattr(precision, "measure_machine", out_of_memory)
    assert main(["doctor", "--json", str(tmp_path / "doctor.json")]) == status
    written = json.loads((tmp_path / "doctor.json").read_text())
    assert len(written["results"]) == 3 * count
    assert (
        "The measurement is incomplete: ResourceExhaustedError: failed to allocate memory"
        in written["verdict"]
    )
    assert ("could not be measured" in written["verdict"]) == (count < 2)
    assert written["verdict"] in " ".join(capsys.readouterr().out.split())


def test_interrupt_is_one_line_and_leaves_no_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "driver_check", Mock(side_effect=KeyboardInterrupt))
    assert main(["doctor", "--json", str(tmp_path / "doctor.json")]) == 130
    assert capsys.readouterr().err == "kmp: interrupted\n"
    assert not (tmp_path / "doctor.json").exists()


THREADS = "TF_GPU_THREAD_MODE=gpu_private TF_GPU_THREAD_COUNT=2"
PERSISTENT = "TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT=1"
BOTH = f"{THREADS} {PERSISTENT}"
SETTINGS = ("", THREADS, PERSISTENT, BOTH)


@pytest.fixture
def environment_of_processes(monkeypatch):
    """Returns a function that sets the rate for each setting, and returns the settings that ran."""
    ran, rates = [], {}

    def run(function):
        assert function is environment_variables.images_per_second
        names = [name for name in environment_variables.NAMES if name in os.environ]
        ran.append(" ".join(f"{name}={os.environ[name]}" for name in names))
        if ran[-1] not in rates:
            raise MeasurementError("images_per_second() was killed.")
        return [rates[ran[-1]]] * 3

    def set_up(*of_settings):
        rates.update(zip(SETTINGS, of_settings, strict=False))
        return ran

    monkeypatch.setattr(precision, "measure_machine", lambda: training_rates(2.0, 1.0))
    monkeypatch.setattr(layer_times, "measure_layers", lambda rows, images: [])
    monkeypatch.setattr(environment_variables, "in_new_process", run)
    return set_up


@pytest.mark.usefixtures("without_gpu_checks")
def test_times_of_layers_on_a_gpu_say_which_way_is_in_use(
    machine, environment_of_processes, monkeypatch, capsys, tmp_path
):
    machine(gpus=[A100])
    environment_of_processes(100.0)

    def measured(rows, images):
        for case, seconds in (("gelu", 1e-5), ("softmax", 4e-5)):
            yield comparison("layers", case, "graph", {"Keras": [2e-5] * 2, "kmp": [seconds] * 2})

    monkeypatch.setattr(layer_times, "measure_layers", measured)
    assert main(["doctor", "--json", str(tmp_path / "doctor.json")]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"gelu +│ kmp +│ +10 │ +0.50", printed)
    assert "Slower than Keras' here: softmax. kmp.enable(jit_compile=False)" in printed
    written = json.loads((tmp_path / "doctor.json").read_text())["layers"]
    assert [result["value"] for result in written["results"]] == [2e-5, 1e-5, 2e-5, 4e-5]


@pytest.mark.parametrize(
    ("rates", "export", "advice"),
    [
        ([100.0, 108.0, 101.0], THREADS, "this trains 1.08 times as fast"),
        ([100.0, 90.0, 110.0], PERSISTENT, "an overflow may give NaN"),
        ([100.0, 102.0, 80.0], "", f"3 % faster here: `{THREADS}` and `{PERSISTENT}`"),
        ([100.0, 108.0, 105.0, 112.0], BOTH, "this trains 1.12 times as fast"),
        ([100.0, 108.0, 105.0, 104.0], THREADS, "this trains 1.08 times as fast"),
    ],
)
@pytest.mark.usefixtures("without_gpu_checks")
def test_environment_variables_that_help_are_a_line_to_copy(
    machine, environment_of_processes, monkeypatch, capsys, tmp_path, rates, export, advice
):
    machine(gpus=[A100])
    monkeypatch.setenv("TF_GPU_THREAD_COUNT", "8")  # of the user: not set for the other settings
    ran = environment_of_processes(*rates)
    assert main(["doctor", "--json", str(tmp_path / "doctor.json")]) == 0
    assert ran == list(SETTINGS[: len(rates)])
    assert os.environ["TF_GPU_THREAD_COUNT"] == "8"
    printed = capsys.readouterr().out
    assert ("\nexport " in printed) == bool(export)
    assert f"\nexport {export}\n" in printed or not export
    written = json.loads((tmp_path / "doctor.json").read_text())["environment"]
    assert written["export"] == (f"export {export}" if export else "")
    assert advice in written["advice"]
    assert written["advice"] in printed
    assert [result["value"] for result in written["results"]] == rates


@pytest.mark.usefixtures("without_gpu_checks")
def test_process_that_fails_leaves_the_verdict(machine, environment_of_processes, capsys):
    machine(gpus=[A100])
    environment_of_processes(100.0)
    assert main(["doctor", "--json", "-"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert "images_per_second() was killed" in written["environment"]["advice"]
    assert "2.00 times as fast" in written["verdict"]


@pytest.mark.usefixtures("without_gpu_checks")
def test_environment_variables_are_not_measured_without_a_gpu(environment_of_processes, capsys):
    ran = environment_of_processes(100.0)
    assert main(["doctor", "--json", "-"]) == 0
    assert "environment" not in json.loads(capsys.readouterr().out)
    assert ran == []
