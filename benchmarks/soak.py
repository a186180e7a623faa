"""How much does the resident memory grow in a long training, with kmp and with stock Keras?

    python benchmarks/soak.py [--steps N]

Each of the two trains a small model in a process of its own. kmp's run has `kmp.callbacks.defaults(log_dir)` with a
record every 50 steps; the other is Keras' `mixed_float16`, which records nothing. Growth is counted from step 1,000 on,
when all graphs are traced and all buffers allocated. Needs Linux. A longer run takes fewer samples, see
`kmp.callbacks.GradientHistogram`.
"""

import argparse
import gc
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # its float16 is many times slower on newer CPUs

import keras
import numpy as np

import kmp
from kmp.bench.measurement import in_new_process

EVERY_N_STEPS, WARM_UP_STEPS, BATCH_SIZE = 50, 1000, 32
LIMIT = 10.0  # MB


def train(variant, steps):
    """Returns the resident memory in MB after the warm-up and at the end of a training."""
    memory = []

    def measure(epoch, logs):
        gc.collect()
        memory.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20)

    keras.utils.set_random_seed(0)
    with tempfile.TemporaryDirectory() as log_dir:
        callbacks = []
        if variant == "kmp":
            kmp.enable()
            callbacks = kmp.callbacks.defaults(log_dir, every_n_steps=EVERY_N_STEPS)
        else:
            keras.config.set_dtype_policy("mixed_float16")
        hidden = [keras.layers.Dense(64, activation="relu") for _ in range(8)]
        model = keras.Sequential([keras.Input((32,)), *hidden, keras.layers.Dense(1, dtype="float32")])
        model.compile("adam", "mse", jit_compile=False)
        x = np.random.default_rng(0).standard_normal((WARM_UP_STEPS * BATCH_SIZE, 32)).astype("float32")
        callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=measure))
        epochs = steps // WARM_UP_STEPS
        model.fit(x, x.sum(1), batch_size=BATCH_SIZE, epochs=epochs, verbose=0, callbacks=callbacks)
    return memory[0], memory[-1]


def main():
    """Prints the growth of both; returns 1 if kmp's is more than 10 MB above that of Keras."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30_000, help=f"a multiple of {WARM_UP_STEPS}")
    steps = parser.parse_args().steps
    if steps < 2 * WARM_UP_STEPS or steps % WARM_UP_STEPS:
        parser.error(f"--steps must be a multiple of {WARM_UP_STEPS}, at least {2 * WARM_UP_STEPS}")
    growth = {}
    for variant in ("Keras", "kmp"):
        begin, end = in_new_process(train, variant, steps)
        growth[variant] = end - begin
        print(
            f"{variant:6}{begin:7.1f} MB after step {WARM_UP_STEPS}, {end:.1f} after step {steps}: {end - begin:+.1f}"
        )
    more = growth["kmp"] - growth["Keras"]
    print(f"kmp grows by {more:.1f} MB more than stock Keras; the limit is {LIMIT:.0f} MB")
    return int(more >= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
