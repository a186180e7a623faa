import keras
import pytest
import tensorflow as tf
from conftest import values

from kmp.bench import measurement, models, precision
from kmp.bench.models import BARE
from kmp.policy import Gpu, Hardware

T4, A100 = Hardware((Gpu("T4", (7, 5)),)), Hardware((Gpu("A100", (8, 0)),))


def measured(float16, bfloat16, xla):
    """Returns results as `measure_machine` yields them, with these ratios to float32."""
    rates = {"float32": [100.0], "float16": [100.0 * float16], "bfloat16": [100.0 * bfloat16]}
    compiled = {name: [xla * rate for rate in turns] for name, turns in rates.items()}
    return [
        *measurement.comparison("operations", "matrix product", "graph", rates, "GFLOP/s"),
        *measurement.comparison(precision.TRAINING, "block", "graph", rates, "tokens/s"),
        *measurement.comparison(precision.TRAINING, "block", "XLA", compiled, "tokens/s"),
    ]


@pytest.mark.parametrize(
    ("float16", "bfloat16", "xla", "expected"),
    [
        (0.5, 0.9, 1.0, ("float32", False, 1.0)),
        (0.5, 0.9, 2.0, ("float32", True, 1.0)),
        (2.0, 1.95, 1.0, ("mixed_bfloat16", False, 1.95)),
        (2.0, 1.0, 1.5, ("mixed_float16", True, 2.0)),
        (1.05, 1.05, 1.0, ("float32", False, 1.0)),
        (1.3, 1.3, 1.09, ("mixed_bfloat16", False, 1.3 / 1.09)),
        (1.12, 1.02, 1.0, ("mixed_float16", False, 1.12)),
    ],
)
def test_recommended_is_the_fastest_policy_if_it_is_clearly_faster(float16, bfloat16, xla, expected):
    best = precision.recommend(measured(float16, bfloat16, xla))
    assert (best.policy, best.jit_compile, pytest.approx(best.speedup)) == expected


def test_nothing_is_recommended_without_a_training():
    assert precision.recommend(measured(2.0, 1.0, 1.0)[:3]) is None


def test_formats_are_those_that_the_gpu_computes_in():
    assert precision.formats_on(T4) == ["float32", "float16"]
    assert precision.formats_on(A100) == ["float32", "float32 without TF32", "float16", "bfloat16"]
    assert precision.formats_on(Hardware(())) == ["float32", "float16", "bfloat16"]


def test_training_on_a_gpu_is_smaller_if_the_memory_is_not_enough(monkeypatch):
    def train(case, make_task, batch, mode, steps, rounds):
        if batch > 32:
            raise tf.errors.ResourceExhaustedError(None, None, "out of memory")
        return case, mode

    monkeypatch.setattr(precision, "hardware", lambda: A100)
    monkeypatch.setattr(precision, "measure_operations", lambda: [])
    monkeypatch.setattr(precision, "measure_training", train)
    case = "transformer block, 32 x 64 x 512"
    assert list(precision.measure_machine()) == [(case, "graph"), (case, "XLA")]


@pytest.mark.slow
def test_each_precision_is_measured_on_this_machine():
    is_tf32_allowed = tf.config.experimental.tensor_float_32_execution_enabled()
    results = [result for compared in precision.measure_machine() for result in compared]
    assert {result.variant for result in results} == set(precision.formats_on(precision.hardware()))
    assert {(result.section, result.mode) for result in results} == {
        *(("operations", "graph"), (precision.TRAINING, "graph"), (precision.TRAINING, "XLA"))
    }
    assert all(result.value > 0 for result in results)
    assert tf.config.experimental.tensor_float_32_execution_enabled() == is_tf32_allowed


@pytest.mark.slow
@pytest.mark.parametrize("make_task", [models.mlp, models.convolutional, models.transformer])
def test_models_train_and_the_global_policy_is_unchanged(make_task):
    task = make_task(16)
    model = task.build()
    model.compile("sgd", "sparse_categorical_crossentropy")
    before = values(model.trainable_variables)
    model.train_on_batch(task.x, task.y)
    assert any((old != new).any() for old, new in zip(before, values(model.trainable_variables), strict=True))
    assert task.units in (task.y.size, len(task.x))
    model = models.compiled_model(task, "mixed_bfloat16", BARE, "graph")
    assert model.layers[-2].compute_dtype == "bfloat16"
    assert models.timed_training(model, task, 2)() > 0
    assert keras.config.dtype_policy().name == "float32"
