"""Training on several workers in float16, with logs, a backup to resume from, and the model saved by the chief.

Two workers on this machine:

    python notebooks/several_workers.py runs/workers

Several machines: the same command on each, with a folder that all of them see, and with TF_CONFIG to tell each one the
cluster and its own place in it:

    export TF_CONFIG='{"cluster": {"worker": ["host0:12345", "host1:12345"]}, "task": {"type": "worker", "index": 0}}'

A run that is killed goes on from its last whole epoch when it is started again with the same folder, and becomes the
run that was never killed. Needs scikit-learn, for its digits.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

BATCH = 64  # of all workers together


def main() -> None:
    """Trains as the worker that TF_CONFIG names, or starts two of them."""
    parser = argparse.ArgumentParser(description="Trains a classifier of digits on several workers.")
    parser.add_argument("folder", type=Path, help="for the log, the backup and the model; shared by all workers")
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the workers end with the script that started them
    if "TF_CONFIG" in os.environ:
        train(arguments.folder, arguments.epochs)
    else:
        sys.exit(start_workers(2))


def train(folder: Path, epochs: int) -> None:
    """One worker's part: the same on all of them."""
    import keras
    import numpy as np
    import tensorflow as tf
    from sklearn.datasets import load_digits

    import kmp

    keras.utils.set_random_seed(0)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before anything else is made
    is_chief = strategy.cluster_resolver.task_id == 0  # in a cluster of workers alone, as here
    kmp.enable()
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(128),
                keras.layers.BatchNormalization(),
                keras.layers.Activation("relu"),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(10),
                kmp.layers.Softmax(),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])

    x, y = load_digits(return_X_y=True)
    x = x.astype("float32") / 16
    by_element = tf.data.Options()
    by_element.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA

    def batches(part: slice) -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensor_slices((x[part], y[part]))
        return data.batch(BATCH, drop_remainder=True).with_options(by_element)

    callbacks = [
        *kmp.callbacks.defaults(folder / "log", every_n_steps=20),  # on every worker; the chief writes
        kmp.callbacks.BackupAndRestore(folder / "backup"),  # on every worker; the chief writes, all read
    ]
    training, validation = batches(slice(0, 1536)), batches(slice(1536, None))
    shown = 2 if is_chief else 0
    arguments = {"epochs": epochs, "callbacks": callbacks, "verbose": shown, "shuffle": False}
    model.fit(training, validation_data=validation, **arguments)
    if is_chief:
        model.save(folder / "model.keras")
    fingerprint = sum(float(np.abs(weight.numpy().astype("float64")).sum()) for weight in model.trainable_variables)
    seen = model.optimizer.snapshot()
    print(
        f"worker {strategy.cluster_resolver.task_id}: weights {fingerprint:.12f}, step {seen.step}, "
        f"loss scale {seen.loss_scale:g}, overflow count {seen.overflow_count}",
        flush=True,
    )


def start_workers(count: int) -> int:
    """Starts this script once for each worker, and ends all of them when one fails."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    workers = []
    for index in range(count):
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        settings = {"TF_CONFIG": json.dumps(config), "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
        environment = os.environ | settings  # on the CPU: two processes do not share a GPU
        workers.append(subprocess.Popen([sys.executable, *sys.argv], env=environment))
    try:
        while any(worker.poll() is None for worker in workers) and not any(worker.poll() for worker in workers):
            time.sleep(0.2)
        return next((worker.returncode for worker in workers if worker.returncode), 0)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


if __name__ == "__main__":
    main()
