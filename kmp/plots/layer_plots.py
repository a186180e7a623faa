"""Plots with a row for each layer or variable: errors of outputs, and overflows of gradients."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from kmp.diagnosis.soundness import error_origin, output_limit
from kmp.plots import style
from kmp.records import Run
from kmp.records.replay import LayerError
from kmp.records.run import RUN_EXPECTED
from kmp.utils import validation
from kmp.utils.float_formats import FLOAT16, FLOAT32

_LOWEST = 1e-6  # smaller errors, such as those of float32 layers, are drawn at the edge
_MOST_NAMES = 14
_MANY_LAYERS = 40
_LAYER_LENGTH, _VARIABLE_LENGTH, _TITLE_LENGTH = 20, 38, 30  # of names, in characters


def layer_errors(run: Run, ax: Axes | None = None) -> Axes:
    """Draws how far the outputs of each layer are from those in float32.

    Shows the last comparison of the run. An error passes through the layers after the one where it
    begins. The new error is the part that a layer adds: that of its outputs if its inputs are those
    of float32.

    Args:
        run: A run with `replay`, whose newest one with finite passes is drawn.
        ax: Axes to draw on; new ones by default.

    Returns:
        The axes: layers along y in the order of their calls, with the first at the top; along x, on
        a log axis, the error relative to how the outputs vary between examples. Errors below 1e-6
        are drawn at 1e-6.

    Example:
    >>> import kmp
    >>> from kmp.records import Record, Replay, Run
    >>> from kmp.records.replay import Comparison, LayerError
    >>> errors = [LayerError("net/first", 1.5, 1.5), LayerError("net/last", 1.2, 0.001)]
    >>> found = Comparison(output_error=1.2, layers=errors)
    >>> replay = Replay(32, 2.0**15, 1.0, 1.0, True, True, comparison=found)
    >>> run = Run([Record(step=9, replay=replay)])
    >>> kmp.plots.layer_errors(run).get_title(loc="left")
    'Harmful error begins at net/first'
    """
    validation.instance("run", run, Run, RUN_EXPECTED)
    title = "Difference from float32 by layer"
    ax = style.axes(ax, title, "relative error of outputs", "layer, first to last")
    comparisons = run.comparisons
    if run.format is FLOAT32:
        return style.empty(ax, "The run computed in float32.")
    if not comparisons or not comparisons[-1][1].layer_errors:
        return style.empty(ax, "No batch was compared with float32.")
    step, replay = comparisons[-1]
    errors, origin = replay.layer_errors, error_origin(replay, run.format)
    outputs = np.maximum([each.error for each in errors], _LOWEST)
    # A layer without float32 inputs to compare with has no new error.
    new_errors = [math.nan if each.new_error is None else each.new_error for each in errors]
    added = np.maximum(new_errors, _LOWEST)

    _draw_errors(ax, outputs, added, output_limit(run.format))
    if origin is None:
        title = f"The model's outputs differ by {replay.output_error:.2g}"
        _name_layers(ax, errors, 0)
    else:
        row = errors.index(origin)
        circle = ax.scatter(added[row], row, 110, label="begins here", zorder=3)
        circle.set(facecolors="none", edgecolors=style.MIDDLE)
        (name,) = style.short_names([origin.layer], _LAYER_LENGTH)
        title = f"Harmful error begins at {name}"
        _name_layers(ax, errors, row)
    ax.set_xlabel(f"relative error of outputs in step {step}")
    ax.set_ylim(len(errors) - 0.5, -0.5)
    ax.set_xscale("log")
    ax.set_xlim(_LOWEST, 2 * max(1.0, outputs.max(), np.nanmax(added, initial=0.0)))
    style.legend_above(ax, columns=2, title=title)
    return ax


def _draw_errors(ax: Axes, outputs: np.ndarray, added: np.ndarray, highest: float) -> None:
    """Draws the errors, the part that each layer adds, and the limit."""
    size = 5 if len(outputs) <= _MANY_LAYERS else 3
    rows = np.arange(len(outputs))
    (line,) = ax.plot(outputs, rows, "o-", label="outputs", clip_on=False)
    line.set(color=style.DARK, markersize=size, linewidth=1)
    if not np.isnan(added).all():
        (marks,) = ax.plot(added, rows, "x", label="new error of the layer", clip_on=False)
        marks.set(color=style.MIDDLE, markersize=size + 1)
    limit = ax.axvline(highest, label=f"limit, {highest:g}")
    limit.set(color=style.DARK_LIGHT, linestyle="--")


def _name_layers(ax: Axes, errors: Sequence[LayerError], row: int) -> None:
    """Writes as many names of layers as fit, evenly spaced, with that of `row`."""
    stride = math.ceil(len(errors) / _MOST_NAMES)
    named = range(row % stride, len(errors), stride)
    names = [errors[index].layer for index in named]
    ax.set_yticks(named, style.short_names(names, _LAYER_LENGTH))
    if len(named) < len(errors):
        ax.set_ylabel(f"layer, first to last of {len(errors)}")


class _Overflows(NamedTuple):
    """In how many steps a variable was the overflow origin, and its gradient not finite."""

    origin: int
    nonfinite: int


def overflowing_variables(run: Run, ax: Axes | None = None, top: int = 10) -> Axes:
    """Draws how often each variable overflowed, and how often it was the overflow origin.

    A variable overflowed if its gradient was NaN or Inf, in any number format. An overflow spreads
    to all variables nearer the input. Its origin is the variable where it began.

    Args:
        run: A run with `overflows_by_variable` and `overflow_origins_by_variable`. The newest
            records are drawn.
        ax: Axes to draw on; new ones by default.
        top: Number of variables to draw. They are ordered by how often they were the overflow
            origin, then by how often their gradient was not finite.

    Returns:
        The axes: variables along y, with the worst at the top; number of training steps since the
        start along x.

    Raises:
        ValueError: If `top` is not positive.

    Example:
    >>> import kmp
    >>> from kmp.records import Record, Run
    >>> counts = {"overflows_by_variable": {"dense/kernel": 4, "dense/bias": 4}}
    >>> run = Run([Record(step=9, overflow_origins_by_variable={"dense/bias": 4}, **counts)])
    >>> axes = kmp.plots.overflowing_variables(run)
    >>> [label.get_text() for label in axes.get_yticklabels()]
    ['dense/bias', 'dense/kernel']
    """
    validation.instance("run", run, Run, RUN_EXPECTED)
    top = validation.positive_integer("top", top)
    is_float16 = run.format is FLOAT16
    title = "Variables that overflowed" if is_float16 else "Variables with NaN or Inf gradients"
    ax = style.axes(ax, title, "training steps", "variable")
    overflows = run.last("overflows_by_variable")
    origins = run.last("overflow_origins_by_variable")
    if overflows is None and origins is None:
        what = "Overflows" if is_float16 else "NaN and Inf"
        return style.empty(ax, f"{what} were not counted by variable.")
    counts = _worst_first(overflows or {}, origins or {})
    if not counts:
        return style.empty(ax, "No overflow." if is_float16 else "No gradient was NaN or Inf.")
    if len(counts) > top:
        ax.set_ylabel(f"variable (the worst {top} of {len(counts)})")
    shown = dict(list(counts.items())[:top])
    _draw_bars(ax, shown, "overflow origin" if is_float16 else "origin")

    path, worst = next(iter(shown.items()))
    if worst.origin:
        (name,) = style.short_names([path], _TITLE_LENGTH)
        total = sum(count.origin for count in counts.values())
        # In two lines: long names of variables leave little width for the axes.
        what = "overflows" if is_float16 else "NaN or Inf gradients"
        title = f"{worst.origin:,} of {total:,} {what} begin at\n{name}"
    style.legend_above(ax, title=title)
    return ax


def _worst_first(overflows: dict[str, int], origins: dict[str, int]) -> dict[str, _Overflows]:
    """Returns the counts of each variable that overflowed, by its path, the worst first."""
    counts = {}
    for path in [*overflows, *origins]:
        count = _Overflows(origins.get(path, 0), overflows.get(path, 0))
        if any(count):
            counts[path] = count
    return dict(sorted(counts.items(), key=lambda item: item[1], reverse=True))


def _draw_bars(ax: Axes, counts: dict[str, _Overflows], name_of_origin: str) -> None:
    positions = np.arange(len(counts))
    height = 0.7 * min(1, len(counts) / 4)
    nonfinite = [max(count) for count in counts.values()]
    origin = [count.origin for count in counts.values()]
    for bar in ax.barh(positions, nonfinite, height, label="gradient not finite"):
        bar.set(facecolor="0.85", edgecolor="0.4", linewidth=0.8)
    for bar in ax.barh(positions, origin, height, label=name_of_origin):
        bar.set(facecolor=style.DARK, edgecolor="white", linewidth=0, hatch="//")
    ax.set_yticks(positions, style.short_names(list(counts), _VARIABLE_LENGTH))
    ax.set_ylim(len(counts) - 0.4, -0.6)
    ax.set_xlim(0, max(nonfinite) * 1.05)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
