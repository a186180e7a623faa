"""`enable`, `disable`, `wrap` and `guard`. Only this package keeps patches of Keras in place."""

from kmp.policy import guarded_training, rounded_indices
from kmp.policy.enabling import POLICIES, Handle, disable, enable, graph_rewrite
from kmp.policy.layer_rollback import guard
from kmp.policy.model_optimizers import all_optimizers_of
from kmp.policy.optimizer_wrapping import rewrap, settings_call, wrap

__all__ = [
    "POLICIES",
    "Handle",
    "all_optimizers_of",
    "disable",
    "enable",
    "graph_rewrite",
    "guard",
    "guarded_training",
    "rewrap",
    "rounded_indices",
    "settings_call",
    "wrap",
]
