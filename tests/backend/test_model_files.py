import errno

import keras
import pytest
from conftest import assert_equal, compiled_model, file_size_limit

from kmp.backend import model_files

SUFFIXES = (".weights.h5", ".keras")


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


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_keras_loads_the_written_file(tmp_path, model, suffix):
    path = tmp_path / f"file{suffix}"
    write(suffix, model, path)
    if suffix == ".keras":
        other = keras.models.load_model(path)
    else:
        other = built_model()
        other.load_weights(path)
    assert_equal(state(other), state(model))


def test_weights_file_has_the_size_of_the_file_of_keras(tmp_path, model):
    write(".weights.h5", model, tmp_path / "file")
    model.save_weights(tmp_path / "keras.weights.h5")
    assert abs((tmp_path / "file").stat().st_size - (tmp_path / "keras.weights.h5").stat().st_size) < 8192


@pytest.mark.parametrize("suffix", SUFFIXES)
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
