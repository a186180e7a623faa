"""Trains models that each have one defect and diagnoses them; diagnoses hand-written records."""

import copy
import pickle
from dataclasses import replace

import keras
import numpy as np
import pytest
from conftest import sample_from
from keras import ops

import kmp
from kmp.advice import RunMetrics
from kmp.advice.finding import ERROR, INFO, WARNING, ComputeInFloat32, SetArguments
from kmp.records import InvalidTargets, NonfiniteOperation, Replay, Run


class Normalize(keras.layers.Layer):
    """Normalizes each row, with an epsilon that float16 rounds to zero."""

    def call(self, x):
        spread = ops.var(x, axis=-1, keepdims=True)
        return (x - ops.mean(x, axis=-1, keepdims=True)) / ops.sqrt(spread + ops.cast(1e-8, x.dtype))


def data(rows=640):
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 16)).astype("float32")
    return x, (x[:, :4].sum(1) > 0).astype("int32")


def trained(optimizer=None, x=None, layers=list, every_n_steps=100, **scale):
    """Trains a small classifier for 60 steps and returns the run."""
    inputs, labels = data()
    with kmp.enable(**scale):
        dense = keras.layers.Dense
        model = keras.Sequential(
            [keras.Input((16,)), *layers(), dense(64, "relu"), dense(64, "relu"), dense(2), kmp.layers.Softmax()]
        )
        model.compile(optimizer or keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy")
        options = {"on_stuck": "ignore", "float32_fallback": False}
        recorders = kmp.callbacks.defaults(every_n_steps=every_n_steps, **options)
        model.fit(inputs if x is None else x, labels, batch_size=32, epochs=3, verbose=0, callbacks=recorders)
    return recorders[0].run


def x_with_nan():
    x = data()[0]
    x[[70, 400]] = np.nan
    return x


def x_with_constant_rows():
    x = data()[0]
    x[::30] = 0.0
    return x


DEFECTS = {
    "too large a fixed scale": ({"loss_scale": 2.0**24}, "scale_too_large", "loss_scale="),
    "too small a fixed scale": ({"loss_scale": 2.0**-10}, "scale_too_small", "loss_scale='dynamic'"),
    "too small an initial scale": ({"initial_scale": 2.0**-10}, "scale_too_small", "initial_scale=2.0**"),
    "a corrupt batch": ({"x": x_with_nan()}, "data", "np.abs(x) <= 65504"),
    "an epsilon that rounds to zero": (
        {"x": x_with_constant_rows(), "layers": lambda: [Normalize(name="normalize")]},
        "constant",
        "kmp.layers.Float32(Normalize(..., name='normalize'))",
    ),
    "an exploding learning rate": ({"optimizer": keras.optimizers.SGD(1e4)}, "exploding", "learning_rate="),
    "an exploding learning rate of Adam": ({"optimizer": keras.optimizers.Adam(30.0)}, "exploding", "learning_rate="),
    "a divergence that ends at chance level": (
        {"optimizer": keras.optimizers.SGD(30.0)},
        "exploding",
        "SGD(learning_rate=",
    ),
    "too small a maximum scale": (
        {"initial_scale": 2.0**-10, "max_scale": 2.0**-9},
        "scale_too_small",
        "max_scale=2.0**127",
    ),
    "too small a growth interval": (
        {"growth_interval": 3, "initial_scale": 2.0**20},
        "growth_interval_too_small",
        "growth_interval=2000",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFECTS)
def test_cause_of_a_defect_is_ranked_first(name):
    arguments, cause, change = DEFECTS[name]
    advice = kmp.advise(trained(**arguments))
    assert advice[0].cause == cause, str(advice)
    assert change in advice[0].change
    assert any(character.isdigit() for character in advice[0].evidence)
    assert advice.verdict == advice[0].title


@pytest.mark.slow
@pytest.mark.parametrize("every_n_steps", [5, 100])
@pytest.mark.parametrize("optimizer", [{"class_name": "Adam", "config": {}}, {"class_name": "SGD", "config": {}}])
def test_healthy_model_has_no_finding(every_n_steps, optimizer):
    run = trained(keras.optimizers.get(optimizer), every_n_steps=every_n_steps)
    advice = kmp.advise(run)
    assert list(advice) == []
    assert advice.verdict.startswith("float16 does not hurt this run: in ")
    assert "0 of 60 steps were skipped" in advice.verdict


def run_of(*rows, **settings):
    return Run([{"step": 1, "overflow_count": 0, "last_loss": 1.0, "highest_loss": 1.0}, *rows], {"settings": settings})


DYNAMIC = {"rule": "DynamicScale", "initial_scale": 2.0**15, "growth_interval": 2000, "compute_dtypes": ["float16"]}


def test_overflows_at_every_loss_scale_are_reported_with_their_origin():
    row = {
        "step": 40,
        "overflow_count": 39,
        "overflows_in_a_row": 39,
        "nonfinite_loss_count": 0,
        "loss_scale": 2.0**-14,
        "overflow_origins_by_variable": {"net/a/kernel": 38, "net/b/kernel": 1},
    }
    finding = kmp.advise(run_of(row, **DYNAMIC))[0]
    assert finding.cause == "backward_overflow"
    assert finding.title == "Gradients near net/a/kernel overflow at every loss scale."
    assert "net/a/kernel was the overflow origin in 97%" in finding.evidence
    assert "down to a loss scale of 2^-14" in finding.evidence


def test_tiny_gradients_of_a_float32_layer_are_not_reported():
    def run_and_causes(make_head):
        with kmp.enable(loss_scale=1.0):
            inputs = keras.Input((4,))
            hidden = keras.layers.Dense(4)(inputs)
            model = keras.Model(inputs, [keras.layers.Dense(1, dtype="float32")(hidden), make_head()(inputs)])
            model.compile("sgd", ["mse", "mse"], loss_weights=[1.0, 1e-5])
            callbacks = kmp.callbacks.defaults(every_n_steps=1)
            model.fit(np.ones((64, 4)), [np.ones((64, 1)), np.ones((64, 8))], callbacks=callbacks, verbose=0)
        return callbacks[0].run, [finding.cause for finding in kmp.advise(callbacks[0].run)]

    run, causes = run_and_causes(lambda: keras.layers.Dense(8))
    assert "scale_too_small" in causes
    assert len(run.settings["float32_variables"]) == 2
    run, causes = run_and_causes(lambda: kmp.layers.Float32(keras.layers.Dense(8)))
    assert causes == []


def test_layer_that_keeps_the_scale_too_low_for_the_others_is_reported():
    with kmp.enable(initial_scale=16.0, growth_interval=1000):
        inputs = keras.Input((4,))
        outputs = [keras.layers.Dense(1, name="large")(inputs), keras.layers.Dense(32, name="small")(inputs)]
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.0), ["mse", "mse"], loss_weights=[1e3, 1e-6])
        callbacks = kmp.callbacks.defaults(every_n_steps=1)
        model.fit(np.ones((64, 4)), [np.ones((64, 1)), np.ones((64, 32))], callbacks=callbacks, verbose=0)
    finding = kmp.advise(callbacks[0].run)[0]
    assert (finding.cause, finding.edits) == ("range", (ComputeInFloat32("large", "Dense"),))


