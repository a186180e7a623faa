import pytest
import step_operations
from conftest import COUNTS_CPU_OPERATIONS
from step_operations import WITH_CALLBACKS, Shape, added, operations

from kmp_bench.measurement import MeasurementError
from kmp_bench.models import BARE

pytestmark = COUNTS_CPU_OPERATIONS


SHAPES = SMALL, MORE_NORMS, MORE_DENSE = Shape(1, 1), Shape(1, 2), Shape(2, 1)


@pytest.fixture(scope="module", autouse=True)
def small_shapes():
    """Replaces the benchmark's models with smaller ones, which are traced in less time."""
    shapes = {"SHAPES": SHAPES, "SMALL": SMALL, "MORE_NORMS": MORE_NORMS, "MORE_DENSE": MORE_DENSE}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in shapes.items():
            patch.setattr(step_operations, name, value)
        yield


@pytest.fixture(scope="module")
def counts():
    return {
        variant: {shape: operations(variant, shape) for shape in SHAPES}
        for variant in (BARE, WITH_CALLBACKS)
    }


def test_operations_of_all_layers_are_counted(counts):
    computing = {shape: own for shape, (own, _) in counts[BARE].items()}
    # Adam alone has more operations than these for each of its variables.
    assert computing[MORE_NORMS] - computing[SMALL] > 2 * 10
    assert computing[MORE_DENSE] - computing[SMALL] > 2 * 10
    assert counts[BARE][SMALL][1] > 3 * 6  # bookkeeping: reads of weights and of Adam's two moments


def test_kmp_with_callbacks_adds_at_most_these_operations(counts):
    fixed, per_norm, per_variable = added(counts[WITH_CALLBACKS], counts[BARE])
    assert fixed <= 64  # nine of these, which keep the batch, run on the host
    assert per_norm <= 6
    assert per_variable <= 2


def test_added_operations_are_those_of_the_variant():
    bare = {shape: (100 * shape.dense, 0) for shape in SHAPES}
    variant = {shape: (103 * shape.dense + 7 * shape.norms + 40, 5) for shape in SHAPES}
    assert added(variant, bare) == (40, 7, 1.5)


def test_steps_that_differ_are_not_counted(monkeypatch):
    monkeypatch.setattr(
        step_operations, "executed_operations", lambda step, calls: [{"Mul": 1}, {"Mul": 2}]
    )
    with pytest.raises(MeasurementError, match="did not run the same operations"):
        operations(BARE, Shape(dense=1, norms=0))
