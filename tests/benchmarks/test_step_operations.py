import pytest

from kmp.backend import operation_trace
from kmp.bench import step_operations
from kmp.bench.optimizer_step import BARE
from kmp.bench.small_models import WITH_CALLBACKS
from kmp.bench.step_operations import MORE_DENSE, MORE_NORMS, SHAPES, SMALL, Added, Operations
from kmp.bench.timing import MeasurementError


@pytest.fixture(scope="module")
def counts():
    return {
        variant: {shape: step_operations.operations(variant, shape) for shape in SHAPES}
        for variant in (BARE, WITH_CALLBACKS)
    }


def test_operations_of_all_layers_are_counted(counts):
    bare = counts[BARE]
    # Adam alone has more operations than these for each of its variables.
    assert bare[MORE_NORMS].computing - bare[SMALL].computing > 4 * 2 * 10
    assert bare[MORE_DENSE].computing - bare[SMALL].computing > 8 * 10
    assert bare[SMALL].bookkeeping > 3 * 18  # reads of weights and of Adam's two moments


def test_parts_add_up_to_what_is_added(counts):
    added = step_operations.added(counts[WITH_CALLBACKS], counts[BARE])
    for shape in SHAPES:
        total = counts[WITH_CALLBACKS][shape].computing - counts[BARE][shape].computing
        assert added.fixed + shape.norms * added.per_norm + 2 * shape.dense * added.per_variable == total


def test_kmp_with_callbacks_adds_at_most_these_operations(counts):
    added = step_operations.added(counts[WITH_CALLBACKS], counts[BARE])
    assert added.fixed <= 60
    assert added.per_norm <= 6
    assert added.per_variable <= 2


def test_added_operations_are_those_of_the_variant():
    bare = {shape: Operations(100 * shape.dense, 0) for shape in SHAPES}
    variant = {shape: Operations(103 * shape.dense + 7 * shape.norms + 40, 5) for shape in SHAPES}
    assert step_operations.added(variant, bare) == Added(40, 7, 1.5)


def test_steps_that_differ_are_not_counted(monkeypatch):
    monkeypatch.setattr(operation_trace, "executed_operations", lambda step, calls: [{"Mul": 1}, {"Mul": 2}])
    with pytest.raises(MeasurementError, match="did not run the same operations"):
        step_operations._executed(lambda: None)
