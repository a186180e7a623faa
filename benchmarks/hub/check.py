"""Runs the models of keras-hub in float32 and in float16 and records the results for each.

    python benchmarks/hub/check.py [NAME ...]

By default this checks all models, which takes about an hour. Results are written to
benchmarks/hub/results.json. Needs `pip install keras-hub`; the models are tiny, with random
weights.
"""

import contextlib
import json
import logging
import sys
import tempfile
import time
import warnings
from pathlib import Path

import hub_models
import keras
import numpy as np
import tensorflow as tf
from hub_table import MODES, RESULTS
from inputs import inputs_of

import kmp

STEPS = 30


def check(name):
    """Compares a model in float32 with the same weights in float16.

    float16 by Keras, by `kmp.enable` and by `kmp.convert`.
    """
    model = built(name)
    perturb(model)
    inputs = inputs_of(name, model)
    expected = outputs_of(model, inputs)
    try:
        audit = kmp.audit(model, inputs)
    except ValueError:  # it cannot be converted, which `in_float16` reports
        audit = kmp.audit(model)
    largest = max(audit.rows, key=lambda row: row.amax or 0.0)
    result = {
        "layers_and_operations": len(audit.rows),
        "float32": dict(audit.plan.float32),
        "largest": [largest.path, largest.amax],
        "float32_once_loaded": error_once_loaded(model, inputs, expected),
        "losses": losses_of(model, inputs),
    }
    for mode in MODES:
        with collected_messages() as messages:
            result[mode] = in_float16(name, mode, model, inputs, expected)
        result[mode]["messages"] = sorted(messages)
    return result


def in_float16(name, mode, model, inputs, expected):
    """Returns what a model does in a mode.

    The error of the outputs, losses of a short training, and whether the model is the same once
    loaded.
    """
    result = {}
    try:
        candidate = kmp.convert(model) if mode == "convert" else built(name, mode)
        if mode != "convert":
            candidate.set_weights(model.get_weights())
        assert all(
            np.array_equal(*pair)
            for pair in zip(candidate.get_weights(), model.get_weights(), strict=True)
        )
        outputs = outputs_of(candidate, inputs)
        result["error"] = relative_error(outputs, expected)
        if mode != "keras":
            result["error_once_loaded"] = error_once_loaded(candidate, inputs, outputs)
        scale_loss = keras.optimizers.LossScaleOptimizer if mode == "keras" else kmp.wrap
        result["losses"] = losses_of(candidate, inputs, scale_loss)
    except Exception as error:  # what a model raises is the result
        result["raises"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    return result


def built(name, mode=None):
    keras.utils.set_random_seed(0)
    with contextlib.ExitStack() as stack:
        if mode == "enable":
            stack.enter_context(kmp.enable())
        keras.config.set_dtype_policy(
            "mixed_float16" if mode == "keras" else keras.config.dtype_policy()
        )
        stack.callback(keras.config.set_dtype_policy, "float32")
        return hub_models.build(name)


def perturb(model):
    """Adds noise to the weights.

    Where an initializer is zero, nothing behind it would be computed.
    """
    random = np.random.default_rng(0)
    for variable in model.trainable_variables:
        noise = random.normal(scale=0.1, size=variable.shape)
        variable.assign(variable.numpy() + noise.astype(variable.dtype))


def outputs_of(model, inputs):
    """Returns the outputs in float32, flat."""
    outputs = keras.tree.flatten(model(inputs, training=False))
    return [np.asarray(keras.ops.cast(output, "float32")) for output in outputs]


def relative_error(outputs, expected):
    """Returns the norm of the difference, relative to that of the expected values.

    It is `None` if it is not finite.
    """
    actual, target = (
        np.concatenate([array.ravel() for array in arrays]) for arrays in (outputs, expected)
    )
    error = np.linalg.norm(actual - target) / np.linalg.norm(target)
    return float(error) if np.isfinite(error) else None


def error_once_loaded(model, inputs, outputs):
    """Saves a model and loads it under the policy.

    Keras does not save the policies of sublayers that code creates.
    """
    is_float16 = bool({"float16", "bfloat16"} & kmp.backend.compute_dtypes(model))
    with (
        tempfile.TemporaryDirectory() as folder,
        kmp.enable("mixed_float16" if is_float16 else "float32"),
    ):
        model.save(Path(folder) / "model.keras")
        try:
            loaded = keras.models.load_model(Path(folder) / "model.keras", compile=False)
        except ValueError:  # some do not load in float32 either
            return None
        return relative_error(outputs_of(loaded, inputs), outputs)


def losses_of(model, inputs, scale_loss=None):
    """Trains on fixed random targets, and returns the mean squared error before and after.

    The weights are restored.

    Args:
        model: The model.
        inputs: A batch.
        scale_loss: Wraps the optimizer of a model that computes in float16.
    """
    keras.utils.set_random_seed(0)
    weights = model.get_weights()
    random = np.random.default_rng(1)
    outputs = model(inputs, training=False)
    targets = keras.tree.map_structure(
        lambda output: random.normal(size=output.shape).astype("float32"), outputs
    )
    optimizer = keras.optimizers.Adam(3e-3)
    if "float16" in kmp.backend.compute_dtypes(model):
        optimizer = scale_loss(optimizer)
    variables = model.trainable_variables
    optimizer.build(variables)

    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as tape:
            predicted = model(inputs, training=True)
            pairs = zip(keras.tree.flatten(targets), keras.tree.flatten(predicted), strict=True)
            loss = sum(
                keras.ops.mean(keras.ops.square(y - keras.ops.cast(p, "float32"))) for y, p in pairs
            )
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, variables)
        reached = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        optimizer.apply_gradients(reached)
        return loss

    losses = [float(step()) for _ in range(STEPS)]
    model.set_weights(weights)
    return [losses[0], losses[-1] if np.isfinite(losses[-1]) else None]


@contextlib.contextmanager
def collected_messages():
    """Collects the first line of each warning, and of what kmp logs above information."""
    messages = set()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.add(record.getMessage().splitlines()[0])
    handler.addFilter(lambda record: "sees no GPU" not in record.getMessage())
    logger = logging.getLogger("kmp")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as issued:
            warnings.simplefilter("always")
            warnings.filterwarnings(
                "ignore", "__array__ implementation doesn't accept a copy keyword"
            )
            yield messages
    finally:
        logger.removeHandler(handler)
        messages |= {
            f"{found.category.__name__}: {str(found.message).splitlines()[0]}" for found in issued
        }


def main(selected):
    """Checks the selected models, or all of them, and writes the results."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in selected or hub_models.MODELS:
        start = time.perf_counter()
        results[name] = check(name)
        print(f"{name}: {results[name]}, {time.perf_counter() - start:.0f} s", flush=True)
        RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
        keras.utils.clear_session(free_memory=True)


if __name__ == "__main__":
    main(sys.argv[1:])
