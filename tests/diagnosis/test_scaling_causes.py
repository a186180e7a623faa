"""Causes in what a training step does with the loss scale: `WronglyScaled`, `ChangedGradients`.

`tests/gradients/test_step_facts.py` reads the facts of a step from graphs.
"""

import pytest
from built_runs import (
    BFLOAT16,
    compared,
    edits_of,
    healthy,
    names,
    problem,
    training,
)

import kmp
from kmp.diagnosis import ERROR, WARNING, Observations, incurable_cause_of
from kmp.diagnosis.causes.changed_gradients import ChangedGradients
from kmp.diagnosis.causes.wrongly_scaled import WronglyScaled
from kmp.records.jsonl import to_line
from kmp.records.replay import UnscaledGradients
from kmp.records.step_facts import CodeLine, StepFacts

MINIMUM = CodeLine("Minimum", "float32", "train.py", 12)
IN_FIT = {"in_fit": True, "train_step": "custom"}
KERAS = {"in_fit": True, "train_step": "keras"}
UNSCALE = "gradients = optimizer.unscale(gradients)"


def with_facts(scaling, *records, are_all=False, operation=MINIMUM, **settings):
    """Returns a run with a training step that does this with the gradients of layer a."""
    facts = StepFacts(scaling, operation, ["net/a/kernel"], are_all)
    return training(*records or [healthy(2)], step_facts=facts, **settings)


def with_unscaled(layer="net/a", train_step="custom", **values):
    """Returns a run whose comparison shows gradients that do not grow with the loss scale."""
    unscaled = UnscaledGradients([layer] if layer else [], **values)
    return training(healthy(2, replay=compared(unscaled=unscaled)), train_step=train_step)


@pytest.mark.parametrize(
    ("scaling", "location", "times", "edits"),
    [
        ("nonlinear", "", None, [UNSCALE]),
        ("added", "", None, [UNSCALE]),
        ("divided", "", 2.0**15, ["optimizer.apply(unscaled=True)"]),
        ("multiplied", "", None, []),
        ("unscaled", "net/a", None, []),
    ],
)
def test_each_fault_in_the_graph_of_a_step_is_an_error_with_its_line(
    scaling, location, times, edits
):
    cause = problem(with_facts(scaling))
    assert isinstance(cause, WronglyScaled)
    assert (cause.name, cause.severity, cause.kind) == ("unscaled_loss", ERROR, scaling)
    assert (cause.code, cause.location, cause.layers) == (MINIMUM, location, ["net/a"])
    assert (cause.times, cause.replay) == (times, None)
    assert cause.is_measured == (scaling != "nonlinear")
    assert not cause.is_cured_by_float32
    assert edits_of(cause) == edits


def test_facts_of_a_step_are_read_from_a_log(tmp_path):
    run = with_facts("divided")
    log = tmp_path / "kmp.jsonl"
    log.write_text("".join(map(to_line, (run.header, *run.rows))), encoding="utf-8")
    assert problem(kmp.load_run(log)) == problem(run)


def test_a_train_step_calls_its_own_optimizer():
    cause = problem(with_facts("divided", **IN_FIT))
    assert edits_of(cause) == ["self.optimizer.apply(unscaled=True)"]


@pytest.mark.parametrize(
    ("layers", "severity", "times"), [(["net/a"], ERROR, 8.0), ([], WARNING, 8.0)]
)
def test_clip_is_measured_by_a_replay_and_a_warning_if_it_changed_nothing(layers, severity, times):
    replay = compared(unscaled=UnscaledGradients(layers, times=times))
    run = with_facts("nonlinear", healthy(2, replay=replay))
    cause = problem(run)
    assert (cause.severity, cause.times, cause.is_measured) == (severity, times, True)
    incurable = incurable_cause_of(Observations(run))
    assert incurable == (cause if severity == ERROR else None)


@pytest.mark.parametrize(
    ("scaling", "settings"),
    [
        ("right", {}),
        ("unknown", {}),
        ("added", KERAS),  # no code of the user's gets these gradients
        ("unscaled", BFLOAT16),
    ],
)
def test_what_is_sound_or_not_known_is_no_fault(scaling, settings):
    assert names(with_facts(scaling, **settings)) == []


def test_gradient_function_that_clips_under_the_step_of_keras_is_a_warning():
    cause = problem(with_facts("nonlinear", **KERAS))
    assert isinstance(cause, ChangedGradients)
    assert (cause.name, cause.severity) == ("unscaled_loss", WARNING)
    assert (cause.layers, cause.location, cause.origin) == (["net/a"], "net/a", "")
    assert (cause.code, cause.replay, edits_of(cause)) == (MINIMUM, None, [])


@pytest.mark.parametrize(
    ("values", "kind", "location", "times", "edits"),
    [
        ({}, "unscaled", "net/a", None, []),
        ({"layer": "net", "are_all": True}, "unscaled", "net", None, []),
        (
            {"change": "clipped", "times": 40.0},
            "nonlinear",
            "",
            40.0,
            ["gradients = self.optimizer.unscale(gradients)"],
        ),
        (
            {"change": "divided", "times": 40.0},
            "divided",
            "",
            2.0**15,
            ["self.optimizer.apply(unscaled=True)"],
        ),
    ],
)
def test_gradients_that_do_not_grow_with_the_loss_scale_are_an_error_of_a_custom_step(
    values, kind, location, times, edits
):
    cause = problem(with_unscaled(**values))
    assert isinstance(cause, WronglyScaled)
    assert (cause.name, cause.severity, cause.kind) == ("unscaled_loss", ERROR, kind)
    assert (cause.location, cause.times) == (location, times)
    assert cause.are_all == values.get("are_all", False)
    assert (cause.code, cause.is_measured) == (None, False)
    assert edits_of(cause) == edits


@pytest.mark.parametrize("origin", ["", "net/gate"])
def test_gradients_that_do_not_grow_under_the_step_of_keras_are_those_of_a_gradient_function(
    origin,
):
    cause = problem(with_unscaled(train_step="keras", origin=origin, are_all=bool(origin)))
    assert isinstance(cause, ChangedGradients)
    assert (cause.name, cause.severity) == ("unscaled_loss", ERROR)
    assert (cause.layers, cause.origin) == (["net/a"], origin)
    assert cause.location == (origin or "net/a")
    assert cause.replay is not None


def test_gradients_that_all_grow_are_no_fault():
    assert names(with_unscaled(layer="")) == []
