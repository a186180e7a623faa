"""Plots of a run. Each function draws on the axes that it is given and returns them.

Imports matplotlib. `import kmp` does not import it; `kmp.plots` is imported on first use.
"""

from kmp.plots import style as style
from kmp.plots.gradient_plots import exponents_over_steps, gradient_exponents
from kmp.plots.layer_error_plot import layer_errors
from kmp.plots.loss_scale_plot import loss_scale
from kmp.plots.metric_plot import metric
from kmp.plots.overflow_plot import overflowing_variables
from kmp.plots.saving import save
from kmp.plots.what_if_plot import what_if

__all__ = [
    "exponents_over_steps",
    "gradient_exponents",
    "layer_errors",
    "loss_scale",
    "metric",
    "overflowing_variables",
    "save",
    "what_if",
]
