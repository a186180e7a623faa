"""`LossScaleOptimizer`: scales the loss, skips steps that overflow, adapts and counts."""

from kmp.optimizer.loss_scale_optimizer import LossScaleOptimizer

__all__ = ["LossScaleOptimizer"]
