"""How many kernels a GPU runs for a step, and how many bytes they move, counted without a GPU.

`kmp.audit` and the benchmark use it; no training does.
"""

from kmp.traffic.graph_traffic import Traffic, traffic_of
from kmp.traffic.operation_costs import Cost

__all__ = ["Cost", "Traffic", "traffic_of"]
