import keras
import numpy as np
import pytest
from conftest import MODES
from keras import ops

import kmp


@keras.saving.register_keras_serializable("tests")
class Breaks(keras.layers.Layer):
    """Divides by a float16 epsilon, which is zero, where its input is constant."""

    def call(self, x):
        spread = ops.var(x, axis=-1, keepdims=True)
        return x / ops.sqrt(spread + ops.cast(1e-8, x.dtype))


def trained(x, y=None, layers=list, loss="mse", callbacks=None, fits=1, **arguments):
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
def test_layer_that_breaks_is_named(mode):
    x = data()
    x[4:8] = 0
    model, run = trained(x, layers=lambda: [Breaks(name="breaks"), keras.layers.Dense(4, name="after")], **MODES[mode])
    assert model.optimizer.snapshot().nonfinite_loss_count == 1
    assert run.last("nonfinite_activation") == "net/breaks"


def test_targets_beyond_float16_are_not_to_blame():
    x = data()
    x[4:8] = 0
    y = np.full((len(x), 1), 1e5)
    assert trained(x, y, layers=lambda: [Breaks(name="breaks")])[1].last("nonfinite_activation") == "net/breaks"


def test_bad_data_are_told_from_a_bad_layer():
    x = data()
    x[5, 2] = np.nan
    assert trained(x)[1].last("nonfinite_activation") == "the batch's x"
    y = np.zeros((16, 1))
    y[3] = np.inf
    assert trained(data(), y)[1].last("nonfinite_activation") == "the batch's y"


def test_loss_function_is_named_where_all_outputs_are_finite():
    def loss(y_true, y_pred):
        return y_pred / ops.zeros_like(y_pred)

    assert trained(data(), loss=loss)[1].last("nonfinite_activation") == "the loss function"


def test_overflow_of_float16_in_the_forward_pass_is_named_by_its_layer():
    x = data()
    x[0] = 60000
    run = trained(x, layers=lambda: [keras.layers.Dense(4, kernel_initializer="ones", name="wide")])[1]
    assert run.last("nonfinite_activation") in ("net/first", "net/wide")


def test_finite_run_names_nothing_and_the_layers_are_as_before():
    model, run = trained(data(), fits=2)
    assert run.rows == []
    assert model.optimizer.snapshot().nonfinite_activation is None
    assert [layer for layer in model.layers if "call" in vars(layer)] == []


def test_what_is_inside_a_loop_is_seen_when_it_leaves_it():
    x = np.ones((8, 3, 4), "float32")
    with kmp.enable():
        model = keras.Sequential([keras.Input((3, 4)), keras.layers.LSTM(2, name="loop"), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        probe = kmp.callbacks.ForwardProbe(every_n_steps=1)
        kernel = model.layers[0].cell.kernel
        kernel.assign(ops.full_like(kernel, np.nan))
        model.fit(x, np.ones((8, 1)), verbose=0, batch_size=4, callbacks=[probe])
    assert probe.run.last("nonfinite_activation").startswith(f"{model.name}/loop")


def test_error_of_a_stuck_run_names_it():
    x = data()
    x[:, 0] = np.inf
    with kmp.enable():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(1, dtype="float32")])
        model.compile("sgd", "mse")
        callbacks = [kmp.callbacks.ForwardProbe(), kmp.callbacks.StuckDetector(patience=3)]
        with pytest.raises(kmp.callbacks.StuckError, match="The first to be inf or nan: the batch's x"):
            model.fit(x, np.zeros((16, 1)), batch_size=4, verbose=0, callbacks=callbacks)


def test_bad_batch_on_the_second_replica_is_found(two_replicas):
    x = data()
    x[6] = np.nan
    with two_replicas.scope(), kmp.enable():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(1, dtype="float32")])
        model.compile("sgd", "mse")
    probe = kmp.callbacks.ForwardProbe(every_n_steps=1)
    model.fit(x, np.zeros((16, 1)), batch_size=8, verbose=0, shuffle=False, callbacks=[probe])
    assert probe.run.last("nonfinite_activation") == "the batch's x"


def test_finished_probe_leaves_no_answer_to_a_later_training():
    x = data()
    x[0] = np.inf
    model, run = trained(x)
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


def test_two_probes_watch_one_model():
    x = data()
    x[0] = np.nan
    probes = [kmp.callbacks.ForwardProbe(every_n_steps=1) for _ in range(2)]
    model, _ = trained(x, callbacks=probes)
    assert [probe.run.last("nonfinite_activation") for probe in probes] == ["the batch's x"] * 2
    assert [layer for layer in model.layers if "call" in vars(layer)] == []


def test_number_in_the_batch_beyond_float16_is_the_batchs_fault():
    x = data()
    x[0, 0] = 1e6
    assert trained(x)[1].last("nonfinite_activation") == "the batch's x"
