"""What callbacks record in each policy and mode: the table in docs/guide/callbacks.md."""

import contextlib
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
from conftest import MODES, fit_data, small_data
from keras import layers

import kmp

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16", "float16")
GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "callbacks.md"
HEADING = "| recorded | float32 | mixed_bfloat16 | mixed_float16, float16 |"

NEVER, EVERY_MODE, NOT_ON_REPLICAS = "no", "yes", "yes, not with several replicas"
COLUMNS = ("float32", "mixed_bfloat16", "float16")
EXPECTED = {
    "loss scale": (NEVER, NEVER, EVERY_MODE),
    "skipped steps": (EVERY_MODE,) * 3,
    "histogram, norm and amax of each gradient": (EVERY_MODE,) * 3,
    "size of the weight update": (EVERY_MODE,) * 3,
    "difference from float32, by layer": (NEVER, NOT_ON_REPLICAS, NOT_ON_REPLICAS),
    "the same in the other 16-bit format": (NEVER, NOT_ON_REPLICAS, NOT_ON_REPLICAS),
    "operation and layer where NaN began": (NOT_ON_REPLICAS,) * 3,
}


@keras.saving.register_keras_serializable("tests")
class Logarithm(keras.Layer):
    """Returns the logarithm, which is NaN below zero."""

    def call(self, x):
        return keras.ops.log(x + 100.0)


def recorded_by(policy, mode, strategy):
    """Returns what a training with one bad batch leaves in the records."""
    x, y = small_data(12)
    x[50] = -1000.0
    scope = strategy.scope() if strategy else contextlib.nullcontext()
    with kmp.enable(policy, initial_scale=256.0), scope:
        model = keras.Sequential([keras.Input((4,)), Logarithm(), layers.Dense(2)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(True), **MODES[mode])
    callbacks = kmp.callbacks.defaults(every_n_steps=1, on_nonfinite="ignore")
    with warnings.catch_warnings():
        # That the loss is computed in 16 bits.
        warnings.simplefilter("ignore", UserWarning)
        fit_data(model, (x, y), callbacks)
    run = callbacks[0].run
    replays = [replay for _, replay in run.replays]
    sample = run.samples[0]
    found = {
        "loss scale": run.has_loss_scale,
        "skipped steps": run.last("overflow_count") == 1,
        "histogram, norm and amax of each gradient": sample.histogram.total > 0
        and np.isfinite([*sample.norm, *sample.amax]).all(),
        "size of the weight update": np.isfinite(sample.update_norm).all(),
        "difference from float32, by layer": any(each.layer_errors for each in replays),
        "the same in the other 16-bit format": any(each.other_format for each in replays),
        "operation and layer where NaN began": any(
            operation.operation == "Log" and "logarithm" in operation.layer
            for replay in replays
            for operation in replay.operations
        ),
    }
    return {name for name, is_recorded in found.items() if is_recorded}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "graph", "xla", "replicas"])
@pytest.mark.parametrize("policy", POLICIES)
def test_records_are_those_of_the_table(policy, mode, two_replicas):
    is_replicated = mode == "replicas"
    strategy = two_replicas if is_replicated else None
    recorded = recorded_by(policy, "graph" if is_replicated else mode, strategy)
    column = COLUMNS.index("float16" if policy == "mixed_float16" else policy)
    in_mode = (EVERY_MODE,) if is_replicated else (EVERY_MODE, NOT_ON_REPLICAS)
    assert recorded == {name for name, cells in EXPECTED.items() if cells[column] in in_mode}


def test_guide_has_the_table():
    lines = [HEADING, "| --- | --- | --- | --- |"]
    for name, cells in EXPECTED.items():
        lines.append(f"| {' | '.join([name, *cells])} |")
    assert "\n".join(lines) in GUIDE.read_text(encoding="utf-8")
