"""All causes, in the order of a report."""

from collections.abc import Callable, Iterator

from kmp.diagnosis.batch_causes import NonfiniteData, invalid_targets
from kmp.diagnosis.cause import ERROR, Cause
from kmp.diagnosis.forward_causes import GrowingActivations, nonfinite_forward
from kmp.diagnosis.precision_causes import (
    Repaired,
    StaleState,
    UnscaledLoss,
    WrongGradients,
    WrongOutputs,
)
from kmp.diagnosis.range_causes import (
    NeedlessScale,
    UnexplainedGradients,
    nonfinite_backward,
)
from kmp.diagnosis.run_metrics import RunMetrics
from kmp.diagnosis.scale_causes import (
    FixedScaleTooLarge,
    GrowthTooFast,
    HysteresisTooLarge,
    InitialScaleTooLarge,
    MinScaleTooLarge,
    NonfiniteGradients,
    backward_overflow,
)
from kmp.diagnosis.step_causes import ChangedInLayer, WronglyScaled
from kmp.diagnosis.underflow_causes import (
    DeadVariables,
    FlushedBranch,
    ScaleTooSmall,
    UntrainedVariables,
    UnusedVariables,
    WideRange,
)
from kmp.diagnosis.update_causes import DivisionByEpsilon, Exploding, LostSquares, LostUpdates

Predicate = Callable[[RunMetrics], Cause | None]

# A report ends with the first error: what follows is its consequence. So the most specific causes
# come first, after those that are no problem. A repair does not depend on this order.
PREDICATES: tuple[Predicate, ...] = (
    Repaired.of,
    DeadVariables.of,
    UnusedVariables.of,
    UntrainedVariables.of,
    NonfiniteData.of,
    invalid_targets,
    WronglyScaled.of,
    DivisionByEpsilon.of,
    LostSquares.of,
    Exploding.of,
    GrowingActivations.of,
    nonfinite_forward,
    UnscaledLoss.of,
    WrongOutputs.of,
    StaleState.of,
    NonfiniteGradients.of,
    NeedlessScale.of,
    nonfinite_backward,
    UnexplainedGradients.of,
    HysteresisTooLarge.of,
    backward_overflow,
    FixedScaleTooLarge.of,
    MinScaleTooLarge.of,
    InitialScaleTooLarge.of,
    GrowthTooFast.of,
    LostUpdates.of,
    FlushedBranch.of,
    ScaleTooSmall.of,
    WideRange.of,
    WrongGradients.of,
    ChangedInLayer.of,
)


def found_causes(run: RunMetrics) -> Iterator[Cause]:
    """Yields all causes that the records show, of those that exist in the format of the run."""
    for predicate in PREDICATES:
        cause = predicate(run)
        if cause is not None and run.format in cause.formats:
            yield cause


def causes_of(run: RunMetrics) -> Iterator[Cause]:
    """Yields the causes of a run's problems, through the first error."""
    for cause in found_causes(run):
        yield cause
        if cause.severity == ERROR:
            return
