import keras
import numpy as np
import pytest

import kmp

mlflow = pytest.importorskip("mlflow", reason="needs the extra `loggers`")


@pytest.mark.slow
# In MLflow's own use of SQLAlchemy.
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
def test_mlflow_gets_the_loss_scale_and_the_norms_of_each_epoch_and_the_files(tmp_path):
    import mlflow.keras

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    mlflow.set_experiment(
        experiment_id=mlflow.create_experiment("digits", str(tmp_path / "artifacts"))
    )
    with kmp.enable(initial_scale=2.0**10, growth_interval=10):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with mlflow.start_run() as run:
        ours = kmp.callbacks.defaults(tmp_path / "run", log_norms=True)
        callbacks = [*ours, mlflow.keras.MlflowCallback()]
        trained = model.fit(
            np.ones((40, 4)),
            np.ones((40, 1)),
            batch_size=4,
            epochs=3,
            verbose=0,
            callbacks=callbacks,
        ).history
        mlflow.log_artifact(tmp_path / "run" / "kmp.jsonl")
    client = mlflow.MlflowClient()
    history = client.get_metric_history(run.info.run_id, "loss_scale")
    assert [metric.value for metric in history] == [2.0**11, 2.0**12, 2.0**13]
    (key,) = (key for key in trained if key.startswith("grad_norm/"))
    history = client.get_metric_history(run.info.run_id, key)
    assert [metric.value for metric in history] == trained[key]
    assert "kmp.jsonl" in [file.path for file in client.list_artifacts(run.info.run_id)]
