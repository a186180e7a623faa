"""`enable`, `disable`, `wrap` and `guard`. Only this package keeps patches of Keras in place."""

from kmp.policy import exact_indices, guarding
from kmp.policy.enabling import POLICIES, Handle, disable, enable, graph_rewrite
from kmp.policy.guarding import guard
from kmp.policy.hardware_support import Gpu, Hardware, hardware, xla_error
from kmp.policy.optimizers import all_optimizers_of, rewrap, settings_call, wrap

__all__ = [
    "POLICIES",
    "Gpu",
    "Handle",
    "Hardware",
    "all_optimizers_of",
    "disable",
    "enable",
    "exact_indices",
    "graph_rewrite",
    "guard",
    "guarding",
    "hardware",
    "rewrap",
    "settings_call",
    "wrap",
    "xla_error",
]
