"""`LossScaleOptimizer`: scales the loss, measures gradients, updates or skips, adapts the loss scale, and counts."""

from kmp.optimizer.conditional_update import supports_predicated_writes as supports_predicated_writes
from kmp.optimizer.counter_values import CounterValues as CounterValues
from kmp.optimizer.loss_scale_optimizer import LossScaleOptimizer

__all__ = ["LossScaleOptimizer"]
