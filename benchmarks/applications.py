"""Converts the models of `keras.applications` and records the result for each.

    python benchmarks/applications.py [NAME ...]

By default this converts all models. Results are written to benchmarks/applications.json. The tests
convert two models: one with custom layers, and one with preprocessing and with operations beside
its layers.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import keras
import numpy as np

import kmp

RESULTS = Path(__file__).with_name("applications.json")

# The smallest image size that these models accept with a classifier on top; it is 32 for the
# others.
SIDES = {"InceptionV3": 75, "InceptionResNetV2": 75, "Xception": 71}
# At 32, their last layers have one pixel, and its statistics amplify rounding errors.
SIDE_OF_EFFICIENTNETS = 64


def model_names():
    """Returns the names of the model classes in `keras.applications`."""
    return [name for name in sorted(vars(keras.applications)) if name[0].isupper()]


def outputs_of(model, images):
    return np.asarray(model(images, training=False))


def adapt_statistics(model, images):
    """Sets BatchNormalization's moving statistics to those of a batch.

    With the initial ones, activations vanish. Dropout is disabled meanwhile: statistics that differ
    from those at inference make activations grow with depth.
    """
    zeroed_attributes = {keras.layers.BatchNormalization: "momentum", keras.layers.Dropout: "rate"}
    before = [
        (layer, name, getattr(layer, name))
        for layer in model._flatten_layers()
        for layer_class, name in zeroed_attributes.items()
        if isinstance(layer, layer_class)
    ]
    for layer, name, _ in before:
        setattr(layer, name, 0.0)
    model(images, training=True)
    for layer, name, value in before:
        setattr(layer, name, value)


def build(name):
    """Returns an untrained model that outputs logits."""
    side = SIDE_OF_EFFICIENTNETS if name.startswith("EfficientNet") else SIDES.get(name, 32)
    options = {
        "weights": None,
        "input_shape": (side, side, 3),
        "classes": 10,
        "classifier_activation": None,
    }
    return getattr(keras.applications, name)(**options)


def relative_error(actual, expected):
    """Returns the norm of the difference divided by the norm of the expected values."""
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def stock_relative_error(name, model, images, expected):
    """Returns the relative error of Keras' own mixed_float16 with the same weights."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        stock = build(name)
    finally:
        keras.config.set_dtype_policy("float32")
    stock.set_weights(model.get_weights())
    return relative_error(np.float32(outputs_of(stock, images)), expected)


def check(name):
    """Converts one model and measures it.

    Returns how much of it stays float32, the relative error of its logits and a step's loss.
    """
    keras.utils.set_random_seed(0)
    model = build(name)
    side = model.input_shape[1]
    low_resolution = np.random.default_rng(0).uniform(0, 255, (16, 4, 4, 3)).astype("float32")
    images = np.asarray(keras.ops.image.resize(low_resolution, (side, side)))
    adapt_statistics(model, images)
    expected = outputs_of(model, images)
    audit = kmp.audit(model)
    converted = kmp.convert(model)
    for variable, original in zip(converted.variables, model.variables, strict=True):
        np.testing.assert_array_equal(variable, original)
    outputs = outputs_of(converted, images)
    np.testing.assert_array_equal(outputs_of(kmp.to_float32(converted), images), expected)
    with tempfile.TemporaryDirectory() as folder:
        converted.save(Path(folder) / "model.keras")
        loaded = keras.models.load_model(Path(folder) / "model.keras", compile=False)
    np.testing.assert_array_equal(outputs_of(loaded, images), outputs)
    optimizer = kmp.wrap(keras.optimizers.SGD(1e-3), initial_scale=64.0)
    converted.compile(
        optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True
    )
    for _ in range(20):  # untrained networks may overflow until the loss scale is low enough
        loss = converted.train_on_batch(images, np.arange(16) % 10)
        assert np.isfinite(loss), loss
        if optimizer.snapshot().overflow_count < optimizer.snapshot().step:
            break
    assert all(np.isfinite(np.asarray(variable)).all() for variable in converted.weights)
    trained, untrained = converted.trainable_variables[-1], model.trainable_variables[-1]
    assert np.any(np.asarray(trained) != np.asarray(untrained))
    return {
        "layers_and_operations": len(audit.rows),
        "float32": len(audit.plan.float32),
        "relative_error": relative_error(outputs, expected),
        "relative_error_of_keras": stock_relative_error(name, model, images, expected),
        "loss": float(loss),
        "skipped_steps": optimizer.snapshot().overflow_count,
    }


def main(selected):
    """Checks the selected models, or all of them, and writes the results."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in selected or model_names():
        start = time.perf_counter()
        results[name] = check(name)
        print(f"{name}: {results[name]}, {time.perf_counter() - start:.0f} s", flush=True)
        RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
