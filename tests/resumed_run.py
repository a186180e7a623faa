"""A training run that can be killed and resumed: `python resumed_run.py FOLDER kmp|keras [STEP]`.

Writes all weights, the state of the optimizer and its counters to `FOLDER/result.npz`. With `STEP`, the process kills
itself after that many steps: a kill at a random time can corrupt the file of `keras.callbacks.BackupAndRestore`, which
overwrites it in place.
"""

import os
import signal
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import keras
import numpy as np
import tensorflow as tf

import kmp

EPOCHS, BATCHES, BATCH_SIZE = 12, 40, 8


class ShuffledBatches(keras.utils.PyDataset):
    """Batches whose order depends only on the epoch, so that a resumed run gets the same ones."""

    def __init__(self):
        super().__init__()
        random = np.random.default_rng(0)
        self.x = random.normal(size=(BATCHES * BATCH_SIZE, 4)).astype("float32")
        self.y = (self.x.sum(1) > 0).astype("int32")
        self.x[5] = np.nan
        self.x[100] = 6e4

    def shuffle(self, epoch, logs=None):
        self.order = np.random.default_rng(epoch).permutation(len(self.x))

    def __len__(self):
        return BATCHES

    def __getitem__(self, index):
        rows = self.order[index * BATCH_SIZE :][:BATCH_SIZE]
        return self.x[rows], self.y[rows]


class KillAfterSteps(keras.callbacks.Callback):
    def __init__(self, steps):
        super().__init__()
        self.remaining_steps = steps

    def on_train_batch_end(self, batch, logs=None):
        self.remaining_steps -= 1
        if not self.remaining_steps:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder, backup_callback, steps=None):
    keras.utils.set_random_seed(0)
    tf.config.experimental.enable_op_determinism()
    kmp.enable(growth_interval=7)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8),
            keras.layers.BatchNormalization(),
            keras.layers.Activation("relu"),
            *([keras.layers.Dropout(0.1)] if backup_callback == "kmp" else []),
            keras.layers.Dense(2),
            kmp.layers.Softmax(),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy")
    data = ShuffledBatches()
    data.shuffle(0)
    backup_class = keras.callbacks.BackupAndRestore if backup_callback == "keras" else kmp.callbacks.BackupAndRestore
    callbacks = [
        *kmp.callbacks.defaults(folder / "log", every_n_steps=25),
        backup_class(folder / "backup", double_checkpoint=True),
        keras.callbacks.LambdaCallback(on_epoch_begin=data.shuffle),
        *([KillAfterSteps(int(steps))] if steps else []),
    ]
    print("begins", flush=True)
    model.fit(data, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks)
    print("ends", flush=True)
    optimizer = model.optimizer
    state = [*model.weights, *optimizer.variables, *optimizer.counters.weights]
    np.savez(folder / "partial.npz", *[variable.numpy() for variable in state])
    (folder / "partial.npz").replace(folder / "result.npz")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
