"""What does float16 gain on this GPU, and what does kmp add to it?

    python benchmarks/gpu.py [--out FILE] [--only PART ...] [--budget SECONDS] [--batch N] [--quick]

First what counting cannot decide: normalization by rows, activation and softmax in Keras' code and
in kmp's, BatchNormalization with and without cuDNN's persistent mode, ResNet-50 in graph mode, and
on a replica of a strategy. Then ResNet-50 and BERT-base in each variant, with `fit`, one after
another in one process: ten steps of warm-up, then three blocks of ten steps, each timed until the
GPU is done. FILE is written again after each variant, so a run that is cut off keeps what it has. A
variant that fails is recorded with its error. After the budget no further variant starts: `--only`
runs the other parts later. `--batch` is for GPUs with less memory than 80 GB.
"""

import argparse
import contextlib
import gc
import os
import statistics
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# oneDNN's float16 is many times slower on newer CPUs.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table
from step_models import BARE, KERAS, OURS, step_model

import kmp
from kmp.backend.keras_internals import global_policy, sublayers
from kmp.layers.fused_calls import use_call_of_keras
from kmp.utils import atomic_files
from kmp_bench.environment_variables import PERSISTENT, environment
from kmp_bench.fit_timer import Blocks, time_fit
from kmp_bench.layer_times import measure_layers
from kmp_bench.measurement import MODES, Measurement, in_new_process, peak_memory, reset_peak_memory
from kmp_bench.results import header
from kmp_cli.doctor import driver_check


@dataclass(frozen=True)
class Variant:
    """How a model trains.

    Args:
        name: What the results call it.
        policy: The dtype policy.
        scaling: `"bare"` (no loss scale), `"keras"` or `"kmp"`.
        jit_compile: As in `kmp.enable`. Under XLA the optimizer's step is compiled in any case.
        is_fused: Whether normalization layers use the fused kernel, as they do in graph mode.
        has_callbacks: Whether `kmp.callbacks.defaults()` record the training in a log.
    """

    name: str
    policy: str = "mixed_float16"
    scaling: str = OURS
    jit_compile: bool = True
    is_fused: bool = True
    has_callbacks: bool = False


