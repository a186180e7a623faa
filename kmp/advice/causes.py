"""The causes that a run can suffer from: each a function from evidence to a finding, or to none. The gravest first."""

import math
from collections.abc import Callable

from kmp.advice.finding import Finding
from kmp.advice.run_metrics import FUTILE_IN_A_ROW, RunMetrics
from kmp.records import BATCH_WEIGHTS, BATCH_X, BATCH_Y, LOSS_FUNCTION
from kmp.utils import FLOAT16, FLOAT32, as_power

# What counts as evidence. A dynamic scale skips steps to find its place, some at the start and one in 2000: no fault.
_EXPLODING_UPDATE = 0.5  # of the weights' norm, in one step; 1e-3 is usual
_LARGE_UPDATE = 0.05  # one below it drives no loss up a hundredfold
_EXPLODING_LOSS = 100.0  # times the first loss
_SMALL_LOSS = 0.01
_SKIPPED_BY_EXPLOSION = 0.1
_MANY_SUBNORMAL = 0.25
_MOST_SUBNORMAL = 0.5
_MANY_LOST = 0.05
_SPARE_BITS = 6.0
_SKIPPED_BY_FIXED = 0.01
_SKIPPED_IN_VAIN = 0.05
_SKIPPED_BY_GROWTH = 0.02
_EAGER_INTERVAL = 200
_SEARCH_AT_START = 10

_CHECKS = {
    BATCH_X: "assert np.isfinite(x).all() and np.abs(x).max() < 65504  # and normalize what is larger",
    BATCH_Y: "assert np.isfinite(y).all()",
    BATCH_WEIGHTS: "assert np.isfinite(sample_weight).all()",
}


def _exploding(evidence: RunMetrics) -> Finding | None:
    step, ratio = evidence.update_ratio
    limit = _EXPLODING_LOSS * max(abs(evidence.first_loss), _SMALL_LOSS)
    leaps, grows = ratio > _EXPLODING_UPDATE, evidence.highest_loss > limit
    many_skipped = evidence.overflows > _SKIPPED_BY_EXPLOSION * evidence.steps
    # A loss that is high at the end is no explosion where the updates are known to be small: the batches differ.
    stays_high = evidence.last_loss > limit and not 0.0 < ratio < _LARGE_UPDATE
    if not (leaps and (many_skipped or grows)) and not (grows and (evidence.ends_nonfinite or stays_high)):
        return None
    told = []
    if leaps:
        told.append(
            f"in step {step} the update was {ratio:.2g} times as large as the weights (L2 norms; 0.001 is usual)"
        )
    if grows:
        told.append(f"the loss went from {evidence.first_loss:.3g} to {evidence.highest_loss:.3g}")
    if evidence.ends_nonfinite:
        told.append(f"the last {evidence.in_a_row} steps had a loss that was inf or nan, after others that had not")
    if evidence.overflows:
        told.append(f"{_of_steps(evidence, evidence.overflows)} were skipped")
    return Finding(
        "exploding",
        "Training explodes: the updates are too large, in any number format.",
        "; ".join(told),
        f"{evidence.setting('optimizer', 'keras.optimizers.Adam')}(learning_rate=0.1 * learning_rate)  # a tenth of "
        "what it is; or clipnorm=1.0",
    )


def _data(evidence: RunMetrics) -> Finding | None:
    seen = evidence.seen_first
    if not evidence.nonfinite_losses or seen is None or not evidence.is_in_data:
        return None
    return Finding(
        "data",
        "The data hold inf or nan, or numbers too large for float16.",
        f"{_bad_losses(evidence)}; in the last of them the first to be so was {seen}",
        _CHECKS[seen],
    )


def _layer(evidence: RunMetrics) -> Finding | None:
    seen = evidence.seen_first
    if not evidence.nonfinite_losses or seen in (None, LOSS_FUNCTION) or evidence.is_in_data or _exploding(evidence):
        return None  # which layer is the first in an explosion says nothing
    assert seen is not None
    streak = f"; the last {evidence.in_a_row} all were, as weights that grew too large make it"
    change = f"layer = kmp.layers.Float32(layer)  # the layer {seen.rpartition('/')[2]!r}"
    return Finding(
        "layer",
        f"The forward pass breaks at {seen}.",
        f"{_bad_losses(evidence)}; in the last of them the first to be so was the output of {seen}, from a finite "
        "batch: in float16 a number beyond 65504, or an epsilon below 2^-25, which is zero there"
        + (streak if evidence.ends_nonfinite else ""),
        change + ("; or a smaller learning rate" if evidence.ends_nonfinite else ""),
    )


