"""Made the files beside it, with the code of commit 4c0321a: the last one with schema 2 and classes `import kmp>...`.

They must stay as that commit wrote them: `test_saved_files.py` loads them with today's code. To see how they were made:
`git worktree add /tmp/older 4c0321a && PYTHONPATH=/tmp/older python tests/saved_files/make.py FOLDER`.

`log_of_schema_3` is the log that commit c3e3eb3 writes in the same way: one of the last with schema 3.
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import kmp


def main(folder):
    keras.utils.set_random_seed(0)
    with kmp.enable(initial_scale=2.0**20, growth_interval=7):
        x = keras.Input((4,), name="x")
        hidden = keras.layers.Dense(4, activation="relu", name="hidden")(x)
        hidden = kmp.layers.BatchNormalization(name="norm")(hidden)
        logits = kmp.layers.Float32(keras.layers.Dense(3, name="logits"), name="wide")(hidden)
        model = keras.Model(x, kmp.layers.Softmax(name="probabilities")(logits), name="saved")
        model.compile(keras.optimizers.Nadam(1e-2), "sparse_categorical_crossentropy")
    random = np.random.default_rng(0)
    x, y = random.normal(size=(32, 4)).astype("float32") * 50, random.integers(0, 3, 32)
    x[8:16] = np.nan
    callbacks = kmp.callbacks.defaults(folder / "log", every_n_steps=2, on_stuck="ignore", probe=True)
    callbacks.append(kmp.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False))
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    model.save(folder / "model.keras")
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(folder / "checkpoint" / "state"))
    snapshot = model.optimizer.snapshot()
    expected = {
        "counters": {v.name: np.asarray(v.value).tolist() for v in model.optimizer.counters.weights},
        "prediction": model.predict(np.ones((1, 4), "float32"), verbose=0).tolist(),
        "loss_scale": snapshot.loss_scale,
        "clean_steps": snapshot.clean_steps,
    }
    (folder / "expected.json").write_text(json.dumps(expected, indent=1))

    keras.utils.set_random_seed(1)
    x = keras.Input((4,))
    exponential = keras.ops.exp(keras.layers.Dense(3)(x))
    kmp.convert(keras.Model(x, keras.layers.Dense(2)(exponential))).save(folder / "converted.keras")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
