"""Plots with a row for each layer or variable: errors of outputs, and how often gradients overflowed."""

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from kmp.diagnosis.soundness import error_origin
from kmp.diagnosis.thresholds import HARMFUL_OUTPUT_ERROR
from kmp.plots import style
from kmp.records import RUN_EXPECTED, Run
from kmp.utils import validation

_LOWEST = 1e-6  # smaller errors, such as those of float32 layers, are drawn at the edge
_MOST_NAMES = 14
_MANY_LAYERS = 40
_LAYER_LENGTH, _VARIABLE_LENGTH, _TITLE_LENGTH = 20, 38, 30  # of names, in characters


def layer_errors(run: Run, ax: Axes | None = None) -> Axes:
    """Draws how far the outputs of each layer are from those in float32, in the last comparison of the run.

    An error passes through the layers after the one where it begins. The new error is the part that
    a layer adds: that of its outputs if its inputs are those of float32.

    Args:
        run: A run with `replay`, whose newest one with finite passes is drawn.
        ax: Axes to draw on; new ones by default.

    Returns:
        The axes: layers along y in the order of their calls, with the first at the top; along x, on
        a log axis, the error relative to how the outputs vary between examples. Errors below 1e-6
        are drawn at 1e-6.

    Example:
    >>> from kmp.records.replay import Comparison, LayerError, Replay
    >>> errors = [LayerError("net/first", 1.5, 1.5), LayerError("net/last", 1.2, 0.001)]
    >>> found = Comparison(output_error=1.2, layers=errors)
    >>> replay = Replay(32, 2.0**15, 1.0, 1.0, True, True, comparison=found)
    >>> layer_errors(Run([{"step": 9, "replay": replay}])).get_title(loc="left")
    'Harmful error begins at net/first'
    """
    validation.instance("run", run, Run, RUN_EXPECTED)
    ax = style.axes(
        ax, "Difference from float32 by layer", "relative error of outputs", "layer, first to last"
    )
    comparisons = run.comparisons
    if not comparisons or not comparisons[-1][1].layer_errors:
        return style.empty(ax, "No batch was compared with float32.")
    step, replay = comparisons[-1]
    errors, origin = replay.layer_errors, error_origin(replay)

    # The errors, the limit, and the layer where a harmful error begins.
    size = 5 if len(errors) <= _MANY_LAYERS else 3
    outputs = np.maximum([each.error for each in errors], _LOWEST)
    added = np.array(
        [np.nan if each.new_error is None else max(each.new_error, _LOWEST) for each in errors]
    )
    rows = np.arange(len(errors))
    ax.plot(
        outputs,
        rows,
        "o-",
        color=style.DARK,
        markersize=size,
        linewidth=1,
        label="outputs",
        clip_on=False,
    )
    ax.plot(
        added,
        rows,
        "x",
        color=style.MIDDLE,
        markersize=size + 1,
        label="new error of the layer",
        clip_on=False,
    )
    ax.axvline(
        HARMFUL_OUTPUT_ERROR,
        color=style.DARK_LIGHT,
        linestyle="--",
        label=f"limit, {HARMFUL_OUTPUT_ERROR:g}",
    )
    title, row = f"The model's outputs differ by {replay.output_error:.2g}", None
    if origin is not None:
        row = errors.index(origin)
        ax.scatter(
            added[row],
            row,
            110,
            facecolors="none",
            edgecolors=style.MIDDLE,
            label="begins here",
            zorder=3,
        )
        (name,) = style.short_names([origin.layer], _LAYER_LENGTH)
        title = f"Harmful error begins at {name}"

    # As many names as fit, evenly spaced, with that of the layer where the error begins.
    ax.set_xlabel(f"relative error of outputs in step {step}")
    stride = math.ceil(len(errors) / _MOST_NAMES)
    named = range((row or 0) % stride, len(errors), stride)
    ax.set_yticks(named, style.short_names([errors[index].layer for index in named], _LAYER_LENGTH))
    if len(named) < len(errors):
        ax.set_ylabel(f"layer, first to last of {len(errors)}")
    ax.set_ylim(len(errors) - 0.5, -0.5)
    ax.set_xscale("log")
    ax.set_xlim(_LOWEST, 2 * max(1.0, outputs.max(), np.nanmax(added, initial=0.0)))
    style.legend_above(ax, columns=2, title=title)
    return ax


def overflowing_variables(run: Run, ax: Axes | None = None, top: int = 10) -> Axes:
    """Draws how often each variable's gradient was not finite, and how often it was the overflow origin.

    An overflow spreads to all variables nearer the input. Its origin is the variable where it
    began.

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
    >>> counts = {"overflows_by_variable": {"dense/kernel": 4, "dense/bias": 4}}
    >>> run = Run([{"step": 9, "overflow_origins_by_variable": {"dense/bias": 4}} | counts])
    >>> [label.get_text() for label in overflowing_variables(run).get_yticklabels()]
    ['dense/bias', 'dense/kernel']
    """
    validation.instance("run", run, Run, RUN_EXPECTED)
    top = validation.positive_integer("top", top)
    ax = style.axes(ax, "Variables that overflowed", "training steps", "variable")
    overflows, origins = (
        run.last(key) for key in ("overflows_by_variable", "overflow_origins_by_variable")
    )
    if overflows is None and origins is None:
        return style.empty(ax, "Overflows were not counted by variable.")
    overflows, origins = overflows or {}, origins or {}
    # By path: the steps in which it was the origin, and those in which its gradient was not finite.
    counts = {
        path: (origins.get(path, 0), overflows.get(path, 0)) for path in {**overflows, **origins}
    }
    paths = sorted(
        (path for path in counts if any(counts[path])), key=lambda path: counts[path], reverse=True
    )
    if not paths:
        return style.empty(ax, "No overflow.")
    if len(paths) > top:
        ax.set_ylabel(f"variable (the worst {top} of {len(paths)})")

    shown, height = paths[:top], 0.7 * min(1, min(len(paths), top) / 4)
    nonfinite, origin = [max(counts[path]) for path in shown], [counts[path][0] for path in shown]
    positions = np.arange(len(shown))
    ax.barh(
        positions,
        nonfinite,
        height,
        color="0.85",
        edgecolor="0.4",
        linewidth=0.8,
        label="gradient not finite",
    )
    bars = ax.barh(
        positions, origin, height, color=style.DARK, linewidth=0, label="overflow origin"
    )
    for bar in bars:
        bar.set(edgecolor="white", hatch="//")
    ax.set_yticks(positions, style.short_names(shown, _VARIABLE_LENGTH))
    ax.set_ylim(len(shown) - 0.4, -0.6)
    ax.set_xlim(0, max(nonfinite) * 1.05)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    title = None
    if origin[0]:
        (name,) = style.short_names(shown[:1], _TITLE_LENGTH)
        # In two lines: long names of variables leave little width for the axes.
        title = f"{origin[0]:,} of {sum(origins.values()):,} overflows begin at\n{name}"
    style.legend_above(ax, title=title)
    return ax
