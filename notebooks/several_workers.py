"""Training on several workers in float16, with logs, a backup and a saved model.

Two workers on this machine:

    python notebooks/several_workers.py runs/workers

Several machines: the same command on each, with a folder that all of them can access. TF_CONFIG
contains the addresses of all workers and the index of this one:

    export TF_CONFIG='{"cluster": {"worker": ["host0:12345", "host1:12345"]},
                       "task": {"type": "worker", "index": 0}}'

If the run is killed, start it again with the same folder. It resumes after the last complete epoch,
and its result is the same as without the interruption. Needs scikit-learn, for its digits.
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
    """Trains as one worker if TF_CONFIG is set, otherwise starts two workers on this machine."""
    parser = argparse.ArgumentParser(
        description="Trains a classifier of digits on several workers."
    )
    parser.add_argument(
        "folder", type=Path, help="for the log, the backup and the model; shared by all workers"
    )
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()
    # Runs `finally` below, which stops the workers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if "TF_CONFIG" in os.environ:
        train(arguments.folder, arguments.epochs)
    else:
        sys.exit(start_workers(2))


def train(folder: Path, epochs: int) -> None:
    """Trains on this worker. All workers run the same code."""
    import keras
    import numpy as np
    import tensorflow as tf
    from sklearn.datasets import load_digits

    import kmp

    keras.utils.set_random_seed(0)
    # Before any other TensorFlow object is created.
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    # This cluster has only workers, no dedicated chief.
    is_chief = strategy.cluster_resolver.task_id == 0
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
    shard_by_element = tf.data.Options()
    shard_by_element.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )

    def batches(part: slice) -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensor_slices((x[part], y[part]))
        return data.batch(BATCH, drop_remainder=True).with_options(shard_by_element)

    # On every worker; the chief writes.
    callbacks = kmp.callbacks.defaults(folder / "log", every_n_steps=20)
    training, validation = batches(slice(0, 1536)), batches(slice(1536, None))
    model.fit(
        training,
        validation_data=validation,
        epochs=epochs,
        callbacks=callbacks,
        verbose=2 if is_chief else 0,
        shuffle=False,
    )
    if is_chief:
        model.save(folder / "model.keras")
    weight_sum = sum(
        float(np.abs(weight.numpy().astype("float64")).sum())
        for weight in model.trainable_variables
    )
    snapshot = model.optimizer.snapshot()
    print(
        f"worker {strategy.cluster_resolver.task_id}: sum of absolute weights {weight_sum:.12f},"
        f" step {snapshot.step}, loss scale {snapshot.loss_scale:g}, overflow count"
        f" {snapshot.overflow_count}",
        flush=True,
    )


def start_workers(count: int) -> int:
    """Starts this script once per worker, and returns the exit code.

    If one worker fails, all are stopped.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]
    workers = []
    for index in range(count):
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        settings = {
            "TF_CONFIG": json.dumps(config),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "CUDA_VISIBLE_DEVICES": "",
        }
        environment = os.environ | settings  # on the CPU: two processes cannot share a GPU
        workers.append(subprocess.Popen([sys.executable, *sys.argv], env=environment))
    try:
        while any(worker.poll() is None for worker in workers) and not any(
            worker.poll() for worker in workers
        ):
            time.sleep(0.2)
        return next((worker.returncode for worker in workers if worker.returncode), 0)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


if __name__ == "__main__":
    main()
