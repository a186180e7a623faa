"""Files of an earlier version load: see `saved_files/make.py` on how they were made."""

import json
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from packaging.version import Version

import kmp
from kmp.layers import Float32Operation
from kmp.records import SCHEMA

FILES = Path(__file__).parent / "saved_files"
EXPECTED = json.loads((FILES / "expected.json").read_text())
# Later versions of Keras add arguments to the configs of layers, which earlier ones refuse.
pytestmark = pytest.mark.skipif(Version(keras.__version__) < Version("3.15"), reason="Keras 3.15.1 saved these files.")
RENAMED = {"culprit": "overflow_origin", "culprits_by_variable": "overflow_origins_by_variable"}
ORIGINS = {"hidden/kernel": 2, "norm/beta": 2}


def assert_counters_are_as_saved(optimizer):
    counters = {}
    optimizer.counters.save_own_variables(counters)
    assert {name: value.tolist() for name, value in counters.items()} == {
        RENAMED.get(name, name): value for name, value in EXPECTED["counters"].items()
    }
    snapshot = optimizer.snapshot()
    assert (snapshot.overflow_origin, snapshot.overflow_origins_by_variable) == ("hidden/kernel", ORIGINS)
    assert (snapshot.loss_scale, snapshot.clean_steps) == (EXPECTED["loss_scale"], EXPECTED["clean_steps"])


def test_model_file_loads_with_its_layers_optimizer_and_counters():
    model = keras.models.load_model(FILES / "model.keras")
    kinds = [type(layer) for layer in model.layers[2:]]
    assert kinds == [kmp.layers.BatchNormalization, kmp.layers.Float32, kmp.layers.Softmax]
    assert type(model.optimizer) is kmp.LossScaleOptimizer
    assert_counters_are_as_saved(model.optimizer)
    prediction = model.predict(np.ones((1, 4), "float32"), verbose=0)
    np.testing.assert_allclose(prediction, EXPECTED["prediction"], rtol=1e-3)


def test_converted_model_file_loads():
    model = keras.models.load_model(FILES / "converted.keras")
    assert any(isinstance(operation, Float32Operation) for operation in model.operations)
    assert np.isfinite(model.predict(np.ones((1, 4), "float32"), verbose=0)).all()


def test_classes_are_saved_under_the_package_name(tmp_path):
    keras.models.load_model(FILES / "model.keras").save(tmp_path / "model.keras")
    model = keras.models.load_model(tmp_path / "model.keras")
    config = keras.saving.serialize_keras_object(model)
    names = {layer.get("registered_name") for layer in config["config"]["layers"]}
    assert {"kmp>BatchNormalization", "kmp>Float32", "kmp>Softmax"} <= names
    assert keras.saving.serialize_keras_object(model.optimizer)["registered_name"] == "kmp>LossScaleOptimizer"


def test_backup_resumes(tmp_path):
    shutil.copytree(FILES / "backup", tmp_path / "backup")
    model = keras.models.load_model(FILES / "model.keras")
    model.optimizer.counters.steps.assign(0)
    backup = kmp.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
    restored = []
    check = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: restored.append(assert_counters_are_as_saved(model.optimizer))
    )
    x, y = np.ones((8, 4), "float32"), np.zeros(8)
    assert model.fit(x, y, epochs=3, verbose=0, callbacks=[backup, check]).epoch == [2]
    assert len(restored) == 1


def test_checkpoint_of_tensorflow_is_restored():
    model = keras.models.load_model(FILES / "model.keras", compile=False)
    model.compile(kmp.LossScaleOptimizer(keras.optimizers.Nadam(1e-2)), "sparse_categorical_crossentropy")
    model.optimizer.build(model.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    checkpoint.read(str(FILES / "checkpoint" / "state")).expect_partial()
    assert_counters_are_as_saved(model.optimizer)


@pytest.fixture(params=["log", "log_of_schema_3"])
def log(request):
    """A log of an older schema."""
    return FILES / request.param


def test_log_is_read(log):
    run = kmp.load_run(log)
    assert run.last("overflow_origins_by_variable") == ORIGINS
    assert run.last("overflow_origin") == "hidden/kernel"
    assert not {key for row in run.rows for key in row} & set(RENAMED)
    assert len(run.samples) > 1
    norms = [sample.total_norm for sample in run.samples]
    np.testing.assert_allclose(norms, run.series("grad_norm")[1], rtol=1e-9)
    assert {histogram.total for histogram in run.histograms} == {43}
    assert kmp.advise(run).verdict


def test_log_that_a_training_continues_is_rewritten_and_the_earlier_one_kept(log, tmp_path, caplog):
    shutil.copytree(log, tmp_path / "log")
    earlier = kmp.load_run(tmp_path / "log")
    model = keras.models.load_model(FILES / "model.keras")
    x, y = np.ones((8, 4), "float32"), np.zeros(8)
    model.fit(x, y, verbose=0, callbacks=kmp.callbacks.defaults(tmp_path / "log", every_n_steps=1))
    run = kmp.load_run(tmp_path / "log")
    assert run.header["schema"] == SCHEMA
    assert run.rows[: len(earlier.rows)] == earlier.rows
    assert len(run.rows) > len(earlier.rows)
    assert '"culprit' not in (tmp_path / "log" / "kmp.jsonl").read_text()
    assert (tmp_path / "log" / "earlier-1" / "kmp.jsonl").read_bytes() == (log / "kmp.jsonl").read_bytes()
    assert f"schema {earlier.header['schema']}" in caplog.text


@pytest.mark.parametrize("schema", [1, 5, None])
def test_log_of_another_schema_is_refused(tmp_path, schema):
    (tmp_path / "kmp.jsonl").write_text(json.dumps({"schema": schema, "kind": "header"}) + "\n")
    with pytest.raises(ValueError, match=rf"kmp.jsonl:1: schema {schema}; .* reads schemas 2, 3 and 4"):
        kmp.load_run(tmp_path)