def test_initial_scale_that_skipped_many_steps_is_reported():
    record = {"overflow_count": 12, "overflows_in_a_row": 0, "loss_scale": 8.0, "nonfinite_loss_count": 0}
    rows = [{"step": 100} | record, {"step": 1000} | record]
    advice = kmp.advise(run_of(*rows, **DYNAMIC))
    assert [finding.cause for finding in advice] == ["initial_scale"]
    assert advice[0].change == "kmp.enable(initial_scale=2.0**3)"
    assert advice[0].evidence.startswith("12 of the first 100 steps were skipped")


def test_loss_that_rose_a_hundredfold_is_an_explosion_without_samples():
    advice = kmp.advise(run_of({"step": 50, "last_loss": 3e4, "highest_loss": 7e4, "overflow_count": 0}, **DYNAMIC))
    assert advice[0].cause == "exploding"
    assert "from 1 to 7e+04" in advice[0].evidence


ALL_LOSSES_NONFINITE = {
    **{"step": 60, "overflow_count": 59, "overflows_in_a_row": 59},
    **{"nonfinite_loss_count": 59, "nonfinite_losses_in_a_row": 59},
}


def test_nonfinite_losses_without_a_rise_are_not_an_explosion():
    advice = kmp.advise(run_of(ALL_LOSSES_NONFINITE, **DYNAMIC))
    assert [finding.cause for finding in advice] == ["loss"]


def test_nonfinite_losses_after_a_rise_are_an_explosion():
    advice = kmp.advise(run_of(ALL_LOSSES_NONFINITE | {"highest_loss": 9e4}, **DYNAMIC))
    assert [finding.cause for finding in advice] == ["exploding"]


def test_gradient_overflows_after_scattered_nonfinite_losses_are_not_counted_as_nonfinite_losses():
    record = {
        "overflow_count": 30,
        "overflows_in_a_row": 15,
        "nonfinite_loss_count": 15,
        "nonfinite_losses_in_a_row": 0,
    }
    advice = kmp.advise(run_of({"step": 60, "highest_loss": 9e4} | record, **DYNAMIC))
    assert "the last 15" not in str(advice)
    assert "exploding" not in [finding.cause for finding in advice]


