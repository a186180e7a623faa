"""Phrases about branches of a model whose gradients float16 flushes to zero."""

from collections.abc import Sequence

from kmp.diagnosis.branches import Gap
from kmp.diagnosis.edits import NOT_TRIED
from kmp.diagnosis.model_names import name_of
from kmp.diagnosis.observations import Observations
from kmp.records import Replay
from kmp.records.replay import LayerSearch
from kmp.utils.float_formats import FLOAT16, as_power

CLOSER_TERMS = (
    "bring the terms of the loss closer together, with `loss_weights` of `compile` or the factors"
    " in the loss"
)
_MOST_NAMED = 5


def names_of(layers: Sequence[str]) -> str:
    """Returns the names of the first layers of a list."""
    return ", ".join(repr(name_of(layer)) for layer in layers[:_MOST_NAMED])


def distance(gap: Gap | None) -> str:
    """Returns how far gradients of a branch are from those of others; empty if it is unknown."""
    if gap is None:
        return ""
    median, largest = 2.0 ** (gap.median_exponent + 1), 2.0**gap.largest_exponent
    numbers = (
        f"in float32 half of their gradients are below {as_power(median)}, and that of"
        f" {gap.largest} reaches {as_power(largest)}"
    )
    bits = gap.largest_exponent - gap.median_exponent
    if bits > FLOAT16.max_exponent - FLOAT16.flush_exponent:
        numbers += ": no loss scale serves both"
    return numbers


def tried_for_branch(search: LayerSearch, replay: Replay, run: Observations) -> str:
    """Returns what a search for layers has shown at a loss scale that a branch needs."""
    branch = names_of(search.branch)
    scale = as_power(search.loss_scale or 1.0)
    what = f"the gradients for the batch are finite at {scale}, which those of {branch} need"
    numbers = distance(run.gradients.gap_of(search.branch, replay))
    numbers = f" ({numbers})" if numbers else ""
    if search.is_found:
        return f"with these layers in float32 {what}{numbers}"
    return f"{NOT_TRIED}; a search found no small set of layers with which {what}{numbers}"
