import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest
import tensorflow as tf
from conftest import small_model

import kmp

TESTS = Path(__file__).parent.parent
WITHOUT_ONEDNN = (  # which the tests turn off
    "TensorFlow's bfloat16 pass does nothing without oneDNN"
)
pytestmark = pytest.mark.filterwarnings(f"ignore:{WITHOUT_ONEDNN}")


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    """Hides the GPUs of the machine; test_gpu.py tests the rewrite on a GPU."""
    list_devices = tf.config.list_physical_devices
    monkeypatch.setattr(
        tf.config,
        "list_physical_devices",
        lambda device_type=None: [] if device_type == "GPU" else list_devices(device_type),
    )
    with tf.device("CPU:0"):
        yield
    kmp.graph_rewrite(False)


PASSES = {"float16": "auto_mixed_precision", "bfloat16": "auto_mixed_precision_onednn_bfloat16"}


def options():
    return tf.config.optimizer.get_experimental_options()


def test_pass_and_patches_are_on_only_while_the_rewrite_is():
    tf.config.optimizer.set_experimental_options({"remapping": True})
    before, original_build = options(), keras.Model._maybe_symbolic_build
    kmp.graph_rewrite(True, dtype="bfloat16")
    assert options()[PASSES["bfloat16"]]
    assert keras.Model._maybe_symbolic_build is not original_build
    kmp.graph_rewrite(False)
    assert not any(options().get(option) for option in PASSES.values())
    assert options().items() >= before.items() > {}.items()
    assert keras.Model._maybe_symbolic_build is original_build


@pytest.mark.slow
def test_optimized_graph_has_casts_only_while_the_rewrite_is_on():
    """In a process of its own: TensorFlow's pass for CPUs needs oneDNN, which tests turn off."""
    code = """if True:
        import sys, warnings
        warnings.simplefilter("error", UserWarning)
        sys.path[:0] = sys.argv[1:]
        import keras, tensorflow as tf
        from conftest import casts_of_optimized
        import kmp
        x, dense = tf.ones((64, 16)), keras.layers.Dense(32, activation="relu")
        model = keras.Sequential([keras.Input((16,)), dense])
        for rewrite in (None, True, False):
            if rewrite is not None:
                kmp.graph_rewrite(rewrite, dtype="bfloat16")
            print(len(casts_of_optimized(tf.function(model.call), [x], tf.bfloat16)))
    """
    environment = os.environ | {"TF_ENABLE_ONEDNN_OPTS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code, TESTS, TESTS.parent / "benchmarks"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    before, during, after = map(int, done.stdout.split())
    assert (before, during > 0, after) == (0, True, 0)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({}, "float16 pass does nothing without a GPU"),
        ({"dtype": "bfloat16"}, f"{WITHOUT_ONEDNN}.*TF_ENABLE_ONEDNN_OPTS=1"),
    ],
)
def test_pass_that_does_nothing_here_warns(arguments, match):
    with pytest.warns(UserWarning, match=match):
        kmp.graph_rewrite(**arguments)
    assert options()[PASSES[arguments.get("dtype", "float16")]]


@pytest.mark.filterwarnings("ignore:TensorFlow's float16 pass does nothing")
def test_float16_rewrite_wraps_the_optimizer_of_a_float32_model_and_turns_off_xla():
    kmp.graph_rewrite(True, dtype=keras.DTypePolicy("float16"))
    model = small_model()
    model.compile("adam", "mse")
    assert (type(model.optimizer), model.jit_compile) == (kmp.LossScaleOptimizer, False)
    model.compile("adam", "mse", auto_scale_loss=False)
    assert type(model.optimizer) is keras.optimizers.Adam


def test_bfloat16_rewrite_needs_a_graph_that_xla_does_not_compile_and_no_loss_scale():
    kmp.graph_rewrite(True, dtype="bfloat16")
    model = small_model()
    model.compile("adam", "mse")
    assert (type(model.optimizer), model.jit_compile) == (keras.optimizers.Adam, False)
    with pytest.raises(ValueError, match="cannot work under XLA"):
        model.compile("adam", "mse", jit_compile=True)
    with pytest.warns(UserWarning, match="no graph to rewrite"):
        model.compile("adam", "mse", run_eagerly=True)


def test_rewrite_and_enable_are_turned_off_independently():
    original_build = keras.Model._maybe_symbolic_build
    kmp.graph_rewrite(True, dtype="bfloat16")
    with kmp.enable("float32"):
        pass
    model = small_model()
    model.compile("adam", "mse")
    assert model.jit_compile is False  # the rewrite is on
    with kmp.enable():
        kmp.graph_rewrite(False)
        assert keras.Model._maybe_symbolic_build is not original_build
    assert keras.Model._maybe_symbolic_build is original_build


def test_invalid_argument_raises():
    with pytest.raises(TypeError, match="`enabled` must be"):
        kmp.graph_rewrite("yes")
    with pytest.raises(ValueError, match="`dtype` must be one of"):
        kmp.graph_rewrite(True, "float8")
    assert not any(options().get(option) for option in PASSES.values())