def row_of(step, scale, exponent, zeros=0, **others):
    variables = {"net/kernel": gradient(exponent) | {"zero": zeros}} | others
    return {"step": step, "loss_scale": scale, "sample": sample_from(step, scale, variables)}


def gradient(exponent):
    return {"first": exponent, "counts": [100], "amax": 2.0**exponent, "norm": 1.0}


ALL_ZERO = {"zero": 100, "amax": 0.0, "norm": 0.0}


def test_underflow_at_a_lower_scale_is_not_attributed_to_the_scale_in_use():
    rows = [row_of(2, 2.0**-2, -20, zeros=300), row_of(3, 2.0**-2, -20, zeros=300), row_of(50, 2.0**12, -6)]
    advice = kmp.advise(run_of(*rows, **DYNAMIC))
    assert list(advice) == []
    assert "at the loss scale in use, 2^12, 0.0% of the nonzero gradient elements" in advice.verdict
    finding = kmp.advise(run_of(*rows[:2], **DYNAMIC))[0]
    assert finding.cause == "scale_too_small"
    assert finding.evidence.startswith("100.0% of the nonzero sampled gradient elements")


def test_log_with_an_unknown_last_scale_is_diagnosed():
    verdict = kmp.advise(run_of(row_of(50, 2.0**12, -6), {"step": 60, "loss_scale": None}, **DYNAMIC)).verdict
    assert "at the loss scale in use, 2^12" in verdict


def test_all_zero_gradient_makes_the_verdict_ambiguous():
    verdict = kmp.advise(run_of(row_of(50, 2.0**12, -6, **{"net/bias": ALL_ZERO}), **DYNAMIC)).verdict
    assert verdict.startswith("It is not known whether float16 hurts this run.")
    assert "50.0% are exactly zero, including all of net/bias" in verdict


def test_nonfinite_reference_is_ignored():
    nonfinite = {"net/kernel": ALL_ZERO | {"zero": 0, "nan": 100}}
    reference = {"step": 50, "reference": sample_from(50, 1.0, nonfinite)}
    assert list(kmp.advise(run_of(row_of(50, 2.0**12, -6, zeros=150), reference, **DYNAMIC))) == []


def test_reference_is_not_used_as_a_sample_at_the_scale_in_use():
    overflowed = row_of(50, 2.0**12, -6, **{"net/kernel": ALL_ZERO | {"inf": 100}})
    reference = {"step": 50, "reference": sample_from(50, 1.0, {"net/kernel": gradient(-6)})}
    assert "no sampled step was finite" in kmp.advise(run_of(overflowed, reference, **DYNAMIC)).verdict


def sample_with_update(update_norm, step=50, **values):
    entry = {"first": -3, "counts": [4], "amax": 0.2, "norm": 0.4, "weight_norm": 1.0, "updates": 4}
    variables = {"net/kernel": entry | {"update_norm": update_norm} | values}
    return {"step": step, "sample": sample_from(step, 1.0, variables)}


@pytest.mark.parametrize(("norm", "causes"), [(1e-5, []), (0.2, ["exploding"])])
def test_high_loss_with_small_updates_is_not_an_explosion(norm, causes):
    row = {"step": 60, "last_loss": 3e4, "highest_loss": 7e4, "overflow_count": 0}
    advice = kmp.advise(run_of(sample_with_update(norm), row, **DYNAMIC))
    assert [finding.cause for finding in advice] == causes


@pytest.mark.parametrize(
    ("part", "cause", "keep"),
    [
        ("x", "data", "np.abs(x) <= 65504"),
        ("y", "targets", "np.isfinite(y)"),
        ("sample_weight", "data", "np.isfinite(sample_weight)"),
    ],
)
def test_nonfinite_data_are_reported_with_the_part_to_correct(part, cause, keep):
    replay = replay_of(is_finite_in_float32=False, nonfinite_part=f"the batch's {part}")
    record = {"step": 40, "overflow_count": 2, "nonfinite_loss_count": 2, "replay": replay}
    (finding,) = kmp.advise(run_of(record, **DYNAMIC))
    assert (finding.cause, keep in finding.change) == (cause, True)


def test_a_few_skipped_steps_of_a_long_run_are_not_reported():
    row = {"step": 20_000, "overflow_count": 9, "overflows_in_a_row": 0, "loss_scale": 2.0**18}
    assert list(kmp.advise(run_of(row, **DYNAMIC))) == []


