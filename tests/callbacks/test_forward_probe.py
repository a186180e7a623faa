import keras
import numpy as np
import pytest
from conftest import MODES
from keras import ops

import kmp


@keras.saving.register_keras_serializable("tests")
class DividesByZero(keras.layers.Layer):
    """Divides by an epsilon that is zero in float16 if its input is constant."""

    def call(self, x):
        variance = ops.var(x, axis=-1, keepdims=True)
        return x / ops.sqrt(variance + ops.cast(1e-8, x.dtype))


def fit_with_probe(x, y=None, layers=list, loss="mse", callbacks=None, fits=1, **arguments):
    with kmp.enable():
        head = keras.layers.Dense(1, dtype="float32", name="head")
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(4, use_bias=False, name="first"), *layers(), head], name="net"
        )
        model.compile("sgd", loss, **arguments)
        probe = kmp.callbacks.ForwardProbe(every_n_steps=1)
        y = np.zeros((len(x), 1)) if y is None else y
        for _ in range(fits):
            model.fit(x, y, batch_size=4, verbose=0, shuffle=False, callbacks=callbacks or [probe])
    return model, probe.run


def data():
    return np.random.default_rng(0).normal(size=(16, 4)).astype("float32")


@pytest.mark.parametrize("mode", MODES)
def test_layer_with_the_first_nonfinite_output_is_named(mode):
    x = data()
    x[4:8] = 0
    model, run = fit_with_probe(
        x, layers=lambda: [DividesByZero(name="divides"), keras.layers.Dense(4, name="after")], **MODES[mode]
    )
    assert model.optimizer.snapshot().nonfinite_loss_count == 1
    assert run.last("nonfinite_activation") == "net/divides"


def test_targets_beyond_float16_are_not_reported():
    x = data()
    x[4:8] = 0
    y = np.full((len(x), 1), 1e5)
    assert (
        fit_with_probe(x, y, layers=lambda: [DividesByZero(name="divides")])[1].last("nonfinite_activation")
        == "net/divides"
    )


def test_nonfinite_data_are_distinguished_from_a_layer():
    x = data()
    x[5, 2] = np.nan
    assert fit_with_probe(x)[1].last("nonfinite_activation") == "the batch's x"
    y = np.zeros((16, 1))
    y[3] = np.inf
    assert fit_with_probe(data(), y)[1].last("nonfinite_activation") == "the batch's y"


def test_loss_function_is_named_if_all_outputs_are_finite():
    def loss(y_true, y_pred):
        return y_pred / ops.zeros_like(y_pred)

    assert fit_with_probe(data(), loss=loss)[1].last("nonfinite_activation") == "the loss function"


def test_layer_that_overflows_float16_is_named():
    x = data()
    x[0] = 60000
    run = fit_with_probe(x, layers=lambda: [keras.layers.Dense(4, kernel_initializer="ones", name="overflows")])[1]
    assert run.last("nonfinite_activation") in ("net/first", "net/overflows")


def test_finite_run_records_nothing_and_restores_the_layers():
    model, run = fit_with_probe(data(), fits=2)
    assert run.last("nonfinite_activation") is None
    assert model.optimizer.snapshot().nonfinite_activation is None
    assert [layer for layer in model.layers if "call" in vars(layer)] == []


def test_nonfinite_value_inside_a_loop_is_detected_at_the_layers_output():
    x = np.ones((8, 3, 4), "float32")
    with kmp.enable():
        model = keras.Sequential([keras.Input((3, 4)), keras.layers.LSTM(2, name="loop"), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        probe = kmp.callbacks.ForwardProbe(every_n_steps=1)
        kernel = model.layers[0].cell.kernel
        kernel.assign(ops.full_like(kernel, np.nan))
        model.fit(x, np.ones((8, 1)), verbose=0, batch_size=4, callbacks=[probe])
    assert probe.run.last("nonfinite_activation").startswith(f"{model.name}/loop")


def test_error_of_a_stuck_run_names_the_first_nonfinite_tensor():
    x = data()
    x[:, 0] = np.inf
    with kmp.enable():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(1, dtype="float32")])
        model.compile("sgd", "mse")
        callbacks = [kmp.callbacks.ForwardProbe(), kmp.callbacks.StuckDetector(patience=3)]
        with pytest.raises(kmp.callbacks.StuckError, match="First NaN or Inf in: the batch's x"):
            model.fit(x, np.zeros((16, 1)), batch_size=4, verbose=0, callbacks=callbacks)


def test_nonfinite_batch_on_the_second_replica_is_detected(two_replicas):
    x = data()
    x[6] = np.nan
    with two_replicas.scope(), kmp.enable():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(1, dtype="float32")])
        model.compile("sgd", "mse")
    probe = kmp.callbacks.ForwardProbe(every_n_steps=1)
    model.fit(x, np.zeros((16, 1)), batch_size=8, verbose=0, shuffle=False, callbacks=[probe])
    assert probe.run.last("nonfinite_activation") == "the batch's x"


def test_finished_probe_is_removed_from_the_optimizer():
    x = data()
    x[0] = np.inf
    model, run = fit_with_probe(x)
    assert run.last("nonfinite_activation") == "the batch's x"
    assert model.optimizer.probe is None
    assert model.optimizer.snapshot().nonfinite_activation is None


def test_layer_without_a_path_is_named_by_its_name():
    with kmp.enable():
        inputs = keras.Input((4,))
        hidden = keras.layers.Activation("linear", name="later")(ops.divide(keras.layers.Dense(4)(inputs), 0.0))
        model = keras.Model(inputs, keras.layers.Dense(1, dtype="float32")(hidden))
        model.compile("sgd", "mse")
    probe = kmp.callbacks.ForwardProbe(every_n_steps=1)
    model.fit(data(), np.zeros((16, 1)), verbose=0, callbacks=[probe])
    assert probe.run.last("nonfinite_activation") == "later"


def test_two_probes_can_check_one_model():
    x = data()
    x[0] = np.nan
    probes = [kmp.callbacks.ForwardProbe(every_n_steps=1) for _ in range(2)]
    model, _ = fit_with_probe(x, callbacks=probes)
    assert [probe.run.last("nonfinite_activation") for probe in probes] == ["the batch's x"] * 2
    assert [layer for layer in model.layers if "call" in vars(layer)] == []


def test_input_beyond_float16_is_reported_as_the_batchs_x():
    x = data()
    x[0, 0] = 1e6
    assert fit_with_probe(x)[1].last("nonfinite_activation") == "the batch's x"
