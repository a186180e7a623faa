"""Which policy the GPUs of this machine support in hardware."""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from kmp.utils.float_formats import BFLOAT16, FLOAT16

logger = logging.getLogger("kmp")

# GPUs of the Turing chips TU116 and TU117, which have compute capability 7.5 and no Tensor Cores.
# Source: NVIDIA's data sheets.
_NO_TENSOR_CORES = re.compile(r"GTX 16\d\d|MX[45]50|CMP 30HX|\bT(400|500|550|600|1000|1200|2000)\b")
_HOW_TO_COMPARE = (
    "What float16 and bfloat16 lose of your model: kmp.audit(model, batch) before training, and the"
    " report of a 16-bit training with kmp.callbacks.defaults(log_dir=...)."
)
_logged: set[str] = set()  # the dtypes of which a message was logged


@dataclass(frozen=True)
class Gpu:
    """A GPU, and what it supports in hardware.

    Args:
        name: The name, such as `"Tesla T4"`.
        compute_capability: The major and the minor version; `None` if TensorFlow reports none.

    Example:
    >>> from kmp.enabling import Gpu
    >>> gpu = Gpu("Tesla T4", compute_capability=(7, 5))
    >>> gpu.tensor_cores, gpu.bfloat16
    (True, False)
    """

    name: str
    compute_capability: tuple[int, int] | None

    def __str__(self) -> str:
        version = ".".join(map(str, self.compute_capability or ("unknown",)))
        return f"{self.name} (compute capability {version})"

    # The lowest compute capability with each feature: CUDA C++ Programming Guide, "Compute
    # Capabilities".
    @property
    def tensor_cores(self) -> bool:
        """Whether float16 matrix products and convolutions run on Tensor Cores."""
        is_volta_or_newer = (self.compute_capability or (0, 0)) >= (7, 0)
        return is_volta_or_newer and not _NO_TENSOR_CORES.search(self.name)

    @property
    def bfloat16(self) -> bool:
        """Whether the GPU supports bfloat16 in hardware."""
        return (self.compute_capability or (0, 0)) >= (8, 0)  # Ampere


def gpus() -> tuple[Gpu, ...]:
    """Returns the GPUs that TensorFlow finds, as a tuple of `Gpu`; empty without a GPU.

    Example:
    >>> import kmp
    >>> all(gpu.tensor_cores for gpu in kmp.gpus() if gpu.bfloat16)
    True
    """
    devices = tf.config.list_physical_devices("GPU")
    details = [(device, tf.config.experimental.get_device_details(device)) for device in devices]
    return tuple(
        Gpu(of.get("device_name", gpu.name), of.get("compute_capability")) for gpu, of in details
    )


def best_policy(devices: Sequence[Gpu]) -> tuple[str, str]:
    """Returns the policy that all of these GPUs run fast, and why."""
    names = ", ".join(map(str, devices))
    if not devices:
        return "float32", "TensorFlow sees no GPU, and 16 bits are slow on a CPU"
    if all(gpu.bfloat16 for gpu in devices):
        return "mixed_bfloat16", f"bfloat16 in hardware, which needs no loss scale: {names}"
    if all(gpu.tensor_cores for gpu in devices):
        return (
            "mixed_float16",
            f"Tensor Cores for float16, and not all GPUs have bfloat16 in hardware: {names}",
        )
    return (
        "float32",
        f"not all GPUs have Tensor Cores, without which 16 bits save memory, not time: {names}",
    )


def resolve(policy: str) -> str:
    """Returns the policy for an argument of `enable`.

    Logs what `"auto"` chose. For another policy, logs once for each dtype what `"auto"` would
    choose: as a warning, or as information if the policy is fast too.
    """
    best, reason = best_policy(gpus())
    if policy == "auto":
        logger.warning("kmp.enable('auto') uses %r: %s. %s", best, reason, _HOW_TO_COMPARE)
        return best
    dtype, best_dtype = (name.removeprefix("mixed_") for name in (policy, best))
    if dtype not in (best_dtype, "float32", *_logged):
        is_fast_too = (dtype, best_dtype) == (FLOAT16.name, BFLOAT16.name)
        level = logging.INFO if is_fast_too else logging.WARNING
        if logger.isEnabledFor(level):
            _logged.add(dtype)
        logger.log(
            level,
            'kmp.enable(%r) is in force. On this machine, "auto" would choose %r: %s.',
            policy,
            best,
            reason,
        )
    return policy
