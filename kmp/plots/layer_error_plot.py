"""A plot of what the precision of the model changes in the outputs of each layer."""

import math

import numpy as np
from matplotlib.axes import Axes

from kmp.plots import style
from kmp.records import HARMFUL_OUTPUT_ERROR, RUN_EXPECTED, Run
from kmp.utils import validation

_LOWEST = 1e-6  # smaller errors, such as those of float32 layers, are drawn at the edge
_MOST_NAMES = 14
_MANY_LAYERS = 40
_NAME_LENGTH = 20


def layer_errors(run: Run, ax: Axes | None = None) -> Axes:
    """Draws how far the outputs of each layer are from those in float32, in the last comparison of the run.

    An error passes through the layers after the one where it begins. The new error is the part that a layer adds: that
    of its outputs if its inputs are those of float32.

    Args:
        run: A run with `replay`, whose newest one with finite passes is drawn.
        ax: Axes to draw on; new ones by default.

    Returns:
        The axes: layers along y in the order of their calls, with the first at the top; along x, on a log axis, the
        error relative to how the outputs vary between examples. Errors below 1e-6 are drawn at 1e-6.

    Raises:
        TypeError: If `run` is not a `kmp.records.Run`.

    Example:
    >>> from kmp.records import LayerError, Replay
    >>> errors = [LayerError("net/first", 1.5, 1.5), LayerError("net/last", 1.2, 0.001)]
    >>> replay = Replay(32, 2.0**15, 1.0, 1.0, True, True, output_error=1.2, layer_errors=errors)
    >>> layer_errors(Run([{"step": 9, "replay": replay}])).get_title(loc="left")
    'Harmful error begins at net/first'
    """
    validation.instance("run", run, Run, RUN_EXPECTED)
    ax = style.label(
        style.axes(ax), "Difference from float32 by layer", "relative error of outputs", "layer, first to last"
    )
    comparisons = run.comparisons
    if not comparisons or not comparisons[-1][1].layer_errors:
        return style.empty(ax, "No batch was compared with float32.")
    step, replay = comparisons[-1]
    errors, origin = replay.layer_errors, replay.error_origin

    # The errors, the limit, and the layer where a harmful error begins.
    size = 5 if len(errors) <= _MANY_LAYERS else 3
    outputs = np.maximum([each.error for each in errors], _LOWEST)
    added = np.array([np.nan if each.new_error is None else max(each.new_error, _LOWEST) for each in errors])
    rows = np.arange(len(errors))
    ax.plot(outputs, rows, "o-", color=style.DARK, markersize=size, linewidth=1, label="outputs", clip_on=False)
    ax.plot(added, rows, "x", color=style.MIDDLE, markersize=size + 1, label="new error of the layer", clip_on=False)
    ax.axvline(HARMFUL_OUTPUT_ERROR, color=style.DARK_LIGHT, linestyle="--", label=f"limit, {HARMFUL_OUTPUT_ERROR:g}")
    title, row = f"The model's outputs differ by {replay.output_error:.2g}", None
    if origin is not None:
        row = errors.index(origin)
        ax.scatter(added[row], row, 110, facecolors="none", edgecolors=style.MIDDLE, label="begins here", zorder=3)
        (name,) = style.short_names([origin.layer], _NAME_LENGTH)
        title = f"Harmful error begins at {name}"

    # As many names as fit, evenly spaced, with that of the layer where the error begins.
    ax.set_xlabel(f"relative error of outputs in step {step}")
    stride = math.ceil(len(errors) / _MOST_NAMES)
    named = range((row or 0) % stride, len(errors), stride)
    ax.set_yticks(named, style.short_names([errors[index].layer for index in named], _NAME_LENGTH))
    if len(named) < len(errors):
        ax.set_ylabel(f"layer, first to last of {len(errors)}")
    ax.set_ylim(len(errors) - 0.5, -0.5)
    ax.set_xscale("log")
    ax.set_xlim(_LOWEST, 2 * max(1.0, outputs.max(), np.nanmax(added, initial=0.0)))
    style.legend_above(ax, columns=2, title=title)
    return ax
