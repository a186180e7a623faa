"""Trains a small model for many steps and prints how much resident memory grows, with kmp and with stock Keras.

    python tests/soak.py [--steps N]

Each of the two runs in a process of its own. kmp's run has `kmp.callbacks.defaults(log_dir)` with a record every 50
steps; the other is Keras' `mixed_float16`, which records nothing. Growth is counted from step 1,000 on, when all graphs
are traced and all buffers allocated. Reads `/proc`, so it needs Linux.

A longer run takes fewer samples, see `kmp.callbacks.GradientHistogram`.
"""

import argparse
import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # its float16 is many times slower on newer CPUs

EVERY_N_STEPS = 50
WARM_UP_STEPS = 1000
BATCH_SIZE = 32
LIMIT = 10.0
VARIANTS = ("Keras", "kmp")


def resident_megabytes():
    """Returns the resident memory of this process after a garbage collection."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def train(variant, steps, log_dir):
    """Trains the model and prints its resident memory after the warm-up and at the end."""
    import keras
    import numpy as np

    import kmp

    keras.utils.set_random_seed(0)
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
    memory = []
    recorder = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: memory.append(resident_megabytes()))
    epochs = steps // WARM_UP_STEPS
    model.fit(x, x.sum(1), batch_size=BATCH_SIZE, epochs=epochs, verbose=0, callbacks=[*callbacks, recorder])
    print(memory[0], memory[-1])


def growth(variant, steps):
    """Returns the growth in megabytes of a training in a new process, and prints it."""
    with tempfile.TemporaryDirectory() as log_dir:
        command = [sys.executable, __file__, "--steps", str(steps), "--variant", variant, "--log-dir", log_dir]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    begin, end = map(float, output.split()[-2:])
    print(
        f"{variant:6} {begin:6.1f} MB after step {WARM_UP_STEPS}, {end:6.1f} MB after step {steps}: {end - begin:+.1f}"
    )
    return end - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30_000, help=f"a multiple of {WARM_UP_STEPS}")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--log-dir", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant:
        train(arguments.variant, arguments.steps, arguments.log_dir)
        return 0
    if arguments.steps < 2 * WARM_UP_STEPS or arguments.steps % WARM_UP_STEPS:
        parser.error(f"--steps must be a multiple of {WARM_UP_STEPS}, at least {2 * WARM_UP_STEPS}")
    stock, ours = (growth(variant, arguments.steps) for variant in VARIANTS)
    print(f"kmp grows by {ours - stock:.1f} MB more than stock Keras; the limit is {LIMIT:.0f} MB")
    return int(ours - stock >= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
