"""Finds the loss scale that a branch of a model needs, if overflows drive the scale below it."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kmp.backend.keras_internals import created_layers
from kmp.backend.layer_graph import next_layers
from kmp.records.gradient_sample import layer_of
from kmp.replay.criteria import Criteria
from kmp.replay.layer_results import LayerResults
from kmp.replay.passes import Passes, PassResult, as_array
from kmp.utils.float_formats import FLOAT16
from kmp.utils.names import path_and_parents

HEADROOM_BITS = 2  # between the largest gradient of a replay and float16's maximum
_STEP = 4.0  # from a loss scale that flushes a branch to the next one to try


@dataclass(frozen=True)
class KeptBranch:
    """A branch whose gradients a sound pass has to keep.

    Args:
        loss_scale: The loss scale of that pass.
        layer_of_variable: The layers of the branch, by the paths of their variables.
        exact: The pass in float32.
        criteria: Which gradients are flushed.
    """

    loss_scale: float
    layer_of_variable: Mapping[str, str]
    exact: PassResult
    criteria: Criteria

    @property
    def layers(self) -> list[str]:
        """The paths of its layers."""
        return list(dict.fromkeys(self.layer_of_variable.values()))

    def is_flushed_in(self, result: PassResult) -> bool:
        """Whether a pass flushes the gradients of one of its layers for the most part."""
        shares = {}
        for path in self.layer_of_variable:
            exact = self.exact.gradients[path]
            shares[path] = flushed_share(result.gradients[path], exact)
        return bool(self.criteria.flushed_layers(shares, self.layer_of_variable.__getitem__))


@dataclass(frozen=True)
class ScaleRange:
    """The loss scales between which a branch can be kept.

    Args:
        lowest: The one without a branch that needs a larger one.
        highest: The largest one to try, at which the training began. It flushes without any
            overflow what a larger one would keep.
        share: What a loss scale is multiplied by in a pass.
    """

    lowest: float
    highest: float
    share: float


def branch_to_keep(
    passes: Passes, own: LayerResults, exact: PassResult, scales: ScaleRange, criteria: Criteria
) -> KeptBranch | None:
    """Returns the branch that the lowest loss scale would flush, and the scale that it needs.

    Returns `None` if there is none, or none that a loss scale of the range keeps.

    Args:
        passes: The passes.
        own: The layers of a pass in the precision of the model.
        exact: The pass in float32.
        scales: The loss scales to choose from.
        criteria: Which gradients are flushed, and which of them are a branch.
    """
    following = next_layers(passes.model)
    if not following:
        return None  # the order of variables alone is no proof
    created = created_layers(passes.model)
    magnitudes, shares, layer_of_variable = {}, {}, {}
    for path, gradient in gradients_in_16_bits(exact, own):
        magnitude = np.abs(gradient)
        if magnitude.any():
            magnitudes[path] = magnitude
            shares[path] = _share_below(magnitude, scales.lowest)
            # A layer that a program creates may have its variables in layers of its own.
            layer = layer_of(path)
            around = (each for each in path_and_parents(layer) if each in created)
            layer_of_variable[path] = next(around, layer)
    branch = criteria.flushed_branch(shares, layer_of_variable.__getitem__, following)
    scale_of = _scales_needed(magnitudes, layer_of_variable, branch)
    kept = [layer for layer, scale in scale_of.items() if scale <= scales.highest]
    if not kept:
        return None
    in_branch = {path: layer for path, layer in layer_of_variable.items() if layer in kept}
    needed = max(scales.lowest, *(scale_of[layer] for layer in kept))
    return _with_tried_scale(KeptBranch(needed, in_branch, exact, criteria), passes, scales)


def _scales_needed(
    magnitudes: Mapping[str, np.ndarray],
    layer_of_variable: Mapping[str, str],
    branch: Sequence[str],
) -> dict[str, float]:
    """Returns the loss scale at which half of each gradient's elements are not flushed, by layer.

    It is a power of two. Elements that are zero in float32 do not count.
    """
    needed = dict.fromkeys(branch, 0.0)
    for path, each in magnitudes.items():
        layer = layer_of_variable[path]
        if layer in needed:
            exponent = math.floor(math.log2(float(np.median(each[each > 0]))))
            scale = 2.0 ** (FLOAT16.flush_exponent - exponent)
            needed[layer] = max(needed[layer], scale)
    return needed


def _with_tried_scale(branch: KeptBranch, passes: Passes, scales: ScaleRange) -> KeptBranch | None:
    """Returns the branch with a loss scale at which a pass in 16 bits does not flush it.

    The gradients of activations, on the way to it, may be smaller than those of its variables.
    """
    scale = branch.loss_scale
    with contextlib.suppress(TimeoutError):  # the scale by the gradients in float32 stands
        while branch.is_flushed_in(passes.in_own_precision(factor=scale * scales.share)):
            if scale >= scales.highest:
                return None
            scale = min(scale * _STEP, scales.highest)
    # With a margin, because the gradients of other batches are smaller.
    return replace(branch, loss_scale=min(scale * 2.0**HEADROOM_BITS, scales.highest))


def gradients_in_16_bits(exact: PassResult, own: LayerResults) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the gradient in float32 of each variable by path, except those of float32 layers.

    Args:
        exact: The pass in float32.
        own: The layers of a pass in the precision of the model.
    """
    float32_layers = set(own.called) - own.computing_in_16_bits
    for path, gradient in exact.gradients.items():
        layer = next((each for each in path_and_parents(path) if each in own.called), "")
        if gradient is not None and layer not in float32_layers:
            yield path, as_array(gradient)


def shares_flushed_at(loss_scale: float, exact: PassResult, own: LayerResults) -> dict[str, float]:
    """Returns the share of each variable's gradient that a loss scale flushes.

    The other arguments are those of `gradients_in_16_bits`.
    """
    return {
        path: _share_below(np.abs(gradient), loss_scale)
        for path, gradient in gradients_in_16_bits(exact, own)
    }


def flushed_share(own: Any, exact: Any) -> float:
    """Returns the share of elements that are zero in the model's precision only."""
    if own is None or exact is None:
        return 0.0
    half, single = as_array(own), as_array(exact)
    if half.shape != single.shape:  # the rows of an embedding, where float16 has rounded indices
        return 0.0
    flushed = (half == 0) & (single != 0)
    return float(flushed.mean()) if flushed.size else 0.0


def _share_below(magnitudes: np.ndarray, loss_scale: float) -> float:
    """Returns the share of elements that are not zero, but in float16 at this loss scale."""
    limit = 2.0**FLOAT16.flush_exponent / loss_scale
    return float(((magnitudes > 0) & (magnitudes <= limit)).mean())
