"""Replays of models that compute in bfloat16, which needs no loss scale, or in float32."""

import keras
import numpy as np
import pytest
from conftest import sequential
from keras import layers, ops
from passes import passes_of

import kmp
from kmp.callbacks.batch_replayer import CRITERIA
from kmp.replay import StepContext, replay_batch

ROWS = 16


def replayed(policy, layer, x=None, copies=1, **context):
    """Returns the replay of a batch of a model with copies of a layer between two others."""
    with kmp.enable(policy):
        first, head = layers.Dense(4, name="first"), layers.Dense(1, dtype="float32", name="head")
        hidden = [layer() for _ in range(copies)]
        model = sequential(first, *hidden, head, optimizer="adam")
    if x is None:
        x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    passes = passes_of(model, (x, x[:, :1]))
    context = {"loss_scale": 1.0, "initial_scale": 1.0} | context
    return replay_batch(passes, StepContext(1, **context), CRITERIA)[0]


def named(paths):
    return [path.rpartition("/")[2] for path in paths]


def cancelling():
    """Returns a layer that keeps nothing of its inputs in 16 bits."""
    return layers.Lambda(lambda x: (x + 4096.0) - 4096.0, name="cancelling")


def log_of_rest():
    """Returns a layer with the logarithm of a number that is 0 in 16 bits."""
    rest = 1e-6
    return layers.Lambda(
        lambda x: ops.log(1.0 - ops.minimum(ops.sigmoid(x + 20.0), 1.0 - rest)), name="log"
    )


def identity():
    return layers.Lambda(lambda x: x, name="identity")


def test_layer_whose_results_bfloat16_rounds_too_much_is_found():
    replay = replayed("mixed_bfloat16", cancelling)
    assert replay.output_error > 0.5
    assert named(replay.float32_layers) == ["cancelling"]
    (lossy,) = replay.overflow.lossy
    assert (lossy.kind, lossy.dtype) == ("lost_terms", "bfloat16")


def test_layer_that_is_nan_in_bfloat16_is_found_at_the_loss_scale_of_1():
    replay = replayed("mixed_bfloat16", log_of_rest, failed="loss")
    assert (replay.is_finite, replay.is_finite_in_float32) == (False, True)
    assert replay.operations[0].operation == "Log"
    assert named(replay.float32_layers) == ["log"]
    assert (replay.search.loss_scale, replay.search.branch) == (None, [])


# Keras' cast of the constant.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_what_is_about_the_range_of_float16_is_not_said_of_bfloat16():
    def masked():
        return layers.Lambda(lambda x: (x - 1e9) * 1e-12 / (x * 0.0), name="masked")

    x = np.full((ROWS, 4), 1e5, "float32")
    in_float16 = replayed("mixed_float16", masked, x)
    assert in_float16.batch.nonfinite.is_too_large
    replay = replayed("mixed_bfloat16", masked, x)
    assert (replay.batch.nonfinite, replay.gradients.usable_scale) == (None, None)
    assert replay.batch.largest_input == 1e5
    assert replay.overflow.lost_constants == {}
    assert replayed("mixed_float16", identity).gradients.usable_scale
    assert replayed("mixed_bfloat16", identity).gradients.usable_scale is None


def test_pass_in_bfloat16_is_no_trial_for_a_model_in_bfloat16():
    def nan():
        def product(x):
            rest = 1.0 - ops.minimum(ops.sigmoid(x * 0.0 + 20.0), 1.0 - 1e-6)
            return x + 0.0 * ops.log(rest)

        return layers.Lambda(product)

    in_float16, search = (
        replayed(policy, nan, copies=13).search for policy in ("mixed_float16", "mixed_bfloat16")
    )
    assert (in_float16.is_found, in_float16.is_sound_in_bfloat16) == (False, False)
    assert (search.is_found, search.is_sound_in_bfloat16) == (False, None)


def test_nan_in_float32_is_traced_to_its_operation_without_a_comparison_and_a_search():
    def root():
        return layers.Lambda(lambda x: ops.sqrt(x - 100.0), name="root")

    replay = replayed("float32", root, failed="loss")
    assert (replay.is_finite, replay.is_finite_in_float32) == (False, False)
    (first,) = replay.operations
    assert (named([first.layer]), first.operation, first.dtype) == (["root"], "Sqrt", "float32")
    assert (replay.comparison, replay.search, replay.gradients.usable_scale) == (None, None, None)


@pytest.mark.parametrize("failed", ["loss", "gradients"])
def test_batch_that_is_finite_in_float32_is_not_compared_with_itself(failed):
    replay = replayed("float32", identity, failed=failed)
    assert replay.is_finite
    assert (replay.loss, replay.comparison) == (replay.float32_loss, None)


def test_model_with_weights_in_bfloat16_is_compared_with_one_in_float32():
    def stored():
        return layers.Dense(4, dtype=keras.DTypePolicy("bfloat16"), name="stored")

    replay = replayed("mixed_bfloat16", stored)
    assert replay.is_finite
    assert 0 < replay.output_error < 0.05
    assert "stored" in [error.layer.rpartition("/")[2] for error in replay.gradient_errors]


class Counting(keras.layers.Layer):
    """Counts its calls in a state of its compute dtype, and multiplies by a scalar weight."""

    def build(self, shape):
        dtype = self.compute_dtype
        self.gain = self.add_weight(shape=(), initializer="ones", dtype=dtype, name="gain")
        self.count = self.add_weight(
            shape=(), initializer="zeros", dtype=dtype, trainable=False, name="count"
        )

    def call(self, x):
        self.count.assign_add(ops.ones_like(self.count))
        self.add_loss(1e-3 * ops.mean(x))
        return x * self.gain


def test_scalars_in_bfloat16_are_compared():
    # TensorFlow makes no array of them.
    replay = replayed("mixed_bfloat16", lambda: Counting(name="counting"))
    assert replay.is_finite
    assert "counting" in [error.layer.rpartition("/")[2] for error in replay.gradient_errors]
    assert replay.comparison.states == []
