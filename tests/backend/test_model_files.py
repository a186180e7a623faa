import errno

import keras
import pytest
from conftest import assert_equal, compiled_model, file_size_limit

from kmp.backend import model_files


def built_model():
    model = compiled_model("adam")
    model.optimizer.build(model.trainable_variables)
    return model


@pytest.fixture
def model(enabled):
    return built_model()


def state(model):
    return [*model.weights, *model.optimizer.variables]


def write(suffix, model, path):
    with path.open("wb") as file:
        model_files.write_model(model, file, weights_only=suffix == ".weights.h5")


def test_keras_loads_the_written_model(tmp_path, model):
    write(".keras", model, tmp_path / "file.keras")
    assert_equal(state(keras.models.load_model(tmp_path / "file.keras")), state(model))


def test_keras_loads_the_written_weights_whose_file_has_the_size_of_that_of_keras(tmp_path, model):
    path, other = tmp_path / "file.weights.h5", built_model()
    write(".weights.h5", model, path)
    other.load_weights(path)
    assert_equal(state(other), state(model))
    model.save_weights(tmp_path / "keras.weights.h5")
    assert abs(path.stat().st_size - (tmp_path / "keras.weights.h5").stat().st_size) < 8192


@pytest.mark.parametrize("suffix", [".weights.h5", ".keras"])
def test_write_beyond_the_file_size_limit_raises(tmp_path, model, suffix):
    """HDF5 would end the process."""
    for size in (0, 3000, 12000):
        with file_size_limit(size), pytest.raises(OSError, match="too large") as caught:
            write(suffix, model, tmp_path / "file")
        assert caught.value.errno == errno.EFBIG


def test_model_larger_than_free_memory_is_not_written_through_a_second_file(tmp_path, model, monkeypatch):
    """Keras would let HDF5 write to that file."""
    monkeypatch.setattr("keras.src.saving.saving_lib.is_memory_sufficient", lambda model: False)
    with file_size_limit(3000), pytest.raises(OSError, match="too large"):
        write(".keras", model, tmp_path / "file")