def test_overflowed_samples_are_distinguished_from_no_samples():
    overflowed = sample_with_update(0.0, nan=1)
    run = run_of(overflowed, {"step": 60, "overflow_count": 1, "loss_scale": 2.0**15}, **DYNAMIC)
    assert "no sampled step was finite" in kmp.advise(run).verdict
    assert "because none were sampled" in kmp.advise(run_of({"step": 60, "overflow_count": 1}, **DYNAMIC)).verdict


def test_scale_of_one_is_not_written_as_a_power():
    run = trained(loss_scale=1.0, x=1e-4 * data()[0])
    texts = " ".join([kmp.advise(run).verdict, *(finding.title for finding in kmp.advise(run))])
    assert "2^0" not in texts


@pytest.mark.parametrize("function", [kmp.advise, kmp.what_if])
def test_path_of_a_run_is_an_error(function):
    with pytest.raises(TypeError, match=r"`run` must be a kmp.records.Run, such as kmp.load_run.*'runs/first'"):
        function("runs/first")


def test_empty_run_has_a_verdict_and_no_finding():
    assert list(kmp.advise(Run())) == []
    assert kmp.advise(Run()).verdict == "The run is empty: nothing was recorded."


def test_advice_is_printed_with_evidence_and_the_line_to_change():
    text = str(kmp.advise(run_of({"step": 50, "last_loss": 7e4, "highest_loss": 7e4}, **DYNAMIC)))
    assert text.splitlines() == [
        "Training diverges: the updates are too large in any number format.",
        "1. Training diverges: the updates are too large in any number format.",
        "  Evidence: the loss rose from 1 to 7e+04",
        "  Change: keras.optimizers.Adam(learning_rate=0.1 * learning_rate)",
    ]


def test_optimizer_that_is_no_name_is_not_part_of_the_change():
    rows = {"step": 50, "overflow_count": 40, "highest_loss": 1e9, "last_loss": 1e9}
    changes = [
        next(
            finding.change for finding in kmp.advise(run_of(rows, optimizer=optimizer)) if finding.cause == "exploding"
        )
        for optimizer in ("Lion", "exec('x') or Adam")
    ]
    assert [change.partition("(")[0] for change in changes] == ["keras.optimizers.Lion", "keras.optimizers.Adam"]


def test_overflow_origins_that_are_zero_are_ignored():
    row = {"step": 50, "overflow_count": 40, "overflows_in_a_row": 20, "overflow_origins_by_variable": {"a/kernel": 0}}
    assert [finding.cause for finding in kmp.advise(run_of(row, **DYNAMIC))] == []


def test_first_applied_step_without_an_overflow_count_is_skipped():
    rows = [{"step": 1, "overflows_in_a_row": 0, "loss_scale": 8.0}, {"step": 30, **dict.fromkeys(FIELDS, 0)}]
    rows[1] |= {"overflow_count": 20, "nonfinite_loss_count": 4, "loss_scale": 2.0}
    assert RunMetrics(Run(rows)).startup_overflows == (16, 30, 2.0)


FIELDS = ("overflows_in_a_row", "overflow_count", "nonfinite_loss_count")


def test_variable_is_all_zero_if_it_is_in_every_usable_sample():
    zero, nonzero, none = {"zero": 4}, {"zero": 3, "counts": [1]}, {}
    samples = [
        {"a": zero, "b": none, "c": zero, "d": nonzero, "e": zero},
        {"a": zero, "c": zero, "d": nonzero, "e": nonzero},
    ]
    rows = [{"step": step, "sample": sample_from(step, 8.0, data)} for step, data in enumerate(samples, 1)]
    assert RunMetrics(Run(rows)).gradients.all_zero_variables == ["a", "c"]


def test_printed_findings_are_printable():
    edit = SetArguments("e\x1b", {"f": "1"})
    advice = kmp.advice.Advice(
        [kmp.advice.Finding("range", ERROR, "a\x1bb", "c\u202ed", [edit], "h\u2028i")], "g\u200bh"
    )
    lines = ["g\\u200bh", "1. a\\x1bb", "  Evidence: c\\u202ed", "  Change: e\\x1b(f=1)", "  Note: h\\u2028i"]
    assert str(advice).splitlines() == lines
    assert (advice[0].title, advice.verdict) == ("a\x1bb", "g\u200bh")  # escaped where it is printed


def overflow_row(**values):
    return {"step": 100, "overflow_count": 50, "nonfinite_loss_count": 50, "loss_scale": 1.0, **values}


def replay_of(**values):
    return Replay(**{"examples": 8, "loss_scale": 1.0, "loss": None, "float32_loss": None, "is_finite": False} | values)


