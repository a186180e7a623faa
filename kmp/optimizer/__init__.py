"""`LossScaleOptimizer`: scales the loss, skips steps that overflow, adapts and counts."""

from kmp.optimizer.counters import COUNT_INDEX as COUNT_INDEX
from kmp.optimizer.inner_optimizer import resolve_optimizer as resolve_optimizer
from kmp.optimizer.loss_scale_optimizer import LossScaleOptimizer

__all__ = ["LossScaleOptimizer"]
