"""Finds branches of a model whose gradients float16 flushes, while those of others are kept.

A branch is a part of the model that ends in the loss, such as one of several towers.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kmp.diagnosis import thresholds
from kmp.records import GradientSample
from kmp.utils.names import path_and_parents

# Of a gradient, by the path of the variable, from the input to the loss: what is zero in float16
# but not in float32.
Shares = Mapping[str, float]
LayerOf = Callable[[str], str]  # of a variable
NextLayers = Mapping[str, Sequence[str]]  # `next_layers` of a log


def flushed_layers(shares: Shares, layer_of: LayerOf) -> list[str]:
    """Returns the layers of which each variable's gradient is flushed for the most part."""
    is_flushed: dict[str, bool] = {}
    for name, share in shares.items():
        layer = layer_of(name)
        is_flushed[layer] = share > thresholds.MOST and is_flushed.get(layer, True)
    return [layer for layer, flushed in is_flushed.items() if flushed]


def kept_variables(shares: Shares) -> list[str]:
    """Returns the variables whose gradients lose little."""
    return [name for name, share in shares.items() if share <= thresholds.MANY_FLUSHED]


def flushed_branch(shares: Shares, layer_of: LayerOf, next_layers: NextLayers) -> list[str]:
    """Returns the `flushed_layers` that are part of a branch.

    No layer that follows them, towards the loss, keeps its gradients: else these underflow on
    their way to the input. Without the graph of the model, the order of the variables decides.
    """
    flushed, kept = flushed_layers(shares, layer_of), kept_variables(shares)
    if not flushed or not kept:
        return []
    if next_layers:
        order = list(dict.fromkeys(map(layer_of, shares)))
        alive = list(dict.fromkeys(map(layer_of, kept)))
        graph = _Graph(order, next_layers)
        flushed = [layer for layer in flushed if not graph.is_followed_by(layer, alive)]
    else:  # those nearest the input are no branch
        names = list(shares)
        last = max(index for index, name in enumerate(names) if layer_of(name) in flushed)
        if names.index(kept[0]) > last:
            return []
    variables = sum(layer_of(name) in flushed for name in shares)
    return flushed if variables + len(kept) >= len(shares) / 2 else []


class _Graph:
    """Which layers follow another one, towards the loss.

    Args:
        order: The layers that have variables, from the input to the loss. It decides of two layers
            in one that the graph has as a whole.
        next_layers: See `NextLayers`.
    """

    def __init__(self, order: Sequence[str], next_layers: NextLayers) -> None:
        self._index_of = {layer: index for index, layer in enumerate(order)}
        self._next = next_layers

    def is_followed_by(self, layer: str, others: Iterable[str]) -> bool:
        """Whether one of the other layers follows this one."""
        node = self._node_of(layer)
        after = self._all_after(node)
        for other in others:
            other_node = self._node_of(other)
            if node and other_node and node != other_node:
                follows = other_node in after
            else:
                follows = self._index_of[other] > self._index_of[layer]
            if follows:
                return True
        return False

    def _node_of(self, layer: str) -> str:
        """Returns the layer of the graph that is or contains this one; empty if there is none."""
        return next((path for path in path_and_parents(layer) if path in self._next), "")

    def _all_after(self, node: str) -> set[str]:
        found: set[str] = set()
        to_visit = list(self._next.get(node, ()))
        while to_visit:
            following = to_visit.pop()
            if following not in found:
                found.add(following)
                to_visit += self._next.get(following, ())
        return found


@dataclass(frozen=True)
class Gap:
    """How far the gradients of a flushed branch are from those of the other layers, in float32.

    Args:
        largest: The variable with the largest gradient, of the other layers.
        largest_exponent: The exponent of the power of two that this gradient reaches.
        median_exponent: That of the median of the nonzero gradients of the branch.
    """

    largest: str
    largest_exponent: int
    median_exponent: int


def gap_of(reference: GradientSample, branch: Sequence[str], others: Sequence[str]) -> Gap | None:
    """Returns the gap between gradients in float32; `None` if one side is zero or not finite.

    Args:
        reference: The gradients of a pass in float32.
        branch: The variables of the branch.
        others: The variables that keep their gradients.
    """
    in_branch = [name for name in branch if name in reference]
    outside = [name for name in others if name in reference]
    if not in_branch or not outside:
        return None
    small = reference.without(set(reference.names) - set(in_branch)).histogram.unscaled
    large = reference.without(set(reference.names) - set(outside))
    amax = large.amax / large.loss_scale
    count = small.by_exponent.sum()
    if not count or not np.isfinite(amax).all() or not amax.any():
        return None
    middle = int(np.searchsorted(np.cumsum(small.by_exponent), count / 2))
    return Gap(
        largest=large.names[int(amax.argmax())],
        largest_exponent=math.floor(math.log2(amax.max())),
        median_exponent=int(small.exponents[middle]),
    )
