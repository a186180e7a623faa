"""What a `LossScaleOptimizer` holds at one moment. Needs NumPy alone."""

from dataclasses import dataclass, field

from kmp.records.exponent_histogram import ExponentHistogram
from kmp.records.gradient_sample import GradientSample


@dataclass(frozen=True)
class Snapshot:
    """One reading of a `LossScaleOptimizer`.

    Args:
        step: Training steps done, skipped ones included.
        loss_scale: The scale that the next step will use.
        clean_steps: Steps without an overflow since the scale last grew (or, at its highest, would have grown), or
            gradients of a finite loss last overflowed.
        overflow_count: Steps skipped since training began.
        overflows_in_a_row: Steps skipped since the last one that was applied.
        nonfinite_loss_count: Steps skipped whose loss was not finite before it was scaled.
        nonfinite_losses_in_a_row: Those of them among `overflows_in_a_row`.
        overflows_at_min_scale: Steps skipped that asked for a scale below the lowest one.
        overflow_origin: Path of the variable to blame for the last step that was skipped with a finite loss: of those whose
            gradient was not finite, the one nearest the loss in the order of the graph, because an overflow spreads to
            all before it. (Of a step that ran eagerly, the last in the model's order.) `None` before the first one.
        last_loss: The loss of the last step before it was scaled, summed over replicas. `None` before the first one.
        highest_loss: The highest magnitude of such losses so far, of those that were finite. `None` before the first.
        overflows_by_variable: Variable path to the number of steps in which its gradient was not finite; zeros left
            out.
        overflow_origins_by_variable: Variable path to the number of steps, skipped with a finite loss, in which it was the one
            to blame; zeros left out.
        nonfinite_activation: What was the first to be inf or nan in the last forward pass whose loss was not finite: a
            layer's path, `"the batch's x"` and the like, or `"the loss function"`. `None` before one, and without a
            `kmp.callbacks.ForwardProbe`.
        sample: The last sample of gradients, or `None` where none was asked for.

    Example:
    >>> import kmp
    >>> kmp.LossScaleOptimizer("sgd", initial_scale=8.0).snapshot().loss_scale
    8.0
    """

    step: int
    loss_scale: float
    clean_steps: int
    overflow_count: int
    overflows_in_a_row: int
    nonfinite_loss_count: int
    nonfinite_losses_in_a_row: int = 0
    overflows_at_min_scale: int = 0
    overflow_origin: str | None = None
    last_loss: float | None = None
    highest_loss: float | None = None
    overflows_by_variable: dict[str, int] = field(default_factory=dict)
    overflow_origins_by_variable: dict[str, int] = field(default_factory=dict)
    nonfinite_activation: str | None = None
    sample: GradientSample | None = None

    @property
    def histogram(self) -> ExponentHistogram | None:
        """The last sampled histogram of all variables together."""
        return self.sample.histogram if self.sample else None