def _backward(evidence: RunMetrics) -> Finding | None:
    """Overflows of the backward pass that no loss scale avoids."""
    path, share = evidence.main_overflow_origin
    often = evidence.in_backward > _SKIPPED_IN_VAIN * evidence.steps
    if evidence.is_fixed:
        in_vain = often and evidence.headroom >= _SPARE_BITS
    else:
        lowest = evidence.setting("min_scale", FLOAT16.smallest_normal)
        ends_so = evidence.in_a_row >= FUTILE_IN_A_ROW and not evidence.ends_nonfinite
        in_vain = ends_so or (often and evidence.scale <= lowest * 2.0**_SPARE_BITS)
    if not in_vain or not path or evidence.nonfinite_losses >= evidence.in_backward:
        return None
    return Finding(
        "layer",
        f"No loss scale helps: the backward pass is inf or nan near {path}.",
        f"{_of_steps(evidence, evidence.in_backward)} were skipped with a finite loss, down to a scale of "
        f"{as_power(evidence.scale)}; {path} was to blame in {share:.0%} of them",
        f"layer = kmp.layers.Float32(layer)  # those between {path!r} and the loss; look for an epsilon below 2^-25",
    )


def _loss(evidence: RunMetrics) -> Finding | None:
    if not evidence.nonfinite_losses or _exploding(evidence):
        return None
    if evidence.seen_first == LOSS_FUNCTION:
        return Finding(
            "loss",
            "The loss function gives inf or nan for outputs that are finite.",
            f"{_bad_losses(evidence)}, and the outputs of all layers were finite",
            "keras.losses.SparseCategoricalCrossentropy(from_logits=True)  # or clip what goes into a log",
        )
    if evidence.seen_first:
        return None
    if evidence.ends_nonfinite:
        when = f"among them the last {evidence.in_a_row}: the weights, or all of the data from there on"
    elif evidence.nonfinite_losses < evidence.steps / 2:
        when = "the others are fine, as with corrupt examples"
    else:
        when = "most of them, as with a layer that float16 breaks"
    return Finding(
        "loss",
        "The loss is inf or nan before it is scaled, so no loss scale helps.",
        f"{_bad_losses(evidence)}; {when}",
        "callbacks=[..., kmp.callbacks.ForwardProbe()]  # names the batch or the layer that is the first",
    )


def _scale_too_large(evidence: RunMetrics) -> Finding | None:
    if not evidence.is_fixed or evidence.in_backward <= _SKIPPED_BY_FIXED * evidence.steps or _backward(evidence):
        return None
    path, share = evidence.main_overflow_origin
    blamed = f"; {path} was to blame in {share:.0%} of them" if path else ""
    known = evidence.curve.recommended if evidence.curve else None
    instead = f"  # or loss_scale={_literal(known[1])}" if known and 2.0 ** known[1] < evidence.scale else ""
    return Finding(
        "scale_too_large",
        f"The fixed loss scale of {as_power(evidence.scale)} is too large.",
        f"{_of_steps(evidence, evidence.in_backward)} overflowed in the backward pass, with a finite loss{blamed}",
        f"kmp.enable(loss_scale='dynamic'){instead}",
    )


def _scale_too_small(evidence: RunMetrics) -> Finding | None:
    if not evidence.is_float16 or not evidence.finite or evidence.in_backward > _SKIPPED_BY_FIXED * evidence.steps:
        return None
    told = _underflow(evidence)
    if not told or evidence.headroom < _SPARE_BITS:
        return None
    curve = evidence.curve
    best = curve.recommended[1] if curve and curve.recommended else None
    argument = "loss_scale" if evidence.is_fixed else "initial_scale"
    change = "loss_scale='dynamic'" if best is None else f"{argument}={_literal(best)}"
    if best is not None and not evidence.is_fixed and evidence.setting("max_scale", math.inf) < 2.0**best:
        change += f", max_scale={_literal(FLOAT32.max_exponent)}"
    return Finding(
        "scale_too_small",
        f"The loss scale of {as_power(evidence.scale)} is too small: gradients are lost to underflow.",
        "; ".join(told),
        f"kmp.enable({change})" + ("  # or loss_scale='dynamic'" if evidence.is_fixed and best is not None else ""),
    )


def _underflow(evidence: RunMetrics) -> list[str]:
    """Returns what says that gradients underflow at the loss scale in use; nothing if nothing does."""
    told, zero = [], evidence.zero_from_the_input_on
    spare = "" if math.isinf(evidence.headroom) else f", with {evidence.headroom:.0f} bits to overflow to spare"
    if evidence.subnormal > _MANY_SUBNORMAL:
        told.append(
            f"{evidence.subnormal:.1%} of the sampled gradient elements that are not zero are subnormal in float16, at "
            f"the loss scale in use{spare}"
        )
    if zero and evidence.headroom >= 2 * _SPARE_BITS and evidence.zero_share >= 0.5:
        told.append(
            f"{evidence.zero_share:.1%} of the elements are exactly zero, all those of {len(zero)} variables from the "
            f"input on{spare}"
        )
    if (evidence.flushed or 0.0) > _MANY_LOST:
        told.append(f"{evidence.flushed:.1%} of all elements are zero that are not zero in float32")
    if told and evidence.underflow_origins:
        path = max(evidence.underflow_origins, key=evidence.underflow_origins.__getitem__)
        told.append(f"it begins at {path}, in {evidence.underflow_origins[path]} of {len(evidence.finite)} samples")
    return told


