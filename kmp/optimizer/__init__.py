"""`LossScaleOptimizer`: scales the loss, measures the gradients, updates or skips, adapts the scale, counts."""

from kmp.optimizer.conditional_update import has_predicable_writes as has_predicable_writes
from kmp.optimizer.loss_scale_optimizer import LossScaleOptimizer

__all__ = ["LossScaleOptimizer"]
