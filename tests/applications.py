"""Converts the models of `keras.applications`, and says how each came out.

    python tests/applications.py [NAME ...]

writes a line for each into tests/applications.json, all of them by default. The tests take one of each family.
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

# The smallest images that they take with a top of their own, others 32.
SIDES = {"InceptionV3": 75, "InceptionResNetV2": 75, "Xception": 71}
SIDE_OF_EFFICIENTNETS = 64  # with 32 their last layers have one pixel, whose statistics magnify what is rounded off

# One of each family, the smallest.
FAMILIES = (
    *("ConvNeXtTiny", "DenseNet121", "EfficientNetB0", "EfficientNetV2B0", "InceptionResNetV2", "InceptionV3"),
    *("MobileNet", "MobileNetV2", "MobileNetV3Small", "NASNetMobile", "ResNet50", "ResNet50V2", "VGG16", "Xception"),
)


def names():
    """The classes of `keras.applications`, by name."""
    return [name for name in sorted(vars(keras.applications)) if name[0].isupper()]


def outputs_of(model, images):
    return np.asarray(model(images, training=False))


def learn_statistics(model, images):
    """Has BatchNormalization take its moving statistics from a batch: without, values fade from layer to layer.

    Nothing is dropped meanwhile: statistics of other activations than those of inference let values grow with depth.
    """
    meanwhile = {keras.layers.BatchNormalization: "momentum", keras.layers.Dropout: "rate"}
    before = [
        (layer, name, getattr(layer, name))
        for layer in model._flatten_layers()
        for kind, name in meanwhile.items()
        if isinstance(layer, kind)
    ]
    for layer, name, _ in before:
        setattr(layer, name, 0.0)
    model(images, training=True)
    for layer, name, value in before:
        setattr(layer, name, value)


def build(name):
    """Returns an untrained model that ends with logits."""
    side = SIDE_OF_EFFICIENTNETS if name.startswith("EfficientNet") else SIDES.get(name, 32)
    options = {"weights": None, "input_shape": (side, side, 3), "classes": 10, "classifier_activation": None}
    return getattr(keras.applications, name)(**options)


def drift(found, wanted):
    """Returns the norm of the difference over the norm of what was wanted."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def drift_of_stock(name, model, images, wanted):
    """Returns how far Keras' own mixed_float16 drifts with the same weights: what float16 does to this model."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        stock = build(name)
    finally:
        keras.config.set_dtype_policy("float32")
    stock.set_weights(model.get_weights())
    return drift(np.float32(outputs_of(stock, images)), wanted)


def check(name):
    """Returns what became of one model: how much of it stays float32, how far its logits drift, and a step's loss."""
    keras.utils.set_random_seed(0)
    model = build(name)
    side = model.input_shape[1]
    coarse = np.random.default_rng(0).uniform(0, 255, (16, 4, 4, 3)).astype("float32")
    images = np.asarray(keras.ops.image.resize(coarse, (side, side)))
    learn_statistics(model, images)
    wanted = outputs_of(model, images)
    audit = kmp.audit(model)
    converted = kmp.convert(model)
    for mine, its in zip(converted.variables, model.variables, strict=True):
        np.testing.assert_array_equal(mine, its)
    found = outputs_of(converted, images)
    np.testing.assert_array_equal(outputs_of(kmp.to_float32(converted), images), wanted)
    with tempfile.TemporaryDirectory() as folder:
        converted.save(Path(folder) / "model.keras")
        loaded = keras.models.load_model(Path(folder) / "model.keras", compile=False)
    np.testing.assert_array_equal(outputs_of(loaded, images), found)
    optimizer = kmp.wrap(keras.optimizers.SGD(1e-3), initial_scale=64.0)
    converted.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True)
    for _ in range(20):  # untrained networks may overflow until the loss scale has come down
        loss = converted.train_on_batch(images, np.arange(16) % 10)
        assert np.isfinite(loss), loss
        if optimizer.snapshot().overflow_count < optimizer.snapshot().step:
            break
    assert all(np.isfinite(np.asarray(variable)).all() for variable in converted.weights)
    last, its = converted.trainable_variables[-1], model.trainable_variables[-1]
    assert np.any(np.asarray(last) != np.asarray(its))
    return {
        "layers_and_operations": len(audit.rows),
        "float32": len(audit.plan.float32),
        "drift": drift(found, wanted),
        "drift_of_stock": drift_of_stock(name, model, images, wanted),
        "loss": float(loss),
        "skipped_steps": optimizer.snapshot().overflow_count,
    }


def main(chosen):
    """Checks models one after another and writes what came of each."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in chosen or names():
        start = time.perf_counter()
        results[name] = check(name)
        print(f"{name}: {results[name]}, {time.perf_counter() - start:.0f} s", flush=True)
        RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
