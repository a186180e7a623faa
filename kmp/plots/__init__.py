"""Plots of a run. Each function draws on the axes that it is given and returns them.

Imports matplotlib. `import kmp` does not import it; `kmp.plots` is imported on first use.
"""

from kmp.plots.gradient_plots import exponents_over_steps, gradient_exponents
from kmp.plots.layer_plots import layer_errors, overflowing_variables
from kmp.plots.step_plots import loss_scale, metric
from kmp.plots.style import save
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
