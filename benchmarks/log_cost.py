"""What does a log cost: its bytes, and the time and memory to load, advise on and report it?

    python benchmarks/log_cost.py [--quick] [--json FILE]

The bytes of a sample in two trainings of 600 variables, and for ResNet-50's variables with random
gradients; those of a million steps of larger and larger models, computed for records as large as
the first ones; how the costs of a log of 20 samples grow with the number of variables; and time and
peak memory of `kmp report` for logs of 100 MB, each in a new process. Times are processor times,
which other programs on the machine change less.
"""

import contextlib
import functools
import io
import itertools
import json
import math
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("MPLBACKEND", "agg")

import keras
import numpy as np
from measuring import main, per_unit, shapes_of

import kmp
import kmp_cli
from kmp import report
from kmp.callbacks.recorder import BUDGET
from kmp.callbacks.training_records import record_size
from kmp.records import GradientSample, Header, Record, Settings
from kmp.records.compact_sample import compact
from kmp.records.jsonl import FILE_NAME, LogEncoder
from kmp_bench.measurement import alternate, comparison, in_new_process, peak_memory

EVERY_N_STEPS, BATCH_SIZE = 10, 32
SAMPLES = 20
MILLION = 1_000_000
OVERFLOW_EVERY = 2_000  # steps: the default growth interval
LOGS = {"200 variables in each sample": 200, "200,000 variables in each sample": 200_000}
LOGS |= {"counters only": 0, "1 variable in each sample": 1, "20 variables in each sample": 20}


def measure(is_quick):
    """Yields the sizes of samples and of logs, then what it costs to read them."""
    blocks, steps = (2, 20) if is_quick else (30, 300)
    for build in (residual_blocks, branches):
        variables, sizes = bytes_per_sample(build, blocks, steps)
        case = f"{variables} variables, {build.__name__}"
        yield comparison("log: a sample", case, "", sizes, "B")
    sample = dict(compact(sample_of([math.prod(shape) for shape in shapes_of("ResNet-50")])))
    names, numbers = len(json.dumps(sample.pop("names"))), len(json.dumps(sample))
    sizes = {"sample": [numbers], "names, written once": [names]}
    yield comparison("log: a sample", "ResNet-50", "", sizes, "B")
    counts = (200, 600) if is_quick else (200, 600, 2_000, 6_000, 20_000)
    sizes = {
        f"{variables:,} variables": [bytes_of_million_steps(variables)] for variables in counts
    }
    yield comparison("log: a million steps", "with TensorBoard's files", "", sizes, "B")
    yield from growth((50, 200) if is_quick else (50, 500, 2_000, 5_000), 1 if is_quick else 5)
    yield from reports(dict(list(LOGS.items())[:1]) if is_quick else LOGS, 2 if is_quick else 100)


def reports(logs, megabytes):
    """Yields time and memory of the report of each log."""
    seconds, peaks = {}, {}
    for name, variables in logs.items():
        with tempfile.TemporaryDirectory() as folder:
            log = write(Path(folder, "log"), variables, megabytes=megabytes)
            duration, peak = in_new_process(cost_of_report, str(log))
        seconds[name], peaks[name] = [duration], [peak]
    yield comparison("report: time", f"log of {megabytes} MB", "", seconds)
    yield comparison("report: peak memory", f"log of {megabytes} MB", "", peaks, "B")


def residual_blocks(x, count):
    """Blocks of two layers, five for each of the counted."""
    for _ in range(5 * count):
        x = keras.layers.Add()([x, 0.1 * keras.layers.Dense(64)(dense()(x))])
    return x


def branches(x, count):
    """Branches of ten layers: gradients of many magnitudes, and many zeros."""
    return keras.layers.Add()(
        [keras.Sequential([dense() for _ in range(10)])(x) for _ in range(count)]
    )


def dense():
    return keras.layers.Dense(64, activation="relu", kernel_initializer="he_normal")


def bytes_per_sample(build, count, steps):
    """Trains a model of 20 variables for each that is counted.

    Returns their number and the bytes per sample.
    """
    keras.utils.set_random_seed(0)
    with kmp.enable(), tempfile.TemporaryDirectory() as folder:
        x = keras.Input((64,))
        model = keras.Model(x, build(x, count))
        model.compile(keras.optimizers.Adam(1e-4), "mse", jit_compile=False)
        data = np.random.default_rng(0).standard_normal((steps * BATCH_SIZE, 64)).astype("float32")
        callbacks = kmp.callbacks.defaults(folder, every_n_steps=EVERY_N_STEPS)
        model.fit(data, np.abs(data) / 2, batch_size=BATCH_SIZE, verbose=0, callbacks=callbacks)
        # Without the results of replays, whose number depends on how fast they are.
        samples = [
            line for line in Path(folder, FILE_NAME).read_text().splitlines() if '"sample"' in line
        ]
        events = sum(path.stat().st_size for path in Path(folder).glob("*.kmp"))
    per_sample = {
        FILE_NAME: [sum(map(len, samples)) / len(samples)],
        "TensorBoard's files": [events / len(samples)],
    }
    return len(model.trainable_variables), per_sample


