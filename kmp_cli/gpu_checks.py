"""Whether TensorFlow sees the GPUs of this machine, and what they can compute. Imports TensorFlow."""

import os
import re
import textwrap
from collections.abc import Iterator

import tensorflow as tf

from kmp.policy import Gpu, hardware, xla_error
from kmp_cli.installation import ERROR, INFO, OK, WARNING, Check, Driver, library_check, tensorflow_packages

_LOG = "python -c \"import tensorflow as tf; tf.config.list_physical_devices('GPU')\"  # logs TensorFlow's reason"
_DRIVERS = "https://www.nvidia.com/drivers"


def gpu_checks(driver: Driver | None) -> Iterator[Check]:
    """Checks TensorFlow's build, its CUDA libraries, the GPUs that it sees, and XLA.

    Args:
        driver: The driver of this machine's GPUs; `None` without one.
    """
    cuda, gpus = cuda_build(), hardware().gpus
    package = next(iter(tensorflow_packages()), "tensorflow")
    if cuda:
        yield Check("CUDA build", OK, f"TensorFlow is built with CUDA {cuda[0]} and cuDNN {cuda[1]}")
    elif driver:
        fix = f"pip uninstall -y {package} && pip install 'kmp[cuda]'"
        yield Check("CUDA build", ERROR, "TensorFlow is built without CUDA and cannot use the GPU", fix)
    else:
        yield Check("CUDA build", INFO, "TensorFlow is built without CUDA")
    if cuda and driver and _major(driver.cuda_version) < _major(cuda[0]):
        text = f"too old: it supports CUDA up to {driver.cuda_version}, and TensorFlow is built with CUDA {cuda[0]}"
        yield Check(
            "NVIDIA driver", WARNING if gpus else ERROR, text, f"nvidia-smi  # after the update from {_DRIVERS}"
        )
    if cuda and gpus:
        yield library_check(package, INFO, "the GPU works without them")
    elif cuda:
        yield library_check(package, ERROR if driver else INFO, "not needed without a GPU")
    if cuda and driver and not gpus:
        yield _unseen(driver)
    for gpu in gpus:
        yield _gpu_check(gpu)
        yield from _kernel_check(gpu)
    if not gpus and not driver:
        yield Check("GPU", INFO, "TensorFlow sees none: everything runs on the CPU")
    error = gpu_error() if gpus else None
    if error:
        yield Check("GPU", ERROR, f"cannot compute: {textwrap.shorten(error, 300)}", _LOG)
    else:
        yield _xla_check()


def without_errors_of_driver(check: Check) -> Check:
    """Returns the check of the driver, without an error if TensorFlow sees a GPU: a container may lack `nvidia-smi`."""
    if check.status != ERROR or not hardware().gpus:
        return check
    return Check(check.name, INFO, "unknown (nvidia-smi does not work, but TensorFlow sees a GPU)")


def _unseen(driver: Driver) -> Check:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not _names_a_gpu(visible.split(",")[0].strip(), len(driver.gpus)):
        text = f"hidden by the environment variable CUDA_VISIBLE_DEVICES={visible!r}"
        return Check("GPU", ERROR, text, "unset CUDA_VISIBLE_DEVICES")
    return Check("GPU", ERROR, "TensorFlow does not see the GPU", _LOG)


def _names_a_gpu(text: str, count: int) -> bool:
    return int(text) < count if text.isdecimal() else text.startswith(("GPU-", "MIG-"))


def _gpu_check(gpu: Gpu) -> Check:
    capability = ".".join(map(str, gpu.compute_capability or ())) or "unknown"
    text = f"{gpu.name}, compute capability {capability}: "
    if not gpu.tensor_cores:
        return Check("GPU", WARNING, text + "no Tensor Cores, so float16 saves memory, but hardly any time")
    return Check("GPU", OK, text + "Tensor Cores for float16" + (" and bfloat16" if gpu.bfloat16 else ", no bfloat16"))


def _kernel_check(gpu: Gpu) -> Iterator[Check]:
    """Checks that TensorFlow was built for a GPU: with machine code, or with PTX, which the driver compiles."""
    built_for, own = compute_capabilities(), gpu.compute_capability
    if not built_for or own is None:
        return
    if any(target[0] == own[0] and target[1] <= own[1] for code, target in built_for if code == "sm"):
        return
    if ("compute", own) in built_for:
        return
    update = "pip install --upgrade 'tensorflow[and-cuda]'  # or tf-nightly, if there is no newer version"
    if any(target <= own for code, target in built_for if code == "compute"):
        text = f"TensorFlow has no compiled kernels for {gpu.name}: the driver compiles them at the first start"
        yield Check("GPU", WARNING, f"{text}, which can take 30 minutes", update)
    else:
        yield Check("GPU", WARNING, f"TensorFlow has no kernels for {gpu.name}", update)


def _xla_check() -> Check:
    error = xla_error()
    if error is None:
        return Check("XLA", OK, "compiles")
    return Check("XLA", WARNING, f"does not compile: {textwrap.shorten(error, 300)}", "jit_compile=False in compile")


def _major(version: str) -> int:
    """Returns the major version; that of an unknown version is high, so that it is not called too old."""
    number = version.partition(".")[0]
    return int(number) if number.isdecimal() else 1000


def cuda_build() -> tuple[str, str] | None:
    """Returns the versions of CUDA and cuDNN that TensorFlow was built with; `None` if it was built without CUDA."""
    info = tf.sysconfig.get_build_info()
    if not info.get("is_cuda_build"):
        return None
    return str(info.get("cuda_version", "unknown")), str(info.get("cudnn_version", "unknown"))


def compute_capabilities() -> list[tuple[str, tuple[int, int]]]:
    """Returns what TensorFlow's CUDA kernels were compiled for.

    Returns:
        Pairs such as `("sm", (8, 0))`, machine code for 8.0 and later versions 8.x, and `("compute", (9, 0))`, machine
        code for 9.0 and PTX for all later versions. Empty if TensorFlow was built without CUDA.
    """
    names = tf.sysconfig.get_build_info().get("cuda_compute_capabilities", [])
    found = (re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", name) for name in names)
    return [(match[1], (int(match[2]), int(match[3]))) for match in found if match]


def gpu_error() -> str | None:
    """Returns why the first GPU cannot compute in float32 and float16; `None` if it can."""
    try:
        with tf.device("GPU:0"):
            for dtype in (tf.float32, tf.float16):  # a product is NVIDIA's kernel, the others are TensorFlow's
                matrix = tf.cast(tf.random.normal((64, 64)), dtype)
                tf.exp(matrix @ matrix * matrix).numpy()
    except (tf.errors.OpError, RuntimeError) as reason:
        return str(reason)
    return None
