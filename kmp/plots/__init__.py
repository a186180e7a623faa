"""Plots of a run. Each function draws on the axes that it is given and returns them.

Imports matplotlib. `import kmp` does not import it; `kmp.plots` is imported on first use.
"""

from kmp.plots import style as style
from kmp.plots.gradient_heat_map import exponents_over_steps
from kmp.plots.gradient_histogram_plot import gradient_exponents
from kmp.plots.loss_scale_plots import loss_scale, what_if
from kmp.plots.metric_plot import metric
from kmp.plots.overflow_plots import overflowing_variables
from kmp.plots.saving import save

__all__ = [
    "exponents_over_steps",
    "gradient_exponents",
    "loss_scale",
    "metric",
    "overflowing_variables",
    "save",
    "what_if",
]
