"""`enable`, `disable`, `wrap` and `guard`. Only this package keeps patches of Keras in place."""

from kmp.policy import guarding, rounded_indices
from kmp.policy.enabling import POLICIES, Handle, disable, enable, graph_rewrite
from kmp.policy.guarding import guard
from kmp.policy.hardware_support import Gpu, Hardware, hardware
from kmp.policy.optimizers import all_optimizers_of, rewrap, settings_call, wrap

__all__ = [
    "POLICIES",
    "Gpu",
    "Handle",
    "Hardware",
    "all_optimizers_of",
    "disable",
    "enable",
    "graph_rewrite",
    "guard",
    "guarding",
    "hardware",
    "rewrap",
    "rounded_indices",
    "settings_call",
    "wrap",
]
