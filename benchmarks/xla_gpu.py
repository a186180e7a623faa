"""What does XLA make of a training step for a GPU that this machine does not have?

    python -m venv JAX && JAX/bin/pip install "jax[cuda12]"
    JAX/bin/python benchmarks/xla_gpu.py STEP.hlo ... [--gpu h100|a100|t4]
    python benchmarks/xla_gpu.py --compare A.hlo.txt B.hlo.txt

Compiles files of `xla_step.py` with the XLA of JAX's CUDA plugin, which takes the description of a
GPU in place of a GPU. Prints the number of kernels, what they read and write, how much of it is
float32, and the temporary memory. The environment takes 3 GB and needs neither TensorFlow nor kmp.
This was used with JAX 0.10.2, whose XLA is some months newer than that of TensorFlow 2.21. Nothing
runs: cuDNN's algorithms are not chosen, and there are no times.

Writes each optimized module to STEP.hlo.txt. `--compare` lists the kernels of which module B has
more or fewer than A, by the operation that they come from. It needs no JAX.
"""

import argparse
import itertools
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class GpuDescription:
    """The properties of a GPU that XLA asks for.

    Sources: the descriptions in `xla/backends/gpu/target_config/specs` of XLA's repository; it has
    none of a T4, whose numbers are NVIDIA's.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    threads_per_multiprocessor: int
    fpus_per_multiprocessor: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block: int
    bandwidth: int
    l2_cache: int
    memory: int
    clock_ghz: float

    def target_config(self) -> str:
        """Returns XLA's `GpuTargetConfigProto` as text."""
        major, minor = self.capability
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
              shared_memory_per_core: {self.shared_memory_per_multiprocessor}
              shared_memory_per_block_optin: {self.shared_memory_per_block}
              threads_per_core_limit: {self.threads_per_multiprocessor}
              core_count: {self.multiprocessors} fpus_per_core: {self.fpus_per_multiprocessor}
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              memory_bandwidth: {self.bandwidth} l2_cache_size: {self.l2_cache}
              clock_rate_ghz: {self.clock_ghz} device_memory_size: {self.memory}
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
            }}
            platform_name: "CUDA" device_description_str: "{self.name}"
            dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
            runtime_version {{ major: 12 minor: 8 }}
        """


GPUS = {
    "h100": GpuDescription(
        "NVIDIA H100 80GB HBM3",
        capability=(9, 0),
        multiprocessors=132,
        threads_per_multiprocessor=2048,
        fpus_per_multiprocessor=128,
        shared_memory_per_multiprocessor=233_472,
        shared_memory_per_block=232_448,
        bandwidth=3_352_320_000_000,
        l2_cache=52_428_800,
        memory=84_978_434_048,
        clock_ghz=1.98,
    ),
    "a100": GpuDescription(
        "NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        multiprocessors=108,
        threads_per_multiprocessor=2048,
        fpus_per_multiprocessor=64,
        shared_memory_per_multiprocessor=167_936,
        shared_memory_per_block=166_912,
        bandwidth=2_039_000_000_000,
        l2_cache=41_943_040,
        memory=85_000_000_000,
        clock_ghz=1.41,
    ),
    "t4": GpuDescription(
        "Tesla T4",
        capability=(7, 5),
        multiprocessors=40,
        threads_per_multiprocessor=1024,
        fpus_per_multiprocessor=64,
        shared_memory_per_multiprocessor=65_536,
        shared_memory_per_block=65_536,
        bandwidth=320_000_000_000,
        l2_cache=4_194_304,
        memory=15_800_000_000,
        clock_ghz=1.59,
    ),
}

# Bytes of an element, and how a module's text is written.
_WIDTHS = {
    **{"pred": 1, "s8": 1, "u8": 1, "f16": 2, "bf16": 2},
    **{"f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8},
}
_SHAPE = re.compile(rf"\b({'|'.join(_WIDTHS)})\[([\d,]*)\]")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)")
_BRANCHES = re.compile(r"(?:true|false)_computation=%([\w.\-]+)|branch_computations=\{([^}]*)\}")
_NO_KERNEL = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast"),
    *("copy-start", "copy-done"),
}


@dataclass(frozen=True)
class Kernel:
    """An instruction that runs as a kernel.

    Args:
        label: The name of a fusion without its number, the target of a library call, or the opcode.
        operation: The operation of the program that it comes from, with `#` for numbers; empty if
            XLA names none.
        bytes: Size of what it reads and writes, each once.
        float32_bytes: How much of that is float32.
        branches: The computations of which it runs one, if it is a `conditional`.
    """

    label: str
    operation: str
    bytes: int
    float32_bytes: int
    branches: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """The kernels of an optimized module: those of its entry, and how many are in each branch."""

    kernels: tuple[Kernel, ...]
    branch_sizes: tuple[int, ...]


@dataclass(frozen=True)
class Difference:
    """How many kernels of a label and an operation two modules have."""

    label: str
    operation: str
    before: int
    after: int


def parse_step(text: str) -> Step:
    """Returns the kernels of an optimized module, from its text."""
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            lines = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        else:
            lines.append(line)
    kernels = tuple(_kernels(computations[entry]))
    branches = [branch for kernel in kernels for branch in kernel.branches]
    sizes = tuple(len(list(_kernels(computations[branch]))) for branch in branches)
    return Step(kernels, sizes)


def _kernels(lines: Sequence[str]) -> Iterator[Kernel]:
    instructions = [match.groups() for match in map(_INSTRUCTION.match, lines) if match]
    shapes = {name: shape for name, shape, _, _ in instructions}
    for name, shape, opcode, rest in instructions:
        if opcode in _NO_KERNEL:
            continue
        arguments = re.findall(r"%([\w.\-]+)", rest.partition(")")[0])
        tensors = [shape, *(shapes[argument] for argument in arguments if argument in shapes)]
        sizes: Counter[str] = Counter()
        for each in tensors:
            for dtype, size in _sizes(each):
                sizes[dtype] += size
        label = _label(name, opcode, rest)
        yield Kernel(label, _operation(rest), sizes.total(), sizes["f32"], _branches(rest))


def _operation(rest: str) -> str:
    """Returns the name of the operation in the program, with each number as `#`."""
    source = re.search(r'op_name="([^"]*)"', rest)
    return re.sub(r"\d+", "#", source[1]) if source else ""


def _sizes(shape: str) -> Iterator[tuple[str, int]]:
    """Yields the dtype and the bytes of each tensor of a shape, which may be a tuple."""
    for dtype, dimensions in _SHAPE.findall(shape):
        count = math.prod(int(dimension) for dimension in dimensions.split(",") if dimension)
        yield dtype, count * _WIDTHS[dtype]


def _label(name: str, opcode: str, rest: str) -> str:
    if opcode == "fusion":
        return re.sub(r"(\.\d+)+$", "", name)
    target = re.search(r'custom_call_target="([^"]+)"', rest)
    return target[1] if target else opcode


def _branches(rest: str) -> tuple[str, ...]:
    found = (single or several for single, several in _BRANCHES.findall(rest))
    return tuple(itertools.chain.from_iterable(re.findall(r"[\w.\-]+", names) for names in found))


def differences(before: Step, after: Step) -> list[Difference]:
    """Returns of which kernels there are more or fewer, the largest difference first."""
    old = Counter((kernel.label, kernel.operation) for kernel in before.kernels)
    new = Counter((kernel.label, kernel.operation) for kernel in after.kernels)
    changed = sorted(key for key in old | new if old[key] != new[key])
    changed.sort(key=lambda key: -abs(new[key] - old[key]))
    return [Difference(*key, old[key], new[key]) for key in changed]


def compile_step(file: Path, gpu: GpuDescription) -> tuple[str, int]:
    """Compiles HLO; returns the optimized module as text and the bytes of its temporary memory."""
    # JAX has no public name for a compilation from HLO.
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir
    from jax.experimental import topologies
    from jaxlib import _jax, xla_client

    topology = topologies.get_topology_desc(
        "described", platform="cuda", target_config=gpu.target_config(), topology="1x1x1"
    )
    device = topology.devices[0]
    module = _jax.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(file.read_bytes()))
    # JAX reads StableHLO, which has no copy.
    reshape = r"stablehlo.reshape \1 : (\2) -> \2"
    module = re.sub(r"mhlo\.copy (%\S+) : (tensor<[^>]*>)", reshape, module)
    with mlir.make_ir_context():
        options = xla_client.CompileOptions()
        devices = _jax.DeviceList((device,))
        program = device.client.compile(ir.Module.parse(module), devices, options)
    memory = program.get_compiled_memory_stats().temp_size_in_bytes
    return program.hlo_modules()[0].to_string(), memory


def describe(step: Step, count: int = 8) -> Iterator[str]:
    """Yields lines with what moves the most bytes, and with the sums."""
    kernels, moved = Counter(), Counter()
    for kernel in step.kernels:
        kernels[kernel.label] += 1
        moved[kernel.label] += kernel.bytes
    for label, size in moved.most_common(count):
        yield f"    {label[:50]:50} {kernels[label]:5} {size / 1e9:8.2f} GB"
    branches = f" and {list(step.branch_sizes)} in branches" if step.branch_sizes else ""
    in_float32 = sum(kernel.float32_bytes for kernel in step.kernels)
    total = f"{moved.total() / 1e9:.1f} GB, {in_float32 / 1e9:.1f} GB in float32"
    yield f"{len(step.kernels)} kernels{branches}, {total}"


def main() -> None:
    description, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="STEP.hlo")
    parser.add_argument("--gpu", choices=GPUS, default="h100")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A.hlo.txt", "B.hlo.txt"))
    parsed = parser.parse_args()
    # There is no driver whose version could be checked.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    for file in parsed.files:
        start = time.monotonic()
        text, memory = compile_step(file, GPUS[parsed.gpu])
        file.with_name(f"{file.name}.txt").write_text(text)
        *lines, sums = describe(parse_step(text))
        print(*lines, sep="\n")
        seconds = time.monotonic() - start
        temporary = f"{memory / 1e9:.2f} GB temporary memory"
        print(f"{file} on {parsed.gpu}: {sums}, {temporary} (compiled in {seconds:.0f} s)")
    if parsed.compare:
        before, after = (parse_step(file.read_text()) for file in parsed.compare)
        for found in differences(before, after):
            kernel = f"{found.label[:40]}  {found.operation[-70:]}"
            print(f"{_change(found.before, found.after)}  {kernel}")
        change = _change(len(before.kernels), len(after.kernels))
        print(f"{change}  in all, without those in branches")


def _change(before: int, after: int) -> str:
    return f"{after - before:+5} ({before} -> {after})"


if __name__ == "__main__":
    main()
