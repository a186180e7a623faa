"""The ladder of causes: questions about a run, and the rungs that answer each.

The rungs stand in the order in which a training step goes. The first problem answers its question,
and those after it are not asked: what they would find follows from it. So no cause has to exclude
another. A rung is asked for one cause: what is no problem does not keep the next rung from it.
"""

from collections.abc import Callable, Iterator

from kmp.diagnosis.cause import ERROR, INFO, Cause
from kmp.diagnosis.causes.backward_overflow import BackwardOverflow
from kmp.diagnosis.causes.bad_data import BadData
from kmp.diagnosis.causes.bad_targets import BadTargets
from kmp.diagnosis.causes.changed_gradients import ChangedGradients
from kmp.diagnosis.causes.division_by_epsilon import DivisionByEpsilon
from kmp.diagnosis.causes.exploding import Exploding
from kmp.diagnosis.causes.flushed_branch import FlushedBranch
from kmp.diagnosis.causes.growing_activations import GrowingActivations
from kmp.diagnosis.causes.loss_in_float16 import LossInFloat16
from kmp.diagnosis.causes.lost_squares import LostSquares
from kmp.diagnosis.causes.lost_updates import LostUpdates
from kmp.diagnosis.causes.nonfinite_forward import NonfiniteForward
from kmp.diagnosis.causes.nonfinite_gradients import NonfiniteGradients
from kmp.diagnosis.causes.nonfinite_in_float32 import NonfiniteInFloat32
from kmp.diagnosis.causes.nonfinite_weights import NonfiniteWeights
from kmp.diagnosis.causes.repaired import Repaired
from kmp.diagnosis.causes.rounded_before import RoundedBefore
from kmp.diagnosis.causes.rule_overflows import RuleOverflows
from kmp.diagnosis.causes.scale_too_large import ScaleTooLarge
from kmp.diagnosis.causes.scale_too_small import ScaleTooSmall
from kmp.diagnosis.causes.stale_state import StaleState
from kmp.diagnosis.causes.unexplained_loss import UnexplainedLoss
from kmp.diagnosis.causes.without_gradient import WithoutGradient
from kmp.diagnosis.causes.wrong_gradients import WrongGradients
from kmp.diagnosis.causes.wrong_outputs import WrongOutputs
from kmp.diagnosis.causes.wrongly_scaled import WronglyScaled
from kmp.diagnosis.observations import Observations

Rung = Callable[[Observations], Cause | None]
Question = tuple[Rung, ...]


def scaling(run: Observations) -> Cause | None:
    """What the training step does with the loss scale, as its graph or a replay shows it."""
    return WronglyScaled.of(run) or ChangedGradients.of(run)


def batch(run: Observations) -> Cause | None:
    """The data and the targets."""
    return BadData.of(run) or BadTargets.not_classes(run)


def weights(run: Observations) -> Cause | None:
    """The weights, which earlier updates may have ruined."""
    return (
        DivisionByEpsilon.of(run)
        or LostSquares.of(run)
        or Exploding.of(run)
        or NonfiniteWeights.of(run)
    )


def forward(run: Observations) -> Cause | None:
    """The forward pass, as a replay shows it: what float32 does not cure, and what it does."""
    return (
        RoundedBefore.in_loss(run)
        or GrowingActivations.of(run)
        or NonfiniteInFloat32.of(run)
        or NonfiniteForward.of(run)
    )


def loss(run: Observations) -> Cause | None:
    """A loss that is not finite, and that no replay shows."""
    if not run.skipped.nonfinite_losses:
        return None
    # The program that trains may fold constants that are finite one by one. A finite comparison
    # that differs shows more than the dtype of the loss.
    return WrongOutputs.of(run) or LossInFloat16.of(run) or UnexplainedLoss.of(run)


def backward(run: Observations) -> Cause | None:
    """The backward pass: what float32 does not cure, another scale does, and what float32 does."""
    if not run.skipped.gradient_overflows:
        return None
    return (
        RoundedBefore.in_gradients(run)
        or NonfiniteGradients.of(run)
        or ScaleTooLarge.of_format(run)
        or RuleOverflows.stuck(run)
        or BackwardOverflow.of(run)
    )


def loss_scale(run: Observations) -> Cause | None:
    """The settings of the loss scale at which it overflows."""
    return ScaleTooLarge.fixed(run) or ScaleTooLarge.minimum(run)


def results(run: Observations) -> Cause | None:
    """The outputs of the model and its states, which a replay compares with float32."""
    return WrongOutputs.of(run) or StaleState.of(run)


def updates(run: Observations) -> Cause | None:
    """The updates of weights in 16 bits."""
    return LostUpdates.of(run)


def underflow(run: Observations) -> Cause | None:
    """The gradients that float16 flushes to zero, and that a larger scale would keep."""
    return FlushedBranch.of(run) or ScaleTooSmall.of(run)


def gradients(run: Observations) -> Cause | None:
    """The gradients, which a replay compares with float32."""
    return WrongGradients.of(run) or ScaleTooSmall.in_wide_range(run)


# What is reported whatever else is found.
NOTES: Question = (
    Repaired.of,
    WithoutGradient.dead,
    WithoutGradient.unused,
    WithoutGradient.untrained,
    BadTargets.out_of_range,
)
# What does the step do with the loss scale?
SCALING: Question = (scaling,)
# Why is the loss NaN or Inf, or has it exploded?
NONFINITE: Question = (batch, weights, forward, loss)
# Why do gradients of a finite loss overflow?
OVERFLOWS: Question = (backward, loss_scale, ScaleTooLarge.initial, RuleOverflows.growing)
# What do the other steps lose to 16 bits?
ROUNDED: Question = (results, updates, underflow, gradients)


def causes_of(run: Observations) -> Iterator[Cause]:
    """Yields the causes of a run's problems, with what is no problem, through the first error."""
    for rung in NOTES:
        cause = rung(run)
        if cause is not None:
            yield cause
    for question in (SCALING, NONFINITE, OVERFLOWS, ROUNDED):
        for cause in answers(run, question):
            yield cause
            if cause.severity == ERROR:
                return


def answers(run: Observations, question: Question) -> Iterator[Cause]:
    """Yields what answers a question: the first problem, and what is no problem before it."""
    for rung in question:
        cause = rung(run)
        if cause is not None:
            yield cause
            if cause.severity != INFO:
                return


def gravest(run: Observations, *questions: Question) -> Cause | None:
    """Returns the first error that answers one of the questions, or the first warning."""
    found = [cause for question in questions for cause in answers(run, question)]
    problems = [cause for cause in found if cause.severity != INFO]
    errors = [cause for cause in problems if cause.severity == ERROR]
    return next(iter(errors or problems), None)


def names_of_causes() -> dict[str, str]:
    """Returns what the name of each cause means, in a few words, in alphabetical order."""
    names: dict[str, str] = {}
    for kind in Cause.__subclasses__():
        names |= kind.names
    return dict(sorted(names.items()))
