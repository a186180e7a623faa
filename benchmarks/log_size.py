"""Measures how many bytes a sample takes in the log. Run `python benchmarks/log_size.py [--steps N]` (300 by default).

Trains two models of 600 variables, 300 of shape (64, 64) and 300 of shape (64,), with `kmp.callbacks.defaults(log_dir)`
and a sample every 10 steps, and prints the bytes of `kmp.jsonl` and of TensorBoard's files per sample. Then prints the
bytes of a sample of ResNet-50's 214 variables, with random gradients. Then computes what a million steps of models with
more and more variables take, if each sample, record of overflow counts and histogram is as large as the first one.
"""

import argparse
import json
import math
import os
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # its float16 is many times slower on newer CPUs

import keras
import numpy as np
from measuring import shapes_of

import kmp
from kmp.callbacks import Monitor
from kmp.callbacks.training_records import record_size
from kmp.records import BIN_COUNT, FIRST_EXPONENT, GradientSample, compact

LIMIT = 30_000
EVERY_N_STEPS = 10
BATCH_SIZE = 32
MILLION = 1_000_000
OVERFLOW_EVERY = 2_000  # steps: the default growth interval


def dense():
    return keras.layers.Dense(64, activation="relu", kernel_initializer="he_normal")


def residual_blocks(x):
    """150 residual blocks of two layers."""
    for _ in range(150):
        x = keras.layers.Add()([x, 0.1 * keras.layers.Dense(64)(dense()(x))])
    return x


def branches(x):
    """30 branches of ten layers: gradients of many magnitudes, and many zeros."""
    outputs = []
    for _ in range(30):
        outputs.append(x)
        for _ in range(10):
            outputs[-1] = dense()(outputs[-1])
    return keras.layers.Add()(outputs)


def measure(build, steps):
    """Trains a model, and returns the bytes of the log and of TensorBoard's files per sample."""
    keras.utils.set_random_seed(0)
    with kmp.enable(), tempfile.TemporaryDirectory() as folder:
        x = keras.Input((64,))
        model = keras.Model(x, build(x))
        model.compile(keras.optimizers.Adam(1e-4), "mse", jit_compile=False)
        assert len(model.trainable_variables) == 600
        data = np.random.default_rng(0).standard_normal((steps * BATCH_SIZE, 64)).astype("float32")
        callbacks = kmp.callbacks.defaults(folder, every_n_steps=EVERY_N_STEPS)
        model.fit(data, np.abs(data) / 2, batch_size=BATCH_SIZE, verbose=0, callbacks=callbacks)
        samples = len(kmp.load_run(folder).samples)
        sizes = {path.suffix: path.stat().st_size for path in Path(folder).iterdir()}
        return sizes[".jsonl"] / samples, sizes[".kmp"] / samples


def sample_of(shapes):
    """Returns a sample of random gradients: normally distributed times magnitudes over four decades, with zeros."""
    random = np.random.default_rng(0)
    counts = np.zeros((len(shapes), BIN_COUNT), np.int64)
    norms, amax = np.zeros(len(shapes)), np.zeros(len(shapes))
    for index, shape in enumerate(shapes):
        values = random.normal(size=math.prod(shape)) * 10.0 ** random.uniform(-3, 1)
        values *= random.lognormal(sigma=1, size=values.shape) * (random.random(values.shape) > 0.1)
        exponents = np.where(values == 0, FIRST_EXPONENT - 1, np.frexp(values)[1] - 1)
        counts[index] = np.bincount(exponents - FIRST_EXPONENT + 1, minlength=BIN_COUNT)
        norms[index], amax[index] = np.linalg.norm(values), np.abs(values).max()
    names = tuple(f"stage_{index // 40}/block_{index // 6}_layer_{index}/kernel" for index in range(len(shapes)))
    return GradientSample(1, 1024.0, names, counts, amax, norms)


def million_steps(variables):
    """Returns the bytes that a million steps add to the log and to TensorBoard's files."""
    sample = sample_of(shapes_of(f"{variables} small"))
    counts = {key: dict.fromkeys(sample.names, 1) for key in ("overflows_by_variable", "overflow_origins_by_variable")}
    histograms = [600 * (1 + variables // 2), *[600] * 9]  # of TensorBoard, with their tags: every tenth by layer
    log = events = step = reads = 0
    while step < MILLION:
        interval = 250 * 2 ** ((log + events) // Monitor.budget)
        step += interval
        log += record_size({"sample": sample})
        log += record_size(counts) if step // OVERFLOW_EVERY > (step - interval) // OVERFLOW_EVERY else 0
        events += histograms[reads % 10]
        reads += 1
    return [log + 500 * reads, events + 1_000 * reads]  # loss scale, counters and the numbers of a sample


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    largest = 0
    for build in (residual_blocks, branches):
        log, events = measure(build, arguments.steps)
        largest = max(largest, log)
        print(
            f"600 variables, {build.__name__}: {log:,.0f} bytes a sample in kmp.jsonl, {events:,.0f} in TensorBoard's"
        )
    shapes = shapes_of("ResNet-50")
    resnet = dict(compact(sample_of(shapes)))
    names = len(json.dumps(resnet.pop("names")))
    print(
        f"ResNet-50, {len(shapes)} variables: {len(json.dumps(resnet)):,} bytes a sample, and {names:,} of names once"
    )
    for variables in (200, 600, 2_000, 6_000, 20_000):
        log, events = million_steps(variables)
        print(
            f"a million steps, {variables:6,} variables: {log / 1e6:4.1f} MB in kmp.jsonl, {events / 1e6:4.1f} MB in "
            f"TensorBoard's files, {(log + events) / 1e6:4.1f} MB in all",
            flush=True,
        )
    print(f"the largest log takes {largest:,.0f} bytes a sample; the limit is {LIMIT:,}")
    return int(largest > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
