"""What is no problem by itself: `WithoutGradient` and `Repaired`."""

import pytest
from built_runs import (
    ALL_ZERO,
    BFLOAT16,
    FLOAT32,
    compared,
    edits_of,
    failed,
    gradient,
    make_replay,
    names,
    operation,
    sampled,
    training,
)

from kmp.diagnosis import INFO, WARNING, Observations, causes_of
from kmp.diagnosis.causes.repaired import Repaired
from kmp.diagnosis.causes.without_gradient import WithoutGradient
from kmp.records import Record

KERNEL = {"net/kernel": gradient(-6)}
DEAD = {"dead/kernel": ALL_ZERO}


def notes(run):
    """Returns the causes that are no problem."""
    return [cause for cause in causes_of(Observations(run)) if cause.severity == INFO]


def test_gradient_without_elements_is_unused_and_one_always_zero_in_float32_too_is_dead():
    empty = {"unused/kernel": {"amax": 0.0, "norm": 0.0}}
    records = [sampled(step, KERNEL | empty | DEAD) for step in (1, 50)]
    records.append(sampled(100, KERNEL | empty | DEAD | {"dead/bias": ALL_ZERO}))
    zero = ["net/kernel", "unused/kernel", "dead/kernel", "dead/bias"]
    records[0].replay = make_replay(zero=zero)
    dead, unused = notes(training(*records))
    assert (dead.name, dead.location, unused.name, unused.location) == (
        *("dead", "dead/kernel"),
        *("unused", "unused/kernel"),
    )
    assert (dead.variables, dead.samples, dead.examples) == (["dead/kernel"], 3, 8)
    assert unused.variables == ["unused/kernel"]
    assert edits_of(dead) == edits_of(unused) == []
    assert not dead.is_cured_by_float32


@pytest.mark.parametrize("settings", [{}, BFLOAT16, FLOAT32])
def test_gradients_that_are_zero_in_float32_need_no_replay(settings):
    records = [sampled(step, KERNEL | DEAD) for step in (1, 50, 100)]
    found = notes(training(*records, **settings))
    assert [cause.name for cause in found] == (["dead"] if settings is FLOAT32 else [])


@pytest.mark.parametrize(("count", "is_warning"), [(1, False), (2, True)])
def test_training_of_float32_in_which_most_gradients_are_zero_is_broken(count, is_warning):
    dead = {f"net/{index}/kernel": ALL_ZERO for index in range(count)}
    records = [sampled(step, KERNEL | dead) for step in (1, 50, 100)]
    (cause,) = causes_of(Observations(training(*records, **FLOAT32)))
    assert (cause.name, cause.severity) == ("dead", WARNING if is_warning else INFO)
    assert cause.variables == [*dead]


def test_variables_that_no_optimizer_gets_are_named():
    paths = ["net/a/kernel", "net/a/bias"]
    (cause,) = notes(training(Record(step=50), untrained_variables=paths))
    assert isinstance(cause, WithoutGradient)
    assert (cause.name, cause.location, cause.variables) == ("untrained", paths[0], paths)


def test_layers_of_all_repairs_are_named_with_the_step_of_the_last():
    replay = failed(operation("Exp", "inf"))
    first = Record(step=10, fallback=["net/a"], fallback_reason="It overflows.")
    last = Record(step=20, fallback=["net/conv"], fallback_reason="It overflows too.")
    proof = Record(step=20, replay=compared())
    run = training(Record(step=10, replay=replay), first, last, proof, Record(step=50))
    (cause,) = notes(run)
    assert isinstance(cause, Repaired)
    assert (cause.name, cause.location) == ("float32_fallback", "net/conv")
    assert (cause.record, cause.layers) == (last, ["net/a", "net/conv"])
    assert edits_of(cause) == [
        "kmp.layers.Float32(Dense(..., name='a'))",
        "kmp.layers.Float32(Conv2D(..., name='conv'))",
    ]
    assert names(run) == []
