import keras
import numpy as np
import pytest
from conftest import compiled_model, fit, fit_data, small_data, values

import kmp

pytestmark = pytest.mark.usefixtures("enabled")


# The weights are read before and after a call of the train function, however it was compiled.
@pytest.mark.parametrize(("steps_per_execution", "learning_rate"), [(1, 2e-3), (8, 0.5)])
def test_update_of_the_sampled_step_is_measured(steps_per_execution, learning_rate):
    model = compiled_model(
        keras.optimizers.SGD(learning_rate), steps_per_execution=steps_per_execution
    )
    weights = [values(model.weights[:4])]
    recorder = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: weights.append(values(model.weights[:4]))
    )
    histogram = kmp.callbacks.GradientHistogram(every_n_steps=8)
    fit(model, [histogram, recorder], batches=16)
    samples = histogram.run.samples
    before, after = weights[:2]
    for name, old, new in zip(
        [v.path for v in model.trainable_variables], before, after, strict=True
    ):
        index = samples[0].names.index(name)
        np.testing.assert_allclose(samples[0].weight_norm[index], np.linalg.norm(old), rtol=2**-8)
        np.testing.assert_allclose(
            samples[0].update_norm[index], np.linalg.norm(new - old), rtol=2**-8, atol=1e-7
        )
        assert samples[0].updates[index] == np.sum(new != old)
        lost = (new != old) & (np.abs(new - old) < 2.0**-11 * np.abs(old))
        assert samples[0].lost_updates[index] == np.sum(lost)
    assert samples[0].lost_updates.any() or steps_per_execution == 8
    # Only the last sample within an execution of several steps is read.
    assert [sample.step for sample in samples] == (
        [1, 2, 4, 8, 16] if steps_per_execution == 1 else [8, 16]
    )


def measured_steps(samples):
    return [sample.step for sample in samples if np.isfinite(sample.update_norm).all()]


def test_updates_of_an_unbuilt_model_are_measured_twelve_times_then_in_every_tenth_sample():
    model = keras.Sequential([keras.layers.Dense(2), kmp.layers.Softmax()])
    model.compile("sgd", "sparse_categorical_crossentropy")
    histogram = kmp.callbacks.GradientHistogram(every_n_steps=1)
    fit(model, [histogram], batches=24)
    assert measured_steps(histogram.run.samples) == [*range(2, 14), 23]
    assert len(histogram.run.samples) == 24
    assert histogram.run.samples[0].weight_norm.any()


def test_training_with_a_reloaded_optimizer_samples_its_first_step(tmp_path):
    model = compiled_model("adam", run_eagerly=True)
    model.optimizer.build(model.trainable_variables)
    model.save_weights(tmp_path / "start.weights.h5")
    fit(model, [kmp.callbacks.GradientHistogram()], batches=2)
    model.load_weights(tmp_path / "start.weights.h5")
    assert model.optimizer.snapshot().sample is None
    histogram = kmp.callbacks.GradientHistogram()
    fit(model, [histogram], batches=2)
    assert [sample.step for sample in histogram.run.samples] == [1, 2]


@pytest.mark.parametrize(
    ("corrupt", "options", "inner_options", "expected"),
    [
        (2, {"run_eagerly": True}, {"gradient_accumulation_steps": 4}, [6, 10, 14]),
        # The first execution is skipped, and one step of the second.
        (5, {"steps_per_execution": 4}, {}, [8, 12, 16]),
    ],
)
def test_step_that_updates_no_weights_is_not_measured_and_the_next_sample_is(
    corrupt, options, inner_options, expected
):
    model = compiled_model(keras.optimizers.SGD(0.5, **inner_options), **options)
    x, y = small_data(16)
    x[: 8 * corrupt] = np.nan
    histogram = kmp.callbacks.GradientHistogram(every_n_steps=1)
    fit_data(model, (x, y), [histogram])
    samples = histogram.run.samples
    assert measured_steps(samples) == expected
    assert [sample.step for sample in samples if sample.updates.any()] == expected
    measured = [sample.step for sample in samples if np.isfinite(sample.weight_norm).any()]
    assert measured == [sample.step for sample in samples if sample.step < expected[0]] + expected


def test_weights_that_skipped_steps_leave_unchanged_are_measured_once():
    model = compiled_model("sgd")
    x, y = small_data(4)
    x[: 8 * 3] = np.nan
    histogram = kmp.callbacks.GradientHistogram(every_n_steps=1)
    fit_data(model, (x, y), [histogram])
    first, second, third, updated = histogram.run.samples
    assert np.isfinite(first.weight_norm).all()
    assert first.weight_norm is second.weight_norm is third.weight_norm
    np.testing.assert_allclose(updated.weight_norm, first.weight_norm)


def test_counts_are_summed_over_replicas_and_update_norms_are_not(two_replicas):
    with two_replicas.scope():
        model = compiled_model(keras.optimizers.SGD(0.5))
    before = values(model.trainable_variables)
    histogram = kmp.callbacks.GradientHistogram(every_n_steps=1)
    fit(model, [histogram], batches=1)
    after = values(model.trainable_variables)
    sample = histogram.run.samples[0]
    assert sample.histogram.total == 2 * sum(weights.size for weights in before)
    norms = [np.linalg.norm(new - old) for new, old in zip(after, before, strict=True)]
    measured = dict(zip(sample.names, sample.update_norm, strict=True))
    np.testing.assert_allclose(
        [measured[v.path] for v in model.trainable_variables], norms, rtol=2**-8, atol=1e-7
    )
