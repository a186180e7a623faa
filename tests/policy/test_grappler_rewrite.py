import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import casts_of_optimized

import kmp
from kmp.policy.grappler_rewrite import PASSES


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    """As on a machine that has none, also where there is one; what one does is in test_gpu.py."""
    found = tf.config.list_physical_devices
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: [] if kind == "GPU" else found(kind))
    with tf.device("CPU:0"):
        yield
    kmp.graph_rewrite(False)


def model():
    return keras.Sequential([keras.Input((16,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(4)])


def options():
    return tf.config.optimizer.get_experimental_options()


def casts(function, *arguments):
    return casts_of_optimized(function, arguments, tf.bfloat16)


def test_optimized_graph_has_casts_and_only_while_it_is_on():
    x, made = tf.random.normal((64, 16)), model()

    def fresh():
        return tf.function(made.call)

    assert casts(fresh(), x) == []
    kmp.graph_rewrite(True, dtype="bfloat16")
    assert casts(fresh(), x) != []
    kmp.graph_rewrite(False)
    assert casts(fresh(), x) == []


def test_machine_without_a_gpu_gets_bfloat16_and_is_told():
    with pytest.warns(UserWarning, match="no GPU.*rewritten to bfloat16"):
        kmp.graph_rewrite(True)
    assert options()[PASSES["bfloat16"]]


def test_float16_without_a_gpu_is_told_to_do_nothing():
    with pytest.warns(UserWarning, match="does nothing here"):
        kmp.graph_rewrite(True, dtype="float16")
    assert options()[PASSES["float16"]]


@pytest.mark.filterwarnings("ignore:TensorFlow's pass for float16 does nothing")
def test_float32_model_gets_a_loss_scale_for_float16_and_no_xla():
    kmp.graph_rewrite(True, dtype="float16")
    made = model()
    made.compile("adam", "mse")
    assert isinstance(made.optimizer, kmp.LossScaleOptimizer)
    assert made.jit_compile is False
    assert np.isfinite(made.fit(np.ones((8, 16)), np.ones((8, 4)), verbose=0).history["loss"]).all()
    made.compile("adam", "mse", auto_scale_loss=False)
    assert type(made.optimizer) is keras.optimizers.Adam


def test_bfloat16_needs_no_loss_scale():
    kmp.graph_rewrite(True, dtype="bfloat16")
    made = model()
    made.compile("adam", "mse")
    assert type(made.optimizer) is keras.optimizers.Adam


def test_xla_asked_for_is_an_error():
    kmp.graph_rewrite(True, dtype="bfloat16")
    with pytest.raises(ValueError, match="cannot work under XLA"):
        model().compile("adam", "mse", jit_compile=True)


def test_eager_model_is_told():
    kmp.graph_rewrite(True, dtype="bfloat16")
    with pytest.warns(UserWarning, match="no graph to rewrite"):
        model().compile("adam", "mse", run_eagerly=True)


def test_switched_off_leaves_keras_and_tensorflow_as_they_were():
    compile_before, before = keras.Model.compile, {key: options().get(key, False) for key in PASSES.values()}
    kmp.graph_rewrite(True, dtype="bfloat16")
    assert keras.Model.compile is not compile_before
    kmp.graph_rewrite(False)
    assert keras.Model.compile is compile_before
    assert {key: options().get(key, False) for key in PASSES.values()} == before


def test_it_goes_with_enable_and_each_goes_off_by_itself():
    compile_before = keras.Model.compile
    kmp.graph_rewrite(True, dtype="bfloat16")
    with kmp.enable("float32"):
        pass
    assert keras.Model.compile is not compile_before
    made = model()
    made.compile("adam", "mse")
    assert made.jit_compile is False
    with kmp.enable():
        kmp.graph_rewrite(False)
        assert keras.Model.compile is not compile_before
    assert keras.Model.compile is compile_before


@pytest.mark.parametrize(
    ("arguments", "kind", "match"),
    [(("yes",), TypeError, "`enabled` must be"), ((True, "float8"), ValueError, "`dtype` must be one of")],
)
def test_bad_argument_is_an_error(arguments, kind, match):
    with pytest.raises(kind, match=match):
        kmp.graph_rewrite(*arguments)
    assert not any(options().get(option) for option in PASSES.values())
