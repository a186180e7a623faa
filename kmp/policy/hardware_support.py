"""The GPUs' support for mixed precision."""

import logging
import re
from dataclasses import dataclass

import tensorflow as tf

logger = logging.getLogger("kmp")

# GPUs of the Turing chips TU116 and TU117, which have compute capability 7.5 and no Tensor Cores. Source: NVIDIA's data
# sheets.
_NO_TENSOR_CORES = re.compile(r"GTX 16\d\d|MX[45]50|CMP 30HX|\bT(400|500|550|600|1000|1200|2000)\b")
_logged: set[str] = set()


@dataclass(frozen=True)
class Gpu:
    """A GPU that TensorFlow detects, with its compute capability's major and minor version if that is reported."""

    name: str
    compute_capability: tuple[int, int] | None

    def __str__(self) -> str:
        return f"{self.name} (compute capability {'.'.join(map(str, self.compute_capability or ('unknown',)))})"

    # The lowest compute capability with each feature: CUDA C++ Programming Guide, "Compute Capabilities".
    @property
    def tensor_cores(self) -> bool:
        """Whether float16 matrix products and convolutions run on Tensor Cores."""
        return (self.compute_capability or (0, 0)) >= (7, 0) and not _NO_TENSOR_CORES.search(self.name)  # Volta

    @property
    def bfloat16(self) -> bool:
        """Whether the GPU supports bfloat16 in hardware."""
        return (self.compute_capability or (0, 0)) >= (8, 0)  # Ampere


@dataclass(frozen=True)
class Hardware:
    """The GPUs that TensorFlow detects on this machine; none if `gpus` is empty."""

    gpus: tuple[Gpu, ...]

    @property
    def tensor_cores(self) -> bool:
        """Whether there is a GPU and every GPU has Tensor Cores."""
        return bool(self.gpus) and all(gpu.tensor_cores for gpu in self.gpus)

    @property
    def bfloat16(self) -> bool:
        """Whether there is a GPU and every GPU supports bfloat16 in hardware."""
        return bool(self.gpus) and all(gpu.bfloat16 for gpu in self.gpus)

    def advice(self, policy: str) -> tuple[int, str] | None:
        """Returns a `logging` level and a message about `policy` on these GPUs, or `None` if there is no advice."""
        names, dtype = ", ".join(map(str, self.gpus)), policy.removeprefix("mixed_")
        if dtype == "float32":
            return None
        if not self.gpus:
            return logging.WARNING, f"TensorFlow sees no GPU: {dtype} will be slow here, slower than float32."
        if dtype == "bfloat16" and not self.bfloat16:
            return logging.WARNING, f"No bfloat16 in hardware, which needs compute capability 8.0. GPUs: {names}."
        if dtype == "float16" and not self.tensor_cores:
            return logging.WARNING, f"No Tensor Cores, so float16 saves memory, not time. GPUs: {names}."
        if dtype == "float16" and self.bfloat16:
            return logging.INFO, "This GPU runs bfloat16 too: enable('mixed_bfloat16') needs no loss scale."
        return None


def hardware() -> Hardware:
    """Returns the GPUs of this machine, as TensorFlow reports them: `gpus`, `tensor_cores` and `bfloat16`.

    Example:
    >>> all(gpu.tensor_cores for gpu in hardware().gpus) or not hardware().tensor_cores
    True
    """
    devices = tf.config.list_physical_devices("GPU")
    details = [(device, tf.config.experimental.get_device_details(device)) for device in devices]
    return Hardware(tuple(Gpu(of.get("device_name", gpu.name), of.get("compute_capability")) for gpu, of in details))


def xla_error() -> str | None:
    """Returns why XLA cannot compile a function on this machine; `None` if it can."""
    try:
        tf.function(tf.exp, jit_compile=True, autograph=False)(tf.ones(8)).numpy()  # a number would be a constant
    except (tf.errors.OpError, NotImplementedError) as reason:
        return str(reason)
    return None


def resolve_auto() -> str:
    """Returns the policy that `enable("auto")` uses on this machine, and logs it with the reason."""
    machine = hardware()
    names = ", ".join(map(str, machine.gpus))
    if machine.bfloat16:
        policy, reason = "mixed_bfloat16", f"bfloat16 in hardware, which needs no loss scale: {names}"
    elif machine.tensor_cores:
        policy, reason = "mixed_float16", f"Tensor Cores for float16 and not for bfloat16: {names}"
    else:
        reason = f"no Tensor Cores on every GPU: {names}" if names else "TensorFlow sees no GPU"
        policy = "float32"
    logger.warning("kmp.enable('auto') uses %r: %s.", policy, reason)  # a level that Python shows by default
    return policy


def log_once(policy: str) -> None:
    """Logs advice about `policy` on this machine's GPUs, each message once per process."""
    advice = hardware().advice(policy)
    if advice and advice[1] not in _logged:
        _logged.add(advice[1])
        logger.log(*advice)