@dataclass(frozen=True)
class Part:
    """A model of `step_models.py` that trains in one of `MODES`.

    Args:
        model: One of `step_models.MODELS`.
        batch: Its batch size.
        mode: One of `MODES`.
        has_strategy: Whether it trains on a replica of a `MirroredStrategy`, where XLA compiles the
            forward and backward pass.
    """

    model: str
    batch: int
    mode: str
    has_strategy: bool = False


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: median, smallest and largest of the means of the blocks."""

    median: float
    smallest: float
    largest: float


@dataclass(frozen=True)
class Result:
    """What was measured.

    Args:
        part: One of `PARTS`.
        variant: The name of a `Variant`.
        model: The model that was trained.
        batch: Its batch size.
        mode: One of `MODES`.
        step: Time of a step; `None` if the variant failed.
        memory: Bytes that the training adds to the peak of GPU memory, after the warm-up. `None`
            without a GPU.
        in_use_before: Bytes of GPU memory that were in use before the model was built.
        loss_scale: The loss scale after the last step. Steps were skipped if it is below
            `INITIAL_SCALE`.
        total_seconds: How long the variant took, with building, tracing and compiling.
        error: Why the variant failed, in one line.
    """

    part: str
    variant: str
    model: str
    batch: int
    mode: str
    step: StepTime | None = None
    memory: int | None = None
    in_use_before: int | None = None
    loss_scale: float | None = None
    total_seconds: float = 0.0
    error: str | None = None


FLOAT32 = Variant("float32", "float32", BARE)
NO_SCALE = Variant("float16, no loss scale", scaling=BARE)
KERAS_SCALER = Variant("float16, Keras' scaler", scaling=KERAS)
WITH_KMP = Variant("float16, kmp")
NOT_COMPILED = Variant("float16, kmp, jit_compile=False", jit_compile=False)
NOT_FUSED = Variant("float16, kmp, normalization not fused", is_fused=False)
WITH_CALLBACKS = Variant("float16, kmp and defaults()", has_callbacks=True)

PARTS = {
    "resnet-graph": Part("resnet50", 64, "graph"),
    "resnet-xla": Part("resnet50", 256, "XLA"),
    "bert-xla": Part("bert", 128, "XLA"),
    "bert-graph": Part("bert", 128, "graph"),
    "replica-graph": Part("resnet50", 64, "graph", has_strategy=True),
    "replica-xla": Part("resnet50", 64, "XLA", has_strategy=True),
}
LAYERS = "layers"
# Milliseconds of a step on an H200 of 15.9 microseconds an operation, the time of the host that its
# earlier figures fit.
PREDICTED = {("resnet-graph", "float16, kmp"): (16, 28)}
RUNS = [  # the most valuable first
    *((part, WITH_KMP) for part in ("resnet-graph", "replica-graph", "replica-xla")),
    *(("resnet-graph", variant) for variant in (FLOAT32, NO_SCALE, KERAS_SCALER)),
    *(("resnet-graph", variant) for variant in (NOT_COMPILED, NOT_FUSED)),
    *(("resnet-xla", variant) for variant in (FLOAT32, WITH_KMP, NO_SCALE, KERAS_SCALER)),
    *(("bert-xla", variant) for variant in (FLOAT32, WITH_KMP, KERAS_SCALER)),
    *(("bert-graph", variant) for variant in (FLOAT32, WITH_KMP, KERAS_SCALER)),
    ("resnet-graph", WITH_CALLBACKS),
    ("bert-xla", NO_SCALE),
    ("bert-graph", NO_SCALE),
]
QUICK_BLOCKS = Blocks(warm_up=1, count=2, steps=1)
# Both are so low that no step overflows: a skipped step takes another time.
INITIAL_SCALE, LEARNING_RATE = 8.0, 1e-6
# Of the environment variables that are recorded.
_PREFIXES = (
    *("CUDA_", "NVIDIA_", "XLA_", "TF_CPP", "TF_CUD", "TF_ENABLE", "TF_FORCE", "TF_GPU", "TF_USE"),
    "TF_XLA",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, writes the results after each variant, and prints them as tables."""
    parsed = parse(arguments)
    start = time.monotonic()
    console = Console(width=120, highlight=False, markup=False)
    details, results, layers = machine(), list[Result](), list[Measurement]()
    for name, value in details.items():
        console.print(f"{name}: {value}")
    parsed.out.parent.mkdir(parents=True, exist_ok=True)
    if LAYERS in parsed.only:
        for compared in times_of_layers(parsed.quick):
            for each in compared:
                ratio = f", {each.ratio:.2f} of Keras'" if each.ratio else ""
                console.print(f"{each.case}, {each.variant}: {each.value * 1e6:.1f} us{ratio}")
            layers += compared
            write(parsed.out, details, layers, results)
    for part_name, variant in RUNS:
        if part_name not in parsed.only:
            continue
        if time.monotonic() - start > parsed.budget:
            console.print(f"{part_name}, {variant.name}: not measured, the time is over")
            continue
        part, blocks = PARTS[part_name], Blocks()
        if parsed.quick:
            part, blocks = replace(part, model="small", batch=4), QUICK_BLOCKS
        if parsed.batch:
            part = replace(part, batch=parsed.batch)
        result = measured(part_name, part, variant, blocks)
        outcome = _milliseconds(result.step) + " ms a step" if result.step else result.error
        predicted = PREDICTED.get((part_name, variant.name))
        if predicted and not parsed.quick and not parsed.batch:
            outcome = f"{outcome} (predicted for an H200: {predicted[0]} to {predicted[1]})"
        seconds = f"{result.total_seconds:.0f} s in all"
        console.print(f"{part_name}, {variant.name}: {outcome}, {seconds}")
        results.append(result)
        write(parsed.out, details, layers, results)
    for table in tables(results):
        console.print(table)


def times_of_layers(is_quick: bool) -> Iterator[list[Measurement]]:
    """Yields the times of layers, and those of BatchNormalization in cuDNN's persistent mode."""
    if is_quick:
        yield from measure_layers(((64, 16),), (2, 4, 4, 8), calls=1, rounds=1)
        return
    yield from measure_layers()
    # TensorFlow reads the variable once.
    with environment(PERSISTENT):
        persistent = in_new_process(batch_normalization)
    yield [replace(each, case=f"{each.case}, persistent") for each in persistent]


def batch_normalization() -> list[Measurement]:
    """Returns the times of BatchNormalization."""
    (measured,) = measure_layers(rows=())
    return measured


