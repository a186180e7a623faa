"""Plots over the training steps: of the loss scale, and of a metric of one run or several."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes

from kmp.plots import style
from kmp.records import Run
from kmp.records.run import RUN_EXPECTED
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
    """Draws the loss scale over the steps, with marks of skipped steps.

    Dotted lines mark the steps in which layers were set to float32.

    Args:
        run: A run with `loss_scale` and, for the marks, `overflow_rate`, `overflow_count` and
            `fallback`.
        ax: Axes to draw on; new ones by default.

    Returns:
        The axes: training steps along x, the loss scale along y on a log2 axis.

    Example:
    >>> import kmp
    >>> from kmp.records import Record, Run
    >>> run = Run([Record(step=1, loss_scale=8.0), Record(step=2, loss_scale=16.0)])
    >>> kmp.plots.loss_scale(run).get_title(loc="left")
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
    (line,) = ax.plot(steps, scales, drawstyle="steps-post", label=label)
    line.set(color=style.DARK, marker="o" if steps.size == 1 else "")

    # Skipped steps.
    marks = _skipped_steps(run, steps, scales)
    marks = marks[:: len(marks) // _MOST_MARKS + 1]  # more would cover each other
    if marks.size:
        label = "last skipped step of each record"
        count = run.last("overflow_count")
        if count is not None:
            label += f" ({count:,} in total)"
        size = 6 if len(marks) <= _MANY_MARKS else 3
        ax.plot(*marks.T, "x", color=style.MIDDLE, markersize=size, label=label, zorder=3)

    # Layers set to float32.
    fallbacks = [row.step for row in run.rows if row.fallback]
    if fallbacks:
        lines = ax.vlines(fallbacks, 0, 1, transform=ax.get_xaxis_transform())
        lines.set(color=style.DARK_LIGHT, linestyle="dotted", label="layers set to float32")

    ax.set_yscale("log", base=2)
    # A margin of two bits gives the axis several ticks even if the line is flat.
    highest = max(scales.max(), marks[:, 1].max(initial=0))
    ax.set_ylim(scales.min() / 4, highest * 4)
    style.label_steps(ax, steps)
    style.legend_above(ax, title=_scale_title(run, scales[-1]))
    return ax


def _scale_title(run: Run, scale: float) -> str:
    title = f"The loss scale ends at {style.scale_name(scale)}"
    count = run.last("overflow_count")
    if count is None:
        return title
    last = max(row.step for row in run.rows)
    verb = "was" if count == 1 else "were"
    return f"{title}; {count:,} of {last:,} steps {verb} skipped"


def _skipped_steps(run: Run, scale_steps: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the last skipped step of each record with any, and the loss scale of that step.

    A record has the number of skipped steps since the record before, and of the steps since the
    last of them or since the scale grew. Where it cannot have grown since, that is the step, and
    the scale was that before it backed off. Elsewhere they are the step and the scale of the
    record.

    Returns:
        An array of shape `(records, 2)`.
    """
    settings = run.settings
    growth_interval = settings.growth_interval or np.inf
    lowest = settings.min_scale or 0.0
    backs_off_at_once = settings.hysteresis == 1
    backoff = 1.0 if settings.rule == "FixedScale" else settings.backoff_factor
    clean = dict(zip(*_by_step(run, "clean_steps"), strict=True))
    losses = dict(zip(*_by_step(run, "nonfinite_loss_count"), strict=True))

    steps, rates = _by_step(run, "overflow_rate")
    has_skipped = rates > 0
    previous_steps, skipped = np.append(0, steps[:-1])[has_skipped], steps[has_skipped]
    indices = np.searchsorted(scale_steps, skipped, side="right") - 1
    scales_then = scales[np.maximum(indices, 0)]
    marks = []
    for previous, step, scale in zip(previous_steps, skipped, scales_then, strict=True):
        cannot_have_grown = clean.get(step, np.inf) < step - previous < growth_interval
        same_losses = losses.get(step, 0) == losses.get(previous, 0)
        has_backed_off = backs_off_at_once and same_losses and scale > lowest
        if cannot_have_grown and has_backed_off:
            marks.append((step - clean[step], scale / backoff))
        else:
            marks.append((step, scale))
    return np.reshape(marks, (-1, 2))


def _by_step(run: Run, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps and the finite values of `key`, ordered by step.

    A run that was resumed from a checkpoint contains some steps twice: the newest value is taken.
    """
    steps, values = run.series(key)
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order].astype(np.float64), values[order].astype(np.float64)
    is_newest = np.diff(steps, append=np.inf) > 0
    is_shown = is_newest & np.isfinite(values)
    return steps[is_shown], values[is_shown]


def metric(runs: Mapping[str, Run], name: str, ax: Axes | None = None) -> Axes:
    """Draws a metric of several runs over the training steps.

    Args:
        runs: The runs by name.
        name: The name of the metric in Keras' `logs`, such as `"val_accuracy"`.
        ax: Axes to draw on; new ones by default.

    Returns:
        The axes: training steps along x, the metric at the end of each epoch along y.

    Example:
    >>> import kmp
    >>> from kmp.records import Record, Run
    >>> run = Run([Record(step=10, epoch=0, metrics={"val_accuracy": 0.5})])
    >>> kmp.plots.metric({"float16": run}, "val_accuracy").get_title(loc="left")
    'val_accuracy at the end: 0.5'
    """
    validation.instance("runs", runs, Mapping, "a dictionary of runs by name")
    validation.instance("name", name, str, "the name of a metric")
    for run_name, run in runs.items():
        validation.instance(f"runs[{run_name!r}]", run, Run, RUN_EXPECTED)
    series = {run_name: run.metrics[name] for run_name, run in runs.items() if name in run.metrics}
    shown = style.literal(name)
    if not series:
        ax = style.axes(ax, "", "training step", shown)
        return style.empty(ax, f"No {shown} was recorded.")
    last = ", ".join(f"{values[-1]:.3g}" for _, values in series.values())
    ax = style.axes(ax, f"{shown} at the end: {last}", "training step", shown)
    for number, (run_name, (steps, values)) in enumerate(series.items()):
        color, linestyle, marker = _LINES[number % len(_LINES)]
        is_finite = np.isfinite(values)
        (line,) = ax.plot(steps[is_finite], values[is_finite], label=style.literal(run_name))
        line.set(color=color, linestyle=linestyle, marker=marker, markersize=3.5)
    all_steps = np.concatenate([steps for steps, _ in series.values()])
    style.label_steps(ax, np.unique(all_steps))
    if len(runs) > 1:
        style.legend_above(ax, columns=2)
    return ax