def test_rare_corrupt_batch_is_a_warning():
    replay = replay_of(is_finite_in_float32=False, nonfinite_part="the batch's x")
    rare = {"step": 1000, "overflow_count": 2, "nonfinite_loss_count": 2, "replay": replay}
    advice = kmp.advise(run_of(rare, **DYNAMIC))
    assert [(finding.cause, finding.severity) for finding in advice] == [("data", WARNING)]
    assert advice[0].location == "the batch's x"


@pytest.mark.parametrize(
    ("targets", "change", "note"),
    [
        (InvalidTargets(-1, 2, 3, only_invalid=-1), "keep = (y >= 0).reshape", "ignore_class=-1"),
        (
            InvalidTargets(0, 255, 3, only_invalid=255, per_example=64, from_logits=True),
            "model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=255))",
            "if 255 means that a target is missing",
        ),
        (InvalidTargets(1, 3, 3, only_invalid=3), "keras.layers.Conv2D(filters=4, name='head')", "y = y - 1"),
    ],
)
def test_change_of_targets_depends_on_what_is_invalid(targets, change, note):
    row = overflow_row(replay=replay_of(is_finite_in_float32=False, invalid_targets=targets))
    settings = {"output_layers": ["net/head"], "layers": {"net/head": "Conv2D"}}
    finding = kmp.advise(run_of(row, **DYNAMIC, **settings))[0]
    assert finding.cause == "targets"
    assert change in finding.change
    assert note in finding.note


def test_large_inputs_are_not_blamed_if_weights_are_nan():
    replay = replay_of(
        is_finite_in_float32=False,
        nonfinite_part="the batch's x",
        is_part_finite=True,
        nonfinite_variables=["net/kernel"],
    )
    assert kmp.advise(run_of(overflow_row(replay=replay), **DYNAMIC))[0].cause == "loss"


def operation(name, value="nan", layer="net/a", **values):
    return NonfiniteOperation(layer, name, "float16", value, 1.0, 0.5, None, False, **values)


@pytest.mark.parametrize(
    ("found", "cause", "title"),
    [
        (operation("Sqrt", has_negative_input=True), "rounding", "Layer 'a' takes the root of a number"),
        (operation("Log", has_negative_input=True), "rounding", "Layer 'a' takes the logarithm of a number"),
        (operation("Log", "inf"), "forward_underflow", "Layer 'a' takes the logarithm of a number that is 0"),
        (operation("Pow", "inf"), "forward_overflow", "The output of layer 'a' overflows"),
        (operation("Pow", "inf", "twins/b"), "loss_overflow", "The loss that layer 'twins/b' adds overflows"),
        (operation("Mul", "inf", "net"), "forward_overflow", "The output of model 'net' outside its layers overflows"),
    ],
)
def test_operation_tells_the_cause(found, cause, title):
    layers = {"net/a": "Dense", "net/b": "Dense", "twins/b": "Dense"}
    replay = replay_of(
        float32_loss=1.0,
        is_finite_in_float32=True,
        nonfinite=[found],
        nonfinite_outputs=["net/a", "net"],
        float32_layers=["net/a"],
    )
    finding = kmp.advise(run_of(overflow_row(replay=replay), **DYNAMIC, model="net", layers=layers))[0]
    assert (finding.cause, finding.location) == (cause, found.layer)
    assert finding.title.startswith(title)


def test_scale_that_still_falls_is_too_large_at_the_start():
    replay = replay_of(loss=1.0, float32_loss=1.0, is_finite_in_float32=True, float32_layers=[], usable_scale=2.0**10)
    row = {"step": 30, "overflow_count": 30, "overflows_in_a_row": 30, "loss_scale": 2.0**60, "replay": replay}
    row["overflow_origins_by_variable"] = {"net/kernel": 30}
    settings = DYNAMIC | {"initial_scale": 2.0**90}
    (finding,) = kmp.advise(Run([row], {"settings": settings}))
    assert (finding.cause, finding.severity) == ("initial_scale", ERROR)
    assert finding.change == "kmp.enable(initial_scale=2.0**10)"


def branch_run(largest, **first):
    """Returns a run in which the gradients of a head are flushed, and the other's have this exponent."""
    variables = [{"a/kernel": ALL_ZERO, "b/kernel": gradient(largest)}] * 3
    variables[1:] = [first | later for later in variables[1:]]
    rows = [
        {"step": step, "loss_scale": 2.0**12, "sample": sample_from(step, 2.0**12, data)}
        for step, data in zip((1, 50, 100), variables, strict=True)
    ]
    rows[0]["replay"] = Replay(8, 2.0**12, 1.0, 1.0, True, True, flushed={"a/kernel": 1.0})
    # The layer nearest the input is alive too, so that this is no underflow on the way there.
    return run_of(*rows, **DYNAMIC, layers={"a": "Dense", "b": "Dense"})


