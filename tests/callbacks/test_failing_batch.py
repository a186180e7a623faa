import keras
import numpy as np
import pytest
from conftest import MODES, compiled_model, fit_data, small_data, user_warnings
from keras import layers

import kmp
from kmp.callbacks import Monitor, StuckError

pytestmark = pytest.mark.usefixtures("enabled")


def corrupt_data(batch=5, rows=(1, 4), batches=12):
    """Returns data with NaN in rows of one batch, which is numbered from 1."""
    x, y = small_data(batches)
    for row in rows:
        x[8 * batch - 8 + row] = np.nan
    return x, y


def warning_of(warned):
    (text,) = [text for text in map(str, user_warnings(warned)) if "skipped" in text]
    return text


@pytest.mark.parametrize(
    "mode", ["eager", pytest.param("xla", marks=pytest.mark.exhaustive), "steps_per_execution"]
)
def test_failing_batch_is_saved_and_its_rows_are_named(mode, tmp_path):
    model = compiled_model(**MODES[mode])
    path, data = tmp_path / "new" / "bad.npz", corrupt_data()
    with pytest.warns(UserWarning, match="Step 5 was skipped") as warned:
        fit_data(model, data, kmp.callbacks.defaults(repair=False, failing_batch=path))
    text = warning_of(warned)
    assert "the batch's x contains NaN or Inf in 2 of 8 rows (1, 4). The batch is saved in" in text
    assert repr(str(path)) in text
    batch = np.load(path)
    np.testing.assert_array_equal(batch["x"], data[0][32:40])
    np.testing.assert_array_equal(batch["y"], data[1][32:40])
    assert np.isnan(np.asarray(model(batch["x"]))).any(axis=1).nonzero()[0].tolist() == [1, 4]


def test_arrays_of_several_inputs_are_saved_by_their_keys(tmp_path):
    ids, values = keras.Input((), dtype="int32", name="ids"), keras.Input((2,), name="values")
    embedded = layers.Embedding(5, 2)(ids)
    model = keras.Model(
        {"ids": ids, "values": values}, layers.Dense(1)(layers.Add()([embedded, values]))
    )
    model.compile("sgd", "mse", run_eagerly=True)
    x = {"ids": np.arange(8, dtype="int32") % 5, "values": np.ones((8, 2), "float32")}
    weights = np.full(8, np.inf, "float32")
    path = tmp_path / "bad.npz"
    with pytest.warns(
        UserWarning, match="sample_weight contains NaN or Inf in 8 of 8 rows"
    ) as warned:
        model.fit(
            *(x, np.ones((8, 1), "float32")),
            sample_weight=weights,
            shuffle=False,
            verbose=0,
            callbacks=kmp.callbacks.defaults(repair=False, failing_batch=path),
        )
    assert "(0, 1, 2, 3, 4, ...)" in warning_of(warned)
    batch = np.load(path)
    loaded = {name: batch[f"x/{name}"] for name in ("ids", "values")}
    np.testing.assert_equal(loaded, x)
    np.testing.assert_array_equal(batch["sample_weight"], weights)
    assert loaded["ids"].dtype == "int32"
    assert model(loaded).shape == (8, 1)


def test_batch_of_the_first_step_replaces_an_earlier_file_of_kmp(tmp_path):
    path, model = tmp_path / "bad.npz", compiled_model(**MODES["graph"])
    for batch, step in ((2, 2), (7, 19)):
        data = corrupt_data(batch)
        data[0][-1] = np.nan  # of a later streak, which is not saved
        monitor = Monitor(failing_batch=path, repair=False)
        with pytest.warns(UserWarning, match=f"Step {step} was skipped"):
            fit_data(model, data, [monitor])
        assert np.load(path)["kmp_step"] == step
        np.testing.assert_array_equal(np.load(path)["x"], data[0][8 * batch - 8 : 8 * batch])


@pytest.mark.parametrize("content", [b"of the user", None])
def test_file_of_the_user_is_an_error_before_training_and_stays(content, tmp_path):
    path = tmp_path / "bad.npz"
    if content is None:
        np.savez(path, x=np.ones(3))
    else:
        path.write_bytes(content)
    before = path.read_bytes()
    model = compiled_model(**MODES["graph"])
    with pytest.raises(FileExistsError, match="is not a batch of kmp"):
        fit_data(model, corrupt_data(), [Monitor(failing_batch=path)])
    assert path.read_bytes() == before
    assert model.optimizer.snapshot().step == 0


def test_batch_that_cannot_be_written_ends_no_training(tmp_path):
    folder = tmp_path / "folder"
    monitor = Monitor(failing_batch=folder / "bad.npz", repair=False)
    model = compiled_model(run_eagerly=True)

    class Removes(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if folder.exists():
                folder.rmdir()

    with pytest.warns(UserWarning, match="The batch was not saved: .*No such file"):
        fit_data(model, corrupt_data(batches=6), [monitor, Removes()])
    assert model.optimizer.snapshot().step == 6


def test_error_of_the_first_step_names_the_file(tmp_path):
    path = tmp_path / "bad.npz"
    monitor = Monitor(failing_batch=path, on_nonfinite="raise")
    with pytest.raises(StuckError, match="The batch is saved in"):
        fit_data(compiled_model(run_eagerly=True), corrupt_data(), [monitor])
    assert path.exists()


@pytest.mark.parametrize(
    "options", [{"replay": False}, {"on_nonfinite": "ignore"}, {"failing_batch": "bad.npy"}]
)
def test_settings_with_which_no_batch_is_saved_are_an_error(options):
    with pytest.raises(ValueError, match="failing_batch"):
        kmp.callbacks.defaults(**{"failing_batch": "bad.npz"} | options)
