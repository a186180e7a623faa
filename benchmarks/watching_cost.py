"""What does watching add to a step in float32 or bfloat16, on a CPU?

    python benchmarks/watching_cost.py [--quick] [--json FILE]

CPU time of a training step of a model that `compile` wrapped with a loss scale of 1, relative to
the plain optimizer. "smallest check" is what no optimizer that may skip a step can avoid: it adds
up all gradients, and takes the update in a branch. It is not correct, because finite numbers can
have an infinite sum; it shows how much of the cost is the waiting and the branch.
"""

import itertools
import time

import keras
import tensorflow as tf
from measuring import main, modes_of

import kmp
from kmp_bench.measurement import MODES, alternate, comparison
from kmp_bench.models import BARE, OURS, convolutional, mlp

MODELS = {
    "MLP of width 512, batch 64": lambda: mlp(512, batch=64),
    "MLP of width 512, batch 256": lambda: mlp(512, batch=256),
    "conv net of width 32": lambda: convolutional(32),
}
SMALLEST = "smallest check"
STEPS = 15  # of a turn


class SmallestCheck(keras.optimizers.Adam):
    """Adam that takes a step only if the sum of all gradients is finite."""

    def apply(self, grads, trainable_variables=None):
        if not self.built:
            self.build(trainable_variables)
        total = tf.add_n([tf.reduce_sum(gradient) for gradient in grads])

        def update():
            super(SmallestCheck, self).apply(grads, trainable_variables)
            return total

        tf.cond(tf.math.is_finite(total), update, lambda: total)


def measure(is_quick):
    """Yields the CPU time of a step of each model in each policy and mode."""
    rounds = 2 if is_quick else 40
    names = list(MODELS)[:1] if is_quick else MODELS
    policies = ["float32"] if is_quick else ["float32", "mixed_bfloat16"]
    for name, policy, mode in itertools.product(names, policies, modes_of(is_quick)):
        turns = {variant: turn(name, policy, mode, variant) for variant in (BARE, SMALLEST, OURS)}
        yield comparison(f"step in {policy}: CPU time", name, mode, alternate(turns, rounds))


def turn(name, policy, mode, variant):
    """Returns a function that trains a new model for a few steps, and returns the time of one."""
    with kmp.enable(policy):
        task = MODELS[name]()
        model = task.build()
        model.compile(
            SmallestCheck() if variant == SMALLEST else "adam",
            "sparse_categorical_crossentropy",
            jit_compile=MODES[mode],
            auto_scale_loss=variant == OURS,
        )
        data = tf.data.Dataset.from_tensors((task.x, task.y)).repeat()
        model.fit(data, steps_per_epoch=5, verbose=0, shuffle=False)
    iterator = iter(data)

    def seconds():
        begin = time.process_time()
        for _ in range(STEPS):
            model.train_function(iterator)
        return (time.process_time() - begin) / STEPS

    return seconds


if __name__ == "__main__":
    main(measure, __doc__)
