"""One of several workers, as TF_CONFIG says: `python one_worker.py MODE`; prints what it saw as JSON."""

import itertools
import json
import os
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import keras
import matrix
import numpy as np
import tensorflow as tf

import kmp

STRATEGY = tf.distribute.MultiWorkerMirroredStrategy()
ME = STRATEGY.cluster_resolver.task_id
# Who is spoilt in which step, and how: by an overflow of the backward pass alone, or by the data.
STEPS = [(), (0,), (1,), (0, 1), (), ("nan", 0), ("nan", 1), ()]


def spoilt(x, who, kind):
    if ME in who:
        x[0] = np.nan if kind == "nan" else 64.0
    return x


@tf.custom_gradient
def overflows_backward(x):
    return tf.identity(x), lambda gradient: tf.where(tf.abs(x) > 32.0, np.inf, 1.0) * gradient


def local(variable):
    return next(part.numpy() for part in STRATEGY.experimental_local_results(variable.value))


def listed(values):
    return [np.asarray(value).tolist() for value in values]


def make_model():
    keras.utils.set_random_seed(0)
    with STRATEGY.scope():
        return keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(4, kernel_initializer="identity", name="before"),
                keras.layers.Lambda(overflows_backward, dtype="float32"),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1, dtype="float32"),
            ]
        )


def loop():
    """A loop of one's own; its step leaves no trace where it is skipped."""
    kmp.enable()
    model = make_model()
    with STRATEGY.scope():
        optimizer = kmp.wrap("adam")
        optimizer.build(model.trainable_variables)

    def forward_and_apply(x, y):
        with kmp.guard(optimizer, model):
            with tf.GradientTape() as tape:
                scaled = optimizer.scale_loss(tf.reduce_mean((model(x, training=True) - y) ** 2) / 2)
            optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)

    step = tf.function(lambda x, y: STRATEGY.run(forward_and_apply, args=(x, y)))
    random, seen = np.random.default_rng(ME), []
    for who in STEPS:
        x = random.normal(size=(4, 4)).astype("float32")
        y = x.sum(1, keepdims=True)
        step(tf.constant(spoilt(x, who, who[0] if "nan" in who else "")), tf.constant(y))
        found = optimizer.snapshot()
        seen.append(
            {
                "shared": listed(map(local, [*model.trainable_variables, *optimizer.variables])),
                "own": listed(map(local, model.non_trainable_variables)),
                "scale": found.loss_scale,
                "overflows": found.overflow_count,
                "from the loss": found.nonfinite_loss_count,
                "by variable": found.overflows_by_variable,
            }
        )
    return seen


def batches(count=8):
    random = np.random.default_rng(1)
    x = random.normal(size=(count * 8, 4)).astype("float32")
    y = x.sum(1, keepdims=True)
    x[8 * 3] = np.nan  # on one worker
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(8).with_options(by_element())


def by_element():
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return options


class Reports(keras.Sequential):
    """Reports a vector and a plain number with its step."""

    def train_step(self, data):
        return super().train_step(data) | {"vector": tf.constant([1.0, 3.0]), "number": 5}


def fit():
    """`fit`, `evaluate` and `predict`, with the loggers on the chief alone: a reading must need no other worker."""
    kmp.enable()
    model = make_model()
    with STRATEGY.scope():
        model.compile("adam", "mse", metrics=["mae"])
    callbacks = [kmp.callbacks.StuckDetector(patience=20)]
    if ME == 0:
        callbacks += kmp.callbacks.defaults(every_n_steps=2)[:2]
    kmp.disable()
    kmp.enable()
    history = model.fit(batches(), epochs=2, shuffle=False, verbose=0, callbacks=callbacks).history
    evaluated = model.evaluate(batches().skip(4), verbose=0)
    predicted = model.predict(batches().skip(4), verbose=0)
    found = model.optimizer.snapshot()
    with STRATEGY.scope():
        reports = Reports([*model.layers])
        reports.compile("sgd", "mse")
    reported = reports.fit(batches(), shuffle=False, verbose=0).history
    kmp.disable()
    return {
        "reported": [np.asarray(reported["vector"][0]).tolist(), reported["number"]],
        "history": {key: history[key] for key in ("loss", "mae")},
        "evaluated": evaluated,
        "predicted": [list(predicted.shape), bool(np.isfinite(predicted).all())],
        "shared": listed(map(local, [*model.trainable_variables, *model.optimizer.variables])),
        "finite": all(np.isfinite(local(variable)).all() for variable in model.weights),
        "counts": [found.step, found.overflow_count, found.nonfinite_loss_count],
        "keras is as it was": keras.Model._maybe_symbolic_build.__module__.startswith("keras."),
    }


def options():
    """The options of the inner optimizer, in graph mode and eagerly; the error where one is refused."""
    kmp.enable()
    seen = {}
    for option, eager in itertools.product(matrix.OPTIONS, (False, True)):
        with STRATEGY.scope():
            try:
                model = matrix.make_model(option, run_eagerly=eager)
            except ValueError as error:
                seen[f"{option}, {eager=}"] = str(error)
                continue
        x, y = matrix.data()
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).with_options(by_element())
        model.fit(dataset, shuffle=False, verbose=0)
        found = model.optimizer.snapshot()
        state = listed(map(local, [*model.trainable_variables, *model.optimizer.variables]))
        finite = all(np.isfinite(local(variable)).all() for variable in model.weights)
        seen[f"{option}, {eager=}"] = [found.step, found.overflow_count, found.loss_scale, finite, state]
    return seen


def stock():
    """`fit` as Keras has it; returns the error."""
    model = make_model()
    with STRATEGY.scope():
        model.compile("adam", "mse")
    try:
        model.fit(batches(), shuffle=False, verbose=0)
    except ValueError as error:
        return str(error)
    return "works"


def refused():
    """What is an error at compile on several workers."""
    kmp.enable()
    errors = []
    for arguments in ({"jit_compile": True}, {"steps_per_execution": 2}):
        with STRATEGY.scope():
            try:
                make_model().compile("adam", "mse", **arguments)
            except ValueError as error:
                errors.append(str(error))
    return errors


if __name__ == "__main__":
    modes = {"loop": loop, "fit": fit, "options": options, "stock": stock, "refused": refused}
    print("saw:", json.dumps(modes[sys.argv[1]]()), flush=True)
    os._exit(0)  # TensorFlow's own goodbye between workers takes seconds