def test_head_that_is_flushed_needs_float32_if_another_keeps_the_scale_low():
    finding = kmp.advise(branch_run(15, **{"first/kernel": gradient(15)}))[0]
    assert (finding.cause, finding.location) == ("branch_underflow", "a")
    assert finding.change == "kmp.layers.Float32(Dense(..., name='a'))"
    assert "the others keep the loss scale low" in finding.note


def test_variable_without_a_gradient_is_named():
    without = {"amax": 0.0, "norm": 0.0}
    rows = [row_of(step, 2.0**12, -6, **{"unused/kernel": without}) for step in (1, 50, 100)]
    (finding,) = kmp.advise(run_of(*rows, **DYNAMIC))
    assert (finding.cause, finding.severity) == ("unused", INFO)
    assert finding.title == "The loss does not depend on unused/kernel."


@pytest.mark.parametrize(
    ("epsilon", "optimizer", "policy", "is_reported"),
    [
        (1e-7, "Adam", "float16", True),
        (1e-5, "Adam", "float16", False),  # a step of at most 400 times the learning rate
        (1e-7, "RMSprop", "float16", False),  # its epsilon is inside the root
        (1e-7, "Adam", "mixed_float16", False),
    ],
)
def test_squares_that_adam_loses_in_float16_are_reported(epsilon, optimizer, policy, is_reported):
    settings = DYNAMIC | {"epsilon": epsilon, "optimizer": optimizer, "policy": policy, "variable_dtypes": ["float16"]}
    row = sample_with_update(1e-3, first=-11, amax=2.0**-11, norm=2.0**-10)
    finding = next(iter(kmp.advise(run_of(row, **settings))), None)
    assert (finding is not None and finding.cause == "optimizer_state") == is_reported
    if is_reported:
        assert "it divides by its epsilon of 1e-07 alone" in finding.title
        assert "100% of the nonzero gradient elements are between 0.0001 and 2^-8" in finding.evidence
        assert finding.change == "kmp.enable(policy='mixed_float16')"


def test_updates_that_bfloat16_weights_lose_are_reported_with_its_precision():
    row = sample_with_update(1e-5, updates=0)
    finding = kmp.advise(run_of(row, **DYNAMIC, variable_dtypes=["bfloat16"]))[0]
    assert (
        finding.title == "Updates are lost: the weights are in bfloat16, and many steps are too small to change them."
    )
    assert "by less than 2^-9 of its magnitude" in finding.evidence
    assert finding.change == "kmp.enable(policy='mixed_bfloat16')"


def test_targets_of_a_binary_cross_entropy_are_scaled():
    replay = replay_of(loss=1.0, is_finite_in_float32=True, invalid_targets=InvalidTargets(0, 255, 2, is_binary=True))
    finding = kmp.advise(run_of({"step": 9, "replay": replay}, **DYNAMIC))[0]
    assert (finding.cause, finding.change) == ("targets", "y = (y - 0) / (255 - 0)")
    assert finding.title == "The targets y are from 0 to 255, but binary cross-entropy takes numbers from 0 to 1."


def test_growth_of_weights_between_samples_is_an_update():
    rows = [sample_with_update(1e-3, step=1), sample_with_update(1e-3, step=21, weight_norm=41.0)]
    row = {"step": 60, "last_loss": 0.9, "highest_loss": 7e4, "overflow_count": 0}
    finding = kmp.advise(run_of(*rows, row, **DYNAMIC, learning_rate=3.0))[0]
    assert finding.cause == "exploding"
    assert "in step 21 the update was 2 times as large as the weights" in finding.evidence
    assert finding.change == "keras.optimizers.Adam(learning_rate=0.01)"


def test_layer_with_float16_weights_of_its_own_is_named():
    row = sample_with_update(1e-5, updates=0)
    settings = {"variable_dtypes": ["float16", "float32"], "policy": "mixed_float16", "layers": {"net": "Embedding"}}
    finding = kmp.advise(run_of(row, **DYNAMIC, **settings))[0]
    assert finding.title.startswith("Updates are lost: the weights of 'net' are in float16")
    assert finding.change == "keras.layers.Embedding(dtype='mixed_float16', name='net')"


def test_scale_that_flushed_all_samples_is_changed_with_its_maximum():
    reference = row_of(1, 1.0, -12)["sample"]
    rows = [row_of(step, 2.0**-14, 0, **{"net/kernel": ALL_ZERO}) for step in (1, 50, 100)]
    replay = Replay(8, 2.0**-14, 1.0, 1.0, True, True, flushed={"net/kernel": 1.0})
    settings = DYNAMIC | {"initial_scale": 2.0**-14, "max_scale": 2.0**-14}
    rows[0] |= {"replay": replay, "reference": reference}
    finding = kmp.advise(run_of(*rows, **settings))[0]
    assert finding.cause == "scale_too_small"
    assert finding.change == "kmp.enable(initial_scale=2.0**26, max_scale=2.0**127)"


