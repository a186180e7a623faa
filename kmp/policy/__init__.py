"""`enable`, `disable` and `wrap`, and what they change in Keras."""

from kmp.policy import exact_indices as exact_indices
from kmp.policy.active_settings import POLICIES as POLICIES
from kmp.policy.enabling import Handle, disable, enable, graph_rewrite
from kmp.policy.gpu_support import Gpu, gpus
from kmp.policy.optimizers import rewrap as rewrap
from kmp.policy.optimizers import wrap

__all__ = ["Gpu", "Handle", "disable", "enable", "gpus", "graph_rewrite", "wrap"]