@functools.cache
def random_sample(variables, has_updates=False):
    """Returns a sample of variables with 4,096 and 64 elements alternately."""
    return sample_of([(4096, 64)[index % 2] for index in range(variables)], has_updates)


def sample_of(sizes, has_updates=False):
    """Returns a sample of random gradients with these numbers of elements, a tenth of them zeros.

    The magnitudes of the others are log-normal, with a deviation of 2.7 bits and medians over four
    decades: samples of such gradients are as large as those of normally distributed ones with
    log-normal factors.
    """
    random, sizes = np.random.default_rng(0), np.asarray(sizes)
    exponents, centers = np.arange(45), random.uniform(15, 28, (len(sizes), 1))
    shares = np.exp(-(((exponents - centers) / 2.7) ** 2) / 2)
    shares /= shares.sum(axis=1, keepdims=True)
    counts = np.column_stack([sizes // 10, random.multinomial(sizes - sizes // 10, shares)])
    amax = 2.0 ** (centers[:, 0] - 10)
    names = tuple(
        f"stage_{index // 40}/block_{index // 6}_layer_{index}/kernel"
        for index in range(len(sizes))
    )
    updates = {
        "weight_norm": amax,
        "update_norm": amax / 1024,
        "updates": counts.sum(1),
        "lost_updates": sizes // 50,
    }
    bins = np.append(0, exponents + 120)
    return GradientSample(
        1, 1024.0, names, counts, amax, amax / 10, bins=bins, **(updates if has_updates else {})
    )


def bytes_of_million_steps(variables):
    """Returns the bytes that a million steps add to the log and to TensorBoard's files."""
    sample = random_sample(variables)
    by_variable = dict.fromkeys(sample.names, 1)
    counts = Record(
        step=0, overflows_by_variable=by_variable, overflow_origins_by_variable=by_variable
    )
    # Of TensorBoard, with their tags: every tenth by layer.
    histograms = [600 * (1 + variables // 2), *[600] * 9]
    log = events = step = reads = 0
    while step < MILLION:
        interval = 250 * 2 ** ((log + events) // BUDGET)
        step += interval
        log += record_size(Record(step=0, sample=sample))
        log += (
            record_size(counts)
            if step // OVERFLOW_EVERY > (step - interval) // OVERFLOW_EVERY
            else 0
        )
        events += histograms[reads % 10]
        reads += 1
    return log + events + 1_500 * reads  # loss scale, counters and the numbers of a sample, in both


def growth(counts, rounds):
    """Yields the cost per variable of a sample, and of loading, advice and the report."""
    with tempfile.TemporaryDirectory() as folder:
        logs = {count: write(Path(folder, str(count)), count, SAMPLES) for count in counts}
        sizes = {count: [(log / FILE_NAME).stat().st_size / SAMPLES] for count, log in logs.items()}
        yield per_unit("variable", "a sample and counts in the log", "", sizes, "B")
        runs = {count: kmp.load_run(log) for count, log in logs.items()}
        for name, function, arguments in (
            ("load_run", kmp.load_run, logs),
            ("advise", kmp.advise, runs),
            ("report", lambda run: report.html({"run": run}), runs),
        ):
            timed = {
                n: functools.partial(cpu_seconds, function, argument)
                for n, argument in arguments.items()
            }
            yield per_unit("variable", f"{name}, {SAMPLES} samples", "", alternate(timed, rounds))


def write(folder, variables, samples=None, megabytes=math.inf):
    """Writes a log of samples, or only counters, up to a number or a size.

    Returns its folder.
    """
    folder.mkdir()
    encoder, names = LogEncoder(), random_sample(variables).names if variables else ()
    settings = Settings(rule="DynamicScale", compute_dtypes=["float16"])
    with (folder / FILE_NAME).open("w") as log:
        log.write(encoder.line(Header(settings=settings)))
        for number in itertools.count(1) if samples is None else range(1, samples + 1):
            counters = Record(
                step=250 * number,
                overflow_count=number,
                overflow_rate=0.004,
                loss_scale=1024.0,
                overflows_in_a_row=0,
                overflows_by_variable=dict.fromkeys(names, number),
            )
            log.write(encoder.line(counters))
            if variables:  # every tenth sample has the update of the weights
                sample = random_sample(variables, number % 10 == 1)
                log.write(encoder.line(Record(step=250 * number, sample=sample)))
            if log.tell() >= megabytes * 1e6:
                break
    return folder


def cost_of_report(log):
    """Returns the seconds and the bytes of memory to report a log in this process, a new one."""
    before, begin = peak_memory(), time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        assert kmp_cli.main(["report", log]) == 0
    return time.process_time() - begin, peak_memory() - before


def cpu_seconds(function, argument):
    """Returns the processor time of a call."""
    begin = time.process_time()
    function(argument)
    return time.process_time() - begin


if __name__ == "__main__":
    main(measure, __doc__)
