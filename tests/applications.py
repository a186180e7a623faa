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

# The smallest images that they take with a top of their own.
SIDES = {"InceptionV3": 75, "InceptionResNetV2": 75, "Xception": 71}

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


def check(name):
    """Returns what became of one model: by what share of the largest probability it differs, how much stays float32."""
    keras.utils.set_random_seed(0)
    side = SIDES.get(name, 32)
    model = getattr(keras.applications, name)(weights=None, input_shape=(side, side, 3), classes=10)
    images = np.random.default_rng(0).uniform(0, 255, (4, side, side, 3)).astype("float32")
    wanted = outputs_of(model, images)
    audit = kmp.audit(model)
    converted = kmp.convert(model)
    for mine, its in zip(converted.variables, model.variables, strict=True):
        np.testing.assert_array_equal(mine, its)
    found = outputs_of(converted, images)
    np.testing.assert_allclose(found, wanted, atol=1e-2)
    np.testing.assert_array_equal(outputs_of(kmp.to_float32(converted), images), wanted)
    with tempfile.TemporaryDirectory() as folder:
        converted.save(Path(folder) / "model.keras")
        loaded = keras.models.load_model(Path(folder) / "model.keras", compile=False)
    np.testing.assert_array_equal(outputs_of(loaded, images), found)
    converted.compile(kmp.wrap(keras.optimizers.SGD(1e-3)), "sparse_categorical_crossentropy", run_eagerly=True)
    loss = converted.train_on_batch(images, np.arange(4))
    assert np.isfinite(loss), loss
    assert all(np.isfinite(np.asarray(variable)).all() for variable in converted.weights)
    return {
        "layers_and_operations": len(audit.rows),
        "float32": len(audit.plan.float32),
        "largest_difference": float(np.abs(found - wanted).max()),
        "loss": float(loss),
        "skipped_steps": converted.optimizer.snapshot().overflow_count,
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
