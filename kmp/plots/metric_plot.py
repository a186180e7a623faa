"""A plot of a metric over the epochs, for one run or several."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from kmp.plots import style
from kmp.records import RUN_EXPECTED, Run
from kmp.utils import validation

_LINES = ((style.DARK, "-", "o"), (style.MIDDLE, "--", "s"), (style.DARK_LIGHT, "-.", "^"), ("0.35", ":", "D"))


def metric(runs: Mapping[str, Run], name: str, ax: Axes | None = None) -> Axes:
    """Draws a metric of several runs over the training steps.

    Args:
        runs: The runs by name.
        name: The name of the metric in Keras' `logs`, such as `"val_accuracy"`.
        ax: Axes to draw on; new ones by default.

    Returns:
        The axes: training steps along x, the metric at the end of each epoch along y.

    Raises:
        TypeError: If `runs` is not a dictionary of runs, or `name` is not a string.

    Example:
    >>> run = Run([{"step": 10, "epoch": 0, "metrics": {"val_accuracy": 0.5}}])
    >>> metric({"float16": run}, "val_accuracy").get_title(loc="left")
    'val_accuracy at the end: 0.5'
    """
    validation.instance("runs", runs, Mapping, "a dictionary of runs by name")
    validation.instance("name", name, str, "the name of a metric")
    for run_name, run in runs.items():
        validation.instance(f"runs[{run_name!r}]", run, Run, RUN_EXPECTED)
    series = {run_name: run.metrics[name] for run_name, run in runs.items() if name in run.metrics}
    last = ", ".join(f"{values[-1]:.3g}" for _, values in series.values())
    ax = style.label(
        style.axes(ax), f"{style.literal(name)} at the end: {last}" * bool(series), "training step", style.literal(name)
    )
    if not series:
        return style.empty(ax, f"No {style.literal(name)} was recorded.")
    for number, (run_name, (steps, values)) in enumerate(series.items()):
        color, line, marker = _LINES[number % len(_LINES)]
        is_finite = np.isfinite(values)
        ax.plot(steps[is_finite], values[is_finite], color=color, linestyle=line, marker=marker, markersize=3.5)
        ax.plot([], [], color=color, linestyle=line, marker=marker, markersize=3.5, label=style.literal(run_name))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
    if len(runs) > 1:
        style.legend_above(ax, columns=2)
    return ax
