"""`enable`, `disable` and `wrap`, and what they change in Keras."""

from kmp.enabling.gpu_support import Gpu, gpus
from kmp.enabling.handle import Handle, disable, enable, graph_rewrite
from kmp.enabling.optimizers import wrap

__all__ = ["Gpu", "Handle", "disable", "enable", "gpus", "graph_rewrite", "wrap"]
