"""One worker of a multi-worker job, configured by TF_CONFIG.

`python one_worker.py` prints results as JSON.
"""

import json
import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import keras
import matrix
import numpy as np
import tensorflow as tf

import kmp

STRATEGY = tf.distribute.MultiWorkerMirroredStrategy()
WORKER = STRATEGY.cluster_resolver.task_id
# The workers with corrupt data in each step. "nan" puts NaN in the data; without it, only the
# backward pass overflows.
CORRUPTION_BY_STEP = [(), (0,), (1,), (0, 1), (), ("nan", 0), ("nan", 1), ()]


def corrupt(x, corruption):
    if WORKER in corruption:
        x[0] = np.nan if "nan" in corruption else 64.0
    return x


@tf.custom_gradient
def overflows_backward(x):
    return tf.identity(x), lambda gradient: tf.where(tf.abs(x) > 32.0, np.inf, 1.0) * gradient


def local_value(variable):
    return next(value.numpy() for value in STRATEGY.experimental_local_results(variable.value))


def as_lists(values):
    return [np.asarray(value).tolist() for value in values]


def make_model(model_class=keras.Sequential):
    keras.utils.set_random_seed(0)
    with STRATEGY.scope():
        return model_class(
            [
                keras.Input((4,)),
                keras.layers.Dense(4, kernel_initializer="identity", name="before"),
                keras.layers.Lambda(overflows_backward, dtype="float32"),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1, dtype="float32"),
            ]
        )


def compiled_loop():
    """Trains as `loop` does, with a step that each worker compiles."""
    return loop(jit_compile=True)


def loop(jit_compile=False):
    """Trains in a guarded custom loop; returns the state after each step."""
    kmp.enable()
    model = make_model()
    with STRATEGY.scope():
        optimizer = kmp.wrap("adam", jit_compile=jit_compile)
        optimizer.build(model.trainable_variables)

    def forward_and_apply(x, y):
        with kmp.guard(optimizer, model):
            with tf.GradientTape() as tape:
                scaled_loss = optimizer.scale_loss(
                    tf.reduce_mean((model(x, training=True) - y) ** 2) / 2
                )
            optimizer.apply(
                tape.gradient(scaled_loss, model.trainable_variables), model.trainable_variables
            )

    step = tf.function(lambda x, y: STRATEGY.run(forward_and_apply, args=(x, y)))
    random, states = np.random.default_rng(WORKER), []
    for corruption in CORRUPTION_BY_STEP:
        x = random.normal(size=(4, 4)).astype("float32")
        y = x.sum(1, keepdims=True)
        step(tf.constant(corrupt(x, corruption)), tf.constant(y))
        snapshot = optimizer.snapshot()
        states.append(
            {
                "shared": as_lists(
                    map(local_value, [*model.trainable_variables, *optimizer.variables])
                ),
                "own": as_lists(map(local_value, model.non_trainable_variables)),
                "scale": snapshot.loss_scale,
                "overflows": snapshot.overflow_count,
                "from the loss": snapshot.nonfinite_loss_count,
                "by variable": snapshot.overflows_by_variable,
            }
        )
    return states


def batches(count=8):
    random = np.random.default_rng(1)
    x = random.normal(size=(count * 8, 4)).astype("float32")
    y = x.sum(1, keepdims=True)
    x[8 * 3] = np.nan  # on one worker
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(8).with_options(shard_by_element())


def shard_by_element():
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return options


class ExtraLogs(keras.Sequential):
    """Adds a vector and a Python number to the logs of each step."""

    def train_step(self, data):
        return super().train_step(data) | {"vector": tf.constant([1.0, 3.0]), "number": 5}


def fit():
    """Runs `fit`, `evaluate` and `predict`.

    Only the chief has loggers: a snapshot must not need the other workers.
    """
    kmp.enable()
    model = make_model(ExtraLogs)
    with STRATEGY.scope():
        model.compile("adam", "mse", metrics=["mae"])
    callbacks = [kmp.callbacks.Monitor(replay=False, patience=20)]
    if WORKER == 0:
        callbacks += [
            kmp.callbacks.LossScaleLogger(every_n_steps=2),
            kmp.callbacks.OverflowCounter(every_n_steps=2),
        ]
    kmp.disable()
    kmp.enable()
    history = model.fit(batches(), epochs=2, shuffle=False, verbose=0, callbacks=callbacks).history
    evaluated = model.evaluate(batches().skip(4), verbose=0)
    predicted = model.predict(batches().skip(4), verbose=0)
    snapshot = model.optimizer.snapshot()
    kmp.disable()
    return {
        "reported": [np.asarray(history["vector"][0]).tolist(), history["number"]],
        "history": {key: history[key] for key in ("loss", "mae")},
        "evaluated": evaluated,
        "predicted": [list(predicted.shape), bool(np.isfinite(predicted).all())],
        "shared": as_lists(
            map(local_value, [*model.trainable_variables, *model.optimizer.variables])
        ),
        "finite": all(np.isfinite(local_value(variable)).all() for variable in model.weights),
        "counts": [snapshot.step, snapshot.overflow_count, snapshot.nonfinite_loss_count],
        "keras is as it was": keras.Model._maybe_symbolic_build.__module__.startswith("keras."),
    }


def options():
    """Trains with each option of the inner optimizer; returns the results."""
    kmp.enable()
    results = {}
    for option in matrix.OPTIONS:
        with STRATEGY.scope():
            # In graphs, Keras' optimizers update variables in a branch for these, which fails.
            model = matrix.make_model(option, run_eagerly=option == "ema, accumulation")
        x, y = matrix.data()
        dataset = (
            tf.data.Dataset.from_tensor_slices((x, y)).batch(8).with_options(shard_by_element())
        )
        model.fit(dataset, shuffle=False, verbose=0)
        snapshot = model.optimizer.snapshot()
        state = as_lists(map(local_value, [*model.trainable_variables, *model.optimizer.variables]))
        finite = all(np.isfinite(local_value(variable)).all() for variable in model.weights)
        results[option] = [
            snapshot.step,
            snapshot.overflow_count,
            snapshot.loss_scale,
            finite,
            state,
        ]
    return results


def stock():
    """Runs `fit` of stock Keras; returns the error message."""
    model = make_model()
    with STRATEGY.scope():
        model.compile("adam", "mse")
    try:
        model.fit(batches(), shuffle=False, verbose=0)
    except ValueError as error:
        return str(error)
    return "works"


if __name__ == "__main__":
    results = {}
    for check in (loop, compiled_loop, fit, options, stock):
        kmp.disable()
        keras.config.set_dtype_policy("float32")
        results[check.__name__] = check()
    print("saw:", json.dumps(results), flush=True)
    os._exit(0)  # TensorFlow's shutdown of the worker cluster takes seconds