def test_sample_weights_are_changed_with_the_targets():
    replay = replay_of(is_finite_in_float32=False, nonfinite_part="the batch's y", has_sample_weight=True)
    change = kmp.advise(run_of(overflow_row(replay=replay), **DYNAMIC))[0].change
    assert change.endswith("x, y, sample_weight = keras.tree.map_structure(lambda a: a[keep], (x, y, sample_weight))")


def test_large_inputs_are_not_blamed_for_a_nan_that_float32_has_too():
    options = {"is_finite_in_float32": False, "nonfinite_part": "the batch's x", "is_part_finite": True}
    nan = operation("Sqrt", has_negative_input=True)
    assert kmp.advise(run_of(overflow_row(replay=replay_of(nonfinite=[nan], **options)), **DYNAMIC))[0].cause == "loss"
    huge = NonfiniteOperation("net/a", "Square", "float32", "inf", 9.97e36, 1.0, None, False)
    advice = kmp.advise(run_of(overflow_row(replay=replay_of(nonfinite=[huge], **options)), **DYNAMIC))
    assert advice[0].cause == "data"


def test_noisy_batches_are_no_explosion_while_the_loss_of_epochs_falls():
    row = {"step": 60, "last_loss": 0.9, "highest_loss": 3.2}
    epochs = [{"step": step, "metrics": {"loss": loss}} for step, loss in ((30, 1.3), (60, 1.1))]
    sample = sample_with_update(0.41)
    assert kmp.advise(run_of(sample, row, **DYNAMIC))[0].cause == "exploding"
    assert list(kmp.advise(run_of(sample, row, *epochs, **DYNAMIC))) == []
    flat = [{"step": step, "metrics": {"loss": loss}} for step, loss in ((15, 1.3), (30, 1.1), (45, 1.1), (60, 1.1))]
    assert kmp.advise(run_of(sample, row, *flat, **DYNAMIC))[0].cause == "exploding"


def test_advice_can_be_copied_and_pickled():
    advice = kmp.advise(run_of({"step": 50, "last_loss": 7e4, "highest_loss": 7e4}, **DYNAMIC))
    for copied in (copy.copy(advice), copy.deepcopy(advice), pickle.loads(pickle.dumps(advice))):
        assert copied == advice
        assert str(copied) == str(advice)


STUCK = {
    **{"step": 40, "overflow_count": 40, "overflows_in_a_row": 40, "nonfinite_loss_count": 0, "loss_scale": 2.0**3},
    "overflow_origins_by_variable": {"net/conv/kernel": 40},
}
LAYERS = {"net/conv": "Conv2D", "net/a": "Dense"}


def causes_and_locations(*rows, **settings):
    run = Run(list(rows), {"settings": DYNAMIC | {"layers": LAYERS} | settings})
    return [(finding.cause, finding.location) for finding in kmp.advise(run)]


def test_usable_scale_of_a_replay_is_advised_if_all_samples_are_zero():
    rows = [row_of(step, 2.0**15, 0, **{"net/kernel": ALL_ZERO}) for step in (1, 50, 100)]
    rows[0]["replay"] = Replay(8, 2.0**15, 1.0, 1.0, True, True, usable_scale=2.0**45, flushed={"net/kernel": 1.0})
    finding = kmp.advise(run_of(*rows, **DYNAMIC))[0]
    assert (finding.cause, finding.change) == ("scale_too_small", "kmp.enable(initial_scale=2.0**45)")


def test_scale_in_use_is_not_advised_if_no_larger_one_is_known():
    rows = [row_of(step, 2.0**15, 0, **{"net/kernel": ALL_ZERO}) for step in (1, 50, 100)]
    rows[0]["replay"] = Replay(8, 2.0**15, 1.0, 1.0, True, True, flushed={"net/kernel": 1.0})
    finding = kmp.advise(run_of(*rows, **DYNAMIC))[0]
    assert (finding.cause, finding.change) == ("scale_too_small", "")


@pytest.mark.parametrize(
    ("steps", "change"),
    [(40, "kmp.enable(min_scale=2.0**-14, initial_scale=2.0**3)"), (60, "kmp.enable(min_scale=2.0**-14)")],
)
def test_usable_scale_below_the_minimum_is_advised_as_the_minimum(steps, change):
    replay = replay_of(loss=1.0, float32_loss=1.0, is_finite_in_float32=True, float32_layers=[], usable_scale=2.0**3)
    row = STUCK | {"step": steps, "loss_scale": 2.0**10, "replay": replay}
    (finding,) = kmp.advise(Run([row], {"settings": DYNAMIC | {"min_scale": 2.0**10}}))
    assert (finding.cause, finding.location, finding.change) == ("scale_too_large", "min_scale", change)


