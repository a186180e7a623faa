"""Computes the underflow and overflow of sampled gradients at every loss scale."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kmp.diagnosis import thresholds
from kmp.diagnosis.sample_statistics import (
    SampleStatistics,
    counts_below,
    statistics,
    unscaled_counts,
    usable,
)
from kmp.records import RUN_EXPECTED, GradientSample, Run
from kmp.utils import FLOAT16, FLOAT32, validation

# Smallest magnitude that rounds to Inf in float16, with rounding to nearest: the maximum plus half
# a unit.
_ROUNDS_TO_INF = FLOAT16.max + 2.0 ** (FLOAT16.max_exponent - FLOAT16.fraction_bits - 1)
_RANGE_BITS = 24  # on either side of the scale in use
_EXTRA_BITS = 4  # above the recommended scales, so that the curve shows why they end


@dataclass(frozen=True, eq=False)
class WhatIf:
    """Shares of gradient elements that float16 loses, with every power of two as the loss scale.

    All arrays have shape `(scales,)`, and are of weight gradients. Gradients of activations may
    overflow at a lower scale; `recommended` includes those that a replay of a batch measured.

    Args:
        log2_scales: int64, the exponents k of the scales 2^k.
        underflow: float64, share of elements that are nonzero and would round to zero. A lower
            bound if many elements are powers of two: exactly 2^-25 rounds to zero too, which counts
            by exponent do not show.
        underflow_bound: float64, the same plus the elements that were sampled as zero: flushed by
            float16 or truly zero, as with dead ReLUs. The true share lies between the two. Equal to
            `underflow` with a float32 reference.
        overflow: float64, share of the elements of finite samples that would be 2^16 or more.
            (Values from 65520 to 2^16 also round to Inf. Counts by exponent do not show them, but
            `skipped` includes them.)
        skipped: float64, share of the sampled steps that would be skipped. A sample with NaN or Inf
            counts at its own loss scale and above; whether it overflows below is unknown.
        in_use: log2 of the newest sample's loss scale.
        is_measured: Whether a float32 pass showed which of the sampled zeros were flushed. If not,
            values above `in_use` are an extrapolation: an unknown number of flushed elements would
            become nonzero there.
        recommended: Lowest and highest k at which at most 0.1 % of the nonzero elements underflow,
            every finite sample has at least one bit of headroom, and no activation gradient of a
            replay overflows. `None` if there is none.

    Example:
    >>> counts = np.bincount([0] * 3 + [130] * 5 + [131] * 8 + [132] * 2, minlength=280)[None]
    >>> amax, norm = np.array([2.0**-17]), np.array([1e-5])
    >>> sample = GradientSample(1, 1.0, ("dense/kernel",), counts, amax, norm)
    >>> curve = what_if([sample])
    >>> curve.recommended, round(float(curve.at(-6)["underflow"]), 2)
    ((-5, 31), 0.28)
    """

    log2_scales: np.ndarray
    underflow: np.ndarray
    underflow_bound: np.ndarray
    overflow: np.ndarray
    skipped: np.ndarray
    in_use: float
    is_measured: bool
    recommended: tuple[int, int] | None

    @property
    def is_lowest_known(self) -> bool:
        """Whether the lowest recommended scale is known.

        It is not if many elements were sampled as zero, without a float32 reference: those that
        float16 flushed may need a larger scale.
        """
        return bool(self.underflow_bound[0] - self.underflow[0] <= thresholds.MANY_ZEROS)

    @property
    def is_extrapolated(self) -> np.ndarray:
        """Whether the curve is an extrapolation at each scale; bool of shape `(scales,)`."""
        return ~np.full(self.log2_scales.shape, self.is_measured) & (self.log2_scales > self.in_use)

    def at(self, log2_scale: float) -> dict[str, float]:
        """Returns the four shares at the scale nearest to 2^`log2_scale`.

        Raises:
            ValueError: If it is outside `log2_scales`.
        """
        lowest, highest = float(self.log2_scales[0]), float(self.log2_scales[-1])
        if not lowest - 0.5 <= log2_scale <= highest + 0.5:
            raise ValueError(
                f"`log2_scale` must be from {lowest:g} to {highest:g}. Received:"
                f" log2_scale={log2_scale!r}"
            )
        index = int(np.argmin(np.abs(self.log2_scales - log2_scale)))
        names = ("underflow", "underflow_bound", "overflow", "skipped")
        return {name: float(getattr(self, name)[index]) for name in names}


def what_if(run: Run | Sequence[GradientSample]) -> WhatIf:
    """Computes from sampled gradients what float16 would lose at every loss scale 2^k.

    Args:
        run: A run, or a sequence of its samples. Ignores variables of layers that compute in
            float32. If the run has float32 passes, the share of nonzero elements is theirs: the
            smallest of these elements take the place of those that were sampled as zero.

    Raises:
        ValueError: If no sample has finite gradients.

    Example:
    >>> import keras, kmp
    >>> with kmp.enable(initial_scale=2.0**10):
    ...     model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> callbacks = kmp.callbacks.defaults()
    >>> _ = model.fit(np.ones((8, 2)), np.ones((8, 1)), callbacks=callbacks, verbose=0)
    >>> what_if(callbacks[0].run).in_use
    10.0
    """
    if isinstance(run, Sequence) and all(isinstance(sample, GradientSample) for sample in run):
        run = Run([{"step": sample.step, "sample": sample} for sample in run])
    validation.instance("run", run, Run, f"{RUN_EXPECTED}, or a sequence of its samples")
    assert isinstance(run, Run)
    curve = sweep(run, *statistics(run))
    if curve is None:
        raise ValueError(
            "The run has no sample of finite gradients. Attach kmp.callbacks.defaults() to"
            " sample gradients. If every sampled step overflowed, kmp.advise(run) reports the"
            " cause."
        )
    return curve


def usable_scale(run: Run) -> float:
    """Returns the largest loss scale at which no activation gradient of a replay overflows.

    It is inf without a replay, and 0 if the backward pass of a replay needs float32 at every scale.
    """
    scales = [math.inf]
    for _, replay in run.replays:
        needs_float32 = replay.loss is not None and not replay.is_finite and replay.float32_layers
        scales.append(0.0 if needs_float32 else replay.gradients.usable_scale or math.inf)
    return min(scales)


def sweep(
    run: Run, samples: Sequence[SampleStatistics], references: Sequence[SampleStatistics]
) -> WhatIf | None:
    """Returns what float16 would lose of a run's samples at every loss scale.

    `None` if no sample has finite gradients.
    """
    exact = usable(references)
    measured = usable(samples) or exact
    if not measured:
        return None
    in_use = math.log2((samples or measured)[-1].loss_scale)
    counts, zeros = (
        unscaled_counts(measured),
        float(sum(sample.histogram.zeros for sample in measured)),
    )
    largest = np.array([sample.largest for sample in measured])
    if exact:
        # A float32 pass has more nonzero elements; its smallest ones are those that float16 flushed
        # to zero.
        scaled = unscaled_counts(exact) * (
            (counts.sum() + zeros) / sum(sample.histogram.total for sample in exact)
        )
        missing = float(np.clip(scaled.sum() - counts.sum(), 0.0, zeros))
        counts, zeros = (
            counts + np.diff(np.minimum(np.cumsum(scaled), missing), prepend=0.0),
            zeros - missing,
        )
        if not largest.any():  # float16 flushed all of the samples
            largest = np.array([sample.largest for sample in exact])
    recommended = _recommended(counts, float(largest.max()), usable_scale(run))

    # The scales of the curve: around the one in use, with those that are recommended or where
    # overflow begins.
    limits = [math.floor(math.log2(FLOAT16.max / largest.max())) - 1] if largest.any() else []
    bounds = recommended or ()
    low = min([math.floor(in_use) - _RANGE_BITS, *limits, *bounds])
    high = max(
        [math.ceil(in_use) + _RANGE_BITS, *limits, *(bound + _EXTRA_BITS for bound in bounds)]
    )
    scales = np.arange(max(low, FLOAT32.min_exponent), min(high, FLOAT32.max_exponent) + 1)

    # Steps with NaN or Inf are skipped at their own loss scale and above; whether they are below is
    # unknown.
    nonfinite = [
        math.log2(sample.loss_scale) for sample in samples if not sample.histogram.is_finite
    ]
    overflows = largest.size - np.searchsorted(
        np.sort(largest), _ROUNDS_TO_INF * np.exp2(-scales.astype(np.float64))
    )
    known = np.searchsorted(np.sort(nonfinite), scales, side="right")

    total = max(1, counts.sum() + zeros)
    underflow = counts_below(counts, FLOAT16.flush_exponent - scales) / total
    return WhatIf(
        log2_scales=scales,
        underflow=underflow,
        underflow_bound=underflow if exact else underflow + zeros / total,
        overflow=(counts.sum() - counts_below(counts, FLOAT16.max_exponent + 1 - scales)) / total,
        skipped=(overflows + known) / (largest.size + known),
        in_use=in_use,
        is_measured=bool(exact),
        recommended=recommended,
    )


def _recommended(counts: np.ndarray, largest: float, highest: float) -> tuple[int, int] | None:
    """Returns the lowest and the highest `WhatIf.recommended`."""
    if not counts.any() or not largest or not highest:
        return None
    high = math.floor(math.log2(min(FLOAT16.max / largest / 2**thresholds.MARGIN_BITS, highest)))
    candidates = np.arange(-FLOAT32.max_exponent, FLOAT32.max_exponent + 1)
    flushed = counts_below(counts, FLOAT16.flush_exponent - candidates)
    sufficient = candidates[flushed <= thresholds.TOLERATED_UNDERFLOW * counts.sum()]
    low = int(sufficient[0]) if sufficient.size else high + 1
    high = min(high, FLOAT32.max_exponent)
    return (low, high) if low <= high else None
