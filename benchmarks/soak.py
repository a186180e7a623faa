"""How much does the resident memory grow in a long training, with kmp and with stock Keras?

    python benchmarks/soak.py [--quick] [--json FILE]

30,000 steps in `mixed_float16`, each variant in its own process; kmp's has
`kmp.callbacks.defaults(log_dir)` with a record every 50 steps. Memory is compared with that after
1,000 steps, when all graphs are traced and all buffers allocated. Needs Linux.
"""

import gc
import os
import tempfile
from pathlib import Path

import keras
import tensorflow as tf
from measuring import main

from kmp import callbacks
from kmp_bench.measurement import comparison, in_new_process
from kmp_bench.models import KERAS, OURS, compiled_model, mlp


def measure(is_quick):
    """Yields the memory of each variant after the warm-up and at the end."""
    epochs, steps = (2, 100) if is_quick else (30, 1_000)
    for variant in (OURS,) if is_quick else (KERAS, OURS):
        memory = in_new_process(memory_after_epochs, variant, epochs, steps)
        values = {
            f"after step {steps:,}": memory[:1],
            f"after step {epochs * steps:,}": memory[-1:],
        }
        yield comparison("resident memory", variant, "graph", values, "B")


def memory_after_epochs(variant, epochs, steps):
    """Returns the resident memory in bytes after each epoch of a training, in a new process."""
    memory = []

    def record(epoch, logs):
        gc.collect()
        memory.append(
            int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        )

    task = mlp(64, batch=32)
    model = compiled_model(task, "mixed_float16", variant, "graph")
    data = tf.data.Dataset.from_tensors((task.x, task.y)).cache().repeat()
    with tempfile.TemporaryDirectory() as folder:
        extra = callbacks.defaults(folder, every_n_steps=50) if variant == OURS else []
        extra.append(keras.callbacks.LambdaCallback(on_epoch_end=record))
        model.fit(
            data, steps_per_epoch=steps, epochs=epochs, shuffle=False, verbose=0, callbacks=extra
        )
    return memory


if __name__ == "__main__":
    main(measure, __doc__)