def _range(evidence: RunMetrics) -> Finding | None:
    curve = evidence.curve
    if not evidence.is_float16 or curve is None or not math.isfinite(evidence.headroom):
        return None
    if evidence.subnormal > _MOST_SUBNORMAL and evidence.headroom < _SPARE_BITS:
        return _held_down(evidence)
    if curve.recommended:
        return None
    lowest, highest = int(curve.log2_scales[0]), int(curve.log2_scales[-1])
    best = max(lowest, min(highest, math.floor(math.log2(evidence.scale) + evidence.headroom)))
    lost = curve.at(best)["underflow"]
    if lost <= _MANY_LOST:
        return None
    wide, smallest = evidence.widest_apart
    return Finding(
        "range",
        "The gradients span more than float16 can hold, at any loss scale.",
        f"at {as_power(2.0**best)}, the largest scale at which no finite sample overflows, {lost:.1%} of the elements "
        f"still underflow; the largest are those of {wide}, and {smallest} loses the most",
        f"layer = kmp.layers.Float32(layer)  # around {wide!r}; or kmp.enable('mixed_bfloat16')",
    )


def _held_down(evidence: RunMetrics) -> Finding:
    """What is flushed to zero already, the curve cannot know of."""
    wide, smallest = evidence.widest_apart
    return Finding(
        "range",
        f"The gradients of {wide} keep the loss scale too low for the others.",
        f"{evidence.subnormal:.1%} of the sampled gradient elements that are not zero are subnormal in float16, at the "
        f"loss scale in use, {as_power(evidence.scale)}, with {max(evidence.headroom, 0.0):.0f} bits to overflow to "
        f"spare; the largest are those of {wide}, and {smallest} loses the most",
        f"layer = kmp.layers.Float32(layer)  # around {wide!r}; or kmp.enable('mixed_bfloat16')",
    )


def _growth_too_eager(evidence: RunMetrics) -> Finding | None:
    interval = evidence.setting("growth_interval", None)
    after_start = evidence.in_backward - evidence.at_start[0]
    if evidence.is_fixed or interval is None or interval > _EAGER_INTERVAL:
        return None
    if after_start <= _SKIPPED_BY_GROWTH * evidence.steps or evidence.in_a_row >= FUTILE_IN_A_ROW:
        return None
    return Finding(
        "growth_interval_too_small",
        "The loss scale grows too eagerly: steps are skipped to no gain.",
        f"{_of_steps(evidence, after_start)} overflowed after the scale had found its place, with growth every "
        f"{interval} steps",
        "kmp.enable(growth_interval=2000)",
    )


def _initial_scale(evidence: RunMetrics) -> Finding | None:
    count, until, settled = evidence.at_start
    first, factor = evidence.setting("initial_scale", None), evidence.setting("backoff_factor", 0.5)
    if evidence.is_fixed or first is None or count <= max(_SEARCH_AT_START, _SKIPPED_BY_FIXED * evidence.steps):
        return None
    came_down_at_once = settled <= first * factor**count * evidence.setting("growth_factor", 2.0)
    if not came_down_at_once or _backward(evidence):
        return None
    return Finding(
        "initial_scale",
        f"The initial loss scale of {as_power(first)} is too large.",
        f"{count} of the first {until} steps were skipped until the scale had come down to {as_power(settled)}",
        f"kmp.enable(initial_scale={_literal(math.floor(math.log2(settled)))})",
    )


CAUSES: tuple[Callable[[RunMetrics], Finding | None], ...] = (
    _data,
    _exploding,
    _layer,
    _backward,
    _loss,
    _scale_too_large,
    _scale_too_small,
    _range,
    _growth_too_eager,
    _initial_scale,
)


def _of_steps(evidence: RunMetrics, count: int) -> str:
    return f"{count} of {evidence.steps} steps ({count / max(1, evidence.steps):.1%})"


def _bad_losses(evidence: RunMetrics) -> str:
    return f"in {_of_steps(evidence, evidence.nonfinite_losses)} the loss was inf or nan before it was scaled"


def _literal(exponent: int) -> str:
    return f"2.0**{exponent}"
