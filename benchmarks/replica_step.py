"""What does XLA gain on each replica of a strategy?

    python benchmarks/replica_step.py [--quick] [--json FILE]

Steps of `fit`'s train function under a `MirroredStrategy` with two replicas: two virtual devices of
a CPU, or two GPUs if there are any. Relative to graph mode, measured alternately in one process.
"""

import functools

import keras
import numpy as np
import tensorflow as tf
from measuring import main

import kmp
from kmp_bench.measurement import alternate, comparison, in_new_process, seconds_per_call

VARIANTS = {"graph": False, "XLA": True}


def measure(is_quick):
    """Yields the first calls and the steps of each model and policy."""
    policies = ["mixed_float16"] if is_quick else ["float32", "mixed_bfloat16", "mixed_float16"]
    steps, rounds = (1, 1) if is_quick else (5, 5)
    for name in MODELS:
        for policy in policies:
            # TensorFlow mixes up the collectives of two such strategies in one process.
            calls, times = in_new_process(seconds_of, name, policy, steps, rounds)
            case = f"{name}, {policy}"
            yield comparison("first call", case, "two replicas", calls)
            yield comparison("step", case, "two replicas", times)


def seconds_of(name, policy, steps, rounds):
    """Returns the seconds of the first calls and of steps, by variant."""
    step_of = functools.partial(train_step, two_replicas(), MODELS[name], policy)
    functions = {variant: step_of(jit) for variant, jit in VARIANTS.items()}
    calls = {variant: [seconds_per_call(each)] for variant, each in functions.items()}
    several = {
        variant: functools.partial(seconds_per_call, each, steps)
        for variant, each in functions.items()
    }
    return calls, alternate(several, rounds)


def two_replicas():
    """Returns a strategy with two replicas."""
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) >= 2:
        return tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"])
    halves = [tf.config.LogicalDeviceConfiguration()] * 2
    cpu = tf.config.list_physical_devices("CPU")[0]
    if len(tf.config.get_logical_device_configuration(cpu) or ()) < 2:
        tf.config.set_logical_device_configuration(cpu, halves)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def train_step(strategy, build, policy, jit_compile):
    """Returns a function that takes a step of a new model and waits for its loss."""
    with kmp.enable(policy), strategy.scope():
        model = build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, jit_compile=jit_compile)
        batch = np.ones((64, *model.input_shape[1:]), "float32"), np.zeros(64, "int64")
        data = tf.data.Dataset.from_tensors(batch).repeat()
        model.make_train_function()
    iterator = iter(strategy.experimental_distribute_dataset(data))

    def step():
        with kmp.enable(policy):
            return float(model.train_function(iterator)["loss"])

    return step


def dense():
    layers = [keras.layers.Dense(512, "relu") for _ in range(4)]
    return keras.Sequential([keras.Input((256,)), *layers, keras.layers.Dense(10, dtype="float32")])


def convolutions():
    hidden = image = keras.Input((32, 32, 3))
    for width in (16, 32, 64):
        hidden = keras.layers.Conv2D(width, 3, strides=2, padding="same")(hidden)
        hidden = keras.layers.ReLU()(keras.layers.BatchNormalization()(hidden))
    pooled = keras.layers.GlobalAveragePooling2D()(hidden)
    return keras.Model(image, keras.layers.Dense(10, dtype="float32")(pooled))


MODELS = {"dense": dense, "convolutions": convolutions}

if __name__ == "__main__":
    main(measure, __doc__)
