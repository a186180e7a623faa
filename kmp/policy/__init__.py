"""`enable`, `disable`, `wrap` and `guard`. Only this package keeps patches of Keras in place."""

from kmp.policy import rounded_indices, skipped_step_rollback
from kmp.policy.enabling import POLICIES, Handle, disable, enable, graph_rewrite
from kmp.policy.model_optimizers import all_optimizers_of
from kmp.policy.optimizer_wrapping import wrap
from kmp.policy.skipped_step_rollback import guard

__all__ = [
    "POLICIES",
    "Handle",
    "all_optimizers_of",
    "disable",
    "enable",
    "graph_rewrite",
    "guard",
    "rounded_indices",
    "skipped_step_rollback",
    "wrap",
]
