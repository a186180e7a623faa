"""A plot of a metric over the epochs, for one run or several."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes

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
    shown, last = style.literal(name), ", ".join(f"{values[-1]:.3g}" for _, values in series.values())
    ax = style.label(style.axes(ax), f"{shown} at the end: {last}" * bool(series), "training step", shown)
    if not series:
        return style.empty(ax, f"No {shown} was recorded.")
    for number, (run_name, (steps, values)) in enumerate(series.items()):
        color, linestyle, marker = _LINES[number % len(_LINES)]
        is_finite = np.isfinite(values)
        (line,) = ax.plot(steps[is_finite], values[is_finite], color=color, label=style.literal(run_name))
        line.set(linestyle=linestyle, marker=marker, markersize=3.5)
    style.label_steps(ax, np.unique(np.concatenate([steps for steps, _ in series.values()])))
    if len(runs) > 1:
        style.legend_above(ax, columns=2)
    return ax