@pytest.mark.parametrize("settings", [{}, {"rule": "FixedScale"}, {"growth_interval": 20}])
def test_root_of_zero_that_float32_does_not_survive_either_is_no_matter_of_the_scale(settings):
    replay = replay_of(
        loss=1.0,
        float32_loss=1.0,
        is_finite_in_float32=False,
        nonfinite=[replace(operation("SqrtGrad", "inf"), is_backward=True)],
        float32_layers=[],
    )
    start = {"step": 1, "overflow_count": 1, "overflows_in_a_row": 1, "loss_scale": 2.0**14}
    clean = STUCK | {"overflow_count": 12, "overflows_in_a_row": 0, "replay": replay}
    for rows in ([STUCK | {"replay": replay}], [start, clean, clean | {"step": 80, "overflow_count": 20}]):
        assert causes_and_locations(*rows, **settings) == [("backward_overflow", "net/a")]
    (finding,) = kmp.advise(Run(rows, {"settings": DYNAMIC | {"layers": LAYERS}}))
    assert (finding.severity, finding.edits) == (ERROR, ())
    assert finding.title == "NaN or Inf in the backward pass of layer 'a', in float32 too."
    rare = clean | {"step": 2000, "overflow_count": 13}
    assert kmp.advise(Run([start, clean, rare], {"settings": DYNAMIC})).problems[0].severity == WARNING


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"is_finite_in_float32": True, "float32_loss": 1.0, "float32_layers": ["net/a"]},
            ("rounding", "net/a"),
        ),
        ({"is_finite_in_float32": False, "nonfinite_part": "the batch's x"}, ("data", "the batch's x")),
    ],
)
def test_nan_that_a_kernel_of_the_training_swallowed_is_the_cause_of_its_overflows(values, expected):
    replay = replay_of(nonfinite=[operation("Sqrt", has_negative_input=True)], **values)
    assert causes_and_locations(STUCK | {"replay": replay}) == [expected]


def test_nan_in_a_replay_is_no_cause_if_the_scale_explains_the_skipped_steps():
    replay = replay_of(
        nonfinite=[operation("Sqrt", has_negative_input=True)],
        is_finite_in_float32=True,
        float32_loss=1.0,
        float32_layers=["net/a"],
    )
    start = {"step": 1, "overflow_count": 1, "overflows_in_a_row": 1, "loss_scale": 2.0**14, "replay": replay}
    settled = {"step": 3, "overflow_count": 2, "overflows_in_a_row": 0, "loss_scale": 2.0**13}
    assert causes_and_locations(start, settled, settled | {"step": 400}) == []


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (operation("Log", "inf"), "forward_underflow"),
        (replace(operation("RealDiv", "inf"), smallest_input=0.0), "constant"),
    ],
)
def test_infinity_that_only_the_gradients_show_is_the_cause(found, cause):
    replay = replay_of(
        loss=1.0,
        float32_loss=1.0,
        is_finite_in_float32=True,
        nonfinite=[found, replace(operation("Mul"), is_backward=True)],
        float32_layers=["net/a"],
        activation_gradients={"net/a": 1.0},
    )
    assert causes_and_locations(STUCK | {"replay": replay}) == [(cause, "net/a")]
    mask = replace(operation("Cast", "inf"), constant=-1e9)
    replay = replace(replay, nonfinite=[mask, *replay.nonfinite[1:]])
    assert causes_and_locations(STUCK | {"replay": replay}) == [("backward_overflow", "net/a")]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_epsilon_of_zero_is_reported_for_weights_of_any_dtype(dtype):
    replay = replay_of(is_finite_in_float32=False, nonfinite_variables=["net/a/kernel"])
    settings = {"epsilon": 0.0, "optimizer": "Adam", "variable_dtypes": [dtype]}
    (finding,) = kmp.advise(run_of(overflow_row(replay=replay), **DYNAMIC, **settings))
    assert (finding.cause, finding.location) == ("optimizer_state", "net/a/kernel")
    assert finding.change.splitlines()[-1] == "keras.optimizers.Adam(epsilon=1e-7)"
    assert ("kmp.enable(policy='mixed_float16')" in finding.change) == (dtype == "float16")
    usual = settings | {"epsilon": 1e-7, "variable_dtypes": ["float32"]}
    assert kmp.advise(run_of(overflow_row(replay=replay), **DYNAMIC, **usual))[0].cause == "loss"
