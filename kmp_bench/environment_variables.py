"""Whether the environment variables that NVIDIA's recipes set make training faster on this GPU.

The recipes are NVIDIA's DeepLearningExamples for TensorFlow. TensorFlow reads the variables when it
starts, so each setting is measured in a new process, one after another.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence

import tensorflow as tf

from kmp.enabling import enable
from kmp_bench import models
from kmp_bench.fit_timer import Blocks, time_fit
from kmp_bench.measurement import Measurement, comparison, in_new_process

# Threads that only launch kernels, so that they do not wait for those of the input pipeline.
THREADS = {"TF_GPU_THREAD_MODE": "gpu_private", "TF_GPU_THREAD_COUNT": "2"}
# cuDNN's spatial persistent mode of batch normalization, which restricts the range of the data.
PERSISTENT = {"TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT": "1"}
NAMES = (*THREADS, *PERSISTENT)
NONE = "none"
FASTER = 1.03  # a smaller gain may be noise between processes

_BLOCKS = Blocks(warm_up=20, count=5, steps=20)


def measure_environment() -> list[Measurement]:
    """Measures images per second without the variables, with each setting, and with both settings.

    The last only if each of them helps, so TensorFlow starts three or four times.

    Raises:
        MeasurementError: If a process fails.
    """
    rates = {NONE: _rates_with({})}
    for variables in (THREADS, PERSISTENT):
        rates[_line(variables)] = _rates_with(variables)
    measured = _compared(rates)
    if all(_ratio(result) >= FASTER for result in measured[1:]):
        everything = {**THREADS, **PERSISTENT}
        rates[_line(everything)] = _rates_with(everything)
        measured = _compared(rates)
    return measured


def fastest_setting(measured: Sequence[Measurement]) -> Measurement | None:
    """Returns that of the fastest setting, its `variant`, if it is 1.03 times as fast as none."""
    best = max(measured[1:], key=_ratio)
    return best if _ratio(best) >= FASTER else None


def images_per_second() -> list[float]:
    """Trains a small conv net in float16 in graph mode; returns the images/s of each block."""
    task = models.convolutional(channels=128, batch=256)
    with enable("mixed_float16"):
        model = task.build()
        model.compile("adam", "sparse_categorical_crossentropy", jit_compile=False)
    data = tf.data.Dataset.from_tensors((task.x, task.y)).cache().repeat()
    return [task.units / seconds for seconds in time_fit(model, data, _BLOCKS).seconds]


def _rates_with(variables: Mapping[str, str]) -> list[float]:
    with environment(variables):
        return in_new_process(images_per_second)


def _compared(rates: Mapping[str, Sequence[float]]) -> list[Measurement]:
    case = "conv net with BatchNormalization"
    return comparison("environment variables", case, "graph", rates, "images/s")


def _line(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in variables.items())


def _ratio(result: Measurement) -> float:
    return result.ratio or 0.0


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets these variables for new processes, and none of the others in `NAMES`."""
    before = {name: os.environ.pop(name) for name in NAMES if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in NAMES:
            os.environ.pop(name, None)
        os.environ.update(before)