def write(
    file: Path,
    details: dict[str, Any],
    layers: Sequence[Measurement],
    results: Sequence[Result],
) -> None:
    """Writes what was measured until now."""
    content = {
        "machine": details,
        "layers": [asdict(each) for each in layers],
        "results": [asdict(each) for each in results],
    }
    atomic_files.write_json(file, content)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options of the command line."""
    description, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts, quick = [LAYERS, *PARTS], "two steps of a small model, for a CPU"
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), metavar="FILE")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--budget", type=float, default=480, metavar="SECONDS", help="default: 480")
    parser.add_argument("--batch", type=int, metavar="N", help="batch size of all parts")
    parser.add_argument("--quick", action="store_true", help=quick)
    return parser.parse_args(arguments)


def machine() -> dict[str, Any]:
    """Returns the versions, the hardware, and the settings that the results belong to."""
    build = tf.sysconfig.get_build_info()
    names = [name for name in sorted(os.environ) if name.startswith(_PREFIXES)]
    return header() | {
        "driver": driver_check().text,
        "cuda": build.get("cuda_version", "none"),
        "cudnn": build.get("cudnn_version", "none"),
        "tensor_float_32": tf.config.experimental.tensor_float_32_execution_enabled(),
        "environment": {name: os.environ[name] for name in names},
    }


def measured(part_name: str, part: Part, variant: Variant, blocks: Blocks) -> Result:
    """Trains a variant and returns what was measured, or the error."""
    keras.backend.clear_session()
    gc.collect()  # Keras' models are reference cycles, and the next one needs the memory
    empty = Result(part_name, variant.name, part.model, part.batch, part.mode)
    start = time.monotonic()
    try:
        result = train(empty, part, variant, blocks)
    except Exception as error:  # TensorFlow may raise anything
        text = textwrap.shorten(str(error), 300)
        result = replace(empty, error=f"{type(error).__name__}: {text}")
    return replace(result, total_seconds=time.monotonic() - start)


def train(empty: Result, part: Part, variant: Variant, blocks: Blocks) -> Result:
    """Trains a new model and returns the result with what was measured."""
    reset_peak_memory()
    before = peak_memory()
    model = compiled_model(part, variant)
    data = repeated_batch(model, part.batch)
    with tempfile.TemporaryDirectory() as folder:
        callbacks = kmp.callbacks.defaults(folder) if variant.has_callbacks else []
        times = time_fit(model, data, blocks, callbacks)
    step = StepTime(statistics.median(times.seconds), min(times.seconds), max(times.seconds))
    result = replace(empty, step=step)
    if variant.scaling != BARE:
        result = replace(result, loss_scale=float(model.optimizer.dynamic_scale.numpy()))
    if tf.config.list_physical_devices("GPU"):
        result = replace(result, memory=times.peak_memory - before, in_use_before=before)
    return result


def compiled_model(part: Part, variant: Variant) -> keras.Model:
    """Returns a new compiled model."""
    context: contextlib.AbstractContextManager[Any] = global_policy(variant.policy)
    if variant.scaling == OURS:
        settings = {"jit_compile": variant.jit_compile, "initial_scale": INITIAL_SCALE}
        context = kmp.enable(variant.policy, **settings)
    strategy = tf.distribute.get_strategy()
    if part.has_strategy:
        device = "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"
        strategy = tf.distribute.MirroredStrategy([device])
    # Under a strategy, `True` would make Keras compile all of the step of a single replica.
    compiles = "auto" if part.has_strategy and MODES[part.mode] else MODES[part.mode]
    with strategy.scope(), context:
        optimizer: keras.optimizers.Optimizer = keras.optimizers.Adam(LEARNING_RATE)
        if variant.scaling == KERAS:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, INITIAL_SCALE)
        model = step_model(part.model).model
        if not variant.is_fused:
            for layer in sublayers(model):
                use_call_of_keras(layer)
        options = {"jit_compile": compiles, "auto_scale_loss": variant.scaling == OURS}
        model.compile(optimizer, "sparse_categorical_crossentropy", **options)
    return model


def repeated_batch(model: keras.Model, size: int) -> tf.data.Dataset:
    """Returns a data set that repeats one batch of tokens or of images, and of labels.

    Images are bytes, as input pipelines have them. The model casts them on the GPU.
    """
    random, (inputs,), (outputs,) = np.random.default_rng(0), model.inputs, model.outputs
    is_text = inputs.dtype == "int32"
    shape = (size, *inputs.shape[1:])
    x = random.integers(0, 30_000 if is_text else 256, shape, "int32" if is_text else "uint8")
    y = random.integers(0, outputs.shape[-1], (size, *outputs.shape[1:-1]))
    return tf.data.Dataset.from_tensors((x, y)).cache().repeat().prefetch(2)


def tables(results: Sequence[Result]) -> Iterator[Table]:
    """Yields a table for each part, with ratios to float32 and to float16 without a loss scale."""
    for part in dict.fromkeys(result.part for result in results):
        yield _table([result for result in results if result.part == part])


def _table(own: Sequence[Result]) -> Table:
    """Returns the table of one part."""
    ratios = ("\N{MULTIPLICATION SIGN} float32", "\N{MULTIPLICATION SIGN} no scale")
    columns = ("ms a step (range)", "examples/s", *ratios, "memory", ratios[0])
    title = f"{own[0].part}: {own[0].model}, batch {own[0].batch}, {own[0].mode}"
    table = Table("", *columns, title=title, title_justify="left")
    rates = {each.variant: each.batch / each.step.median for each in own if each.step}
    memory = {each.variant: each.memory for each in own if each.memory}
    for result in own:
        rate, size = rates.get(result.variant), memory.get(result.variant)
        table.add_row(
            result.variant,
            _milliseconds(result.step),
            f"{rate:,.0f}" if rate else "",
            _ratio(rate, rates.get(FLOAT32.name)),
            _ratio(rate, rates.get(NO_SCALE.name)),
            f"{size / 1e9:.2f} GB" if size else "",
            _ratio(size, memory.get(FLOAT32.name)),
        )
    return table


def _milliseconds(step: StepTime | None) -> str:
    if step is None:
        return "failed"
    return f"{step.median * 1e3:.1f} ({step.smallest * 1e3:.1f}-{step.largest * 1e3:.1f})"


def _ratio(numerator: float | None, denominator: float | None) -> str:
    return f"{numerator / denominator:.2f}" if numerator and denominator else ""


if __name__ == "__main__":
    main()
