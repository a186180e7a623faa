"""Plots over the training steps: of the loss scale, and of a metric of one run or several."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes

from kmp.plots import style
from kmp.records import RUN_EXPECTED, Run
from kmp.utils import validation

_MANY_MARKS = 60
_MOST_MARKS = 2000
_LINES = (
    (style.DARK, "-", "o"),
    (style.MIDDLE, "--", "s"),
    (style.DARK_LIGHT, "-.", "^"),
    ("0.35", ":", "D"),
)


def loss_scale(run: Run, ax: Axes | None = None) -> Axes:
    """Draws the loss scale over the steps, with a mark where steps were skipped or layers were set to float32.

    Args:
        run: A run with `loss_scale` and, for the marks, `overflow_rate`, `overflow_count` and
            `fallback`.
        ax: Axes to draw on; new ones by default.

    Returns:
        The axes: training steps along x, the loss scale along y on a log2 axis.

    Example:
    >>> loss_scale(Run([{"step": 1, "loss_scale": 8.0}, {"step": 2, "loss_scale": 16.0}])).get_title(loc="left")
    'The loss scale ends at $2^{4}$'
    """
    validation.instance("run", run, Run, RUN_EXPECTED)
    ax = style.axes(ax, "Loss scale", "training step", "loss scale")
    steps, scales = _by_step(run, "loss_scale")
    if not steps.size:
        return style.empty(ax, "No loss scale was recorded.")
    label = "loss scale"
    if steps.size > 1 and np.ptp(scales) == 0:
        label += f", {style.scale_name(scales[0])} throughout"
    marker = "o" if steps.size == 1 else ""
    ax.plot(steps, scales, drawstyle="steps-post", marker=marker, color=style.DARK, label=label)
    title, label = (
        f"The loss scale ends at {style.scale_name(scales[-1])}",
        "last skipped step of each record",
    )
    if (count := run.last("overflow_count")) is not None:
        last = max(row["step"] for row in run.rows)
        title += f"; {count:,} of {last:,} steps {'was' if count == 1 else 'were'} skipped"
        label += f" ({count:,} in total)"
    marks = _skipped_steps(run, steps, scales)
    marks = marks[:: len(marks) // _MOST_MARKS + 1]  # more would cover each other
    if marks.size:
        size = 6 if len(marks) <= _MANY_MARKS else 3
        ax.plot(*marks.T, "x", color=style.MIDDLE, markersize=size, label=label, zorder=3)
    if fallbacks := [row["step"] for row in run.rows if row.get("fallback")]:
        lines = {
            "colors": style.DARK_LIGHT,
            "linestyles": "dotted",
            "label": "layers set to float32",
        }
        ax.vlines(fallbacks, 0, 1, transform=ax.get_xaxis_transform(), **lines)
    ax.set_yscale("log", base=2)
    # A margin of two bits gives the axis several ticks even if the line is flat.
    ax.set_ylim(scales.min() / 4, max(scales.max(), marks[:, 1].max(initial=0)) * 4)
    style.label_steps(ax, steps)
    style.legend_above(ax, title=title)
    return ax


def _skipped_steps(run: Run, scale_steps: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the last skipped step of each record with any, and the loss scale of that step; shape `(records, 2)`.

    A record has the number of skipped steps since the record before, and of the steps since the
    last of them or since the scale grew. Where it cannot have grown since, that is the step, and
    the scale was that before it backed off. Elsewhere they are the step and the scale of the
    record.
    """
    settings = run.settings
    growth_interval, lowest = (
        settings.get("growth_interval", np.inf),
        settings.get("min_scale", 0.0),
    )
    backoff = 1.0 if settings.get("rule") == "FixedScale" else settings.get("backoff_factor", 0.5)
    steps, rates = _by_step(run, "overflow_rate")
    clean, losses = (
        dict(zip(*_by_step(run, key), strict=True))
        for key in ("clean_steps", "nonfinite_loss_count")
    )
    marks = []
    for previous, step in zip(np.append(0, steps[:-1])[rates > 0], steps[rates > 0], strict=True):
        scale = scales[max(np.searchsorted(scale_steps, step, side="right") - 1, 0)]
        is_known = (
            clean.get(step, np.inf) < step - previous < growth_interval
            and settings.get("hysteresis", 1) == 1
            and losses.get(step, 0) == losses.get(previous, 0)
            and scale > lowest
        )
        marks.append((step - clean[step], scale / backoff) if is_known else (step, scale))
    return np.reshape(marks, (-1, 2))


def _by_step(run: Run, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps and the finite values of `key`, ordered by step, with the newest value of each step.

    A run that was resumed from a checkpoint contains some steps twice.
    """
    newest = dict(zip(*run.series(key), strict=True))
    finite = np.array(
        sorted((step, value) for step, value in newest.items() if np.isfinite(value)), np.float64
    )
    return finite.reshape(-1, 2)[:, 0], finite.reshape(-1, 2)[:, 1]


def metric(runs: Mapping[str, Run], name: str, ax: Axes | None = None) -> Axes:
    """Draws a metric of several runs over the training steps.

    Args:
        runs: The runs by name.
        name: The name of the metric in Keras' `logs`, such as `"val_accuracy"`.
        ax: Axes to draw on; new ones by default.

    Returns:
        The axes: training steps along x, the metric at the end of each epoch along y.

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
    shown, last = (
        style.literal(name),
        ", ".join(f"{values[-1]:.3g}" for _, values in series.values()),
    )
    ax = style.axes(ax, f"{shown} at the end: {last}" * bool(series), "training step", shown)
    if not series:
        return style.empty(ax, f"No {shown} was recorded.")
    for number, (run_name, (steps, values)) in enumerate(series.items()):
        color, linestyle, marker = _LINES[number % len(_LINES)]
        is_finite = np.isfinite(values)
        (line,) = ax.plot(
            steps[is_finite], values[is_finite], color=color, label=style.literal(run_name)
        )
        line.set(linestyle=linestyle, marker=marker, markersize=3.5)
    style.label_steps(ax, np.unique(np.concatenate([steps for steps, _ in series.values()])))
    if len(runs) > 1:
        style.legend_above(ax, columns=2)
    return ax
