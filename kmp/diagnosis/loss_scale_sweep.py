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
from kmp.records import GradientSample, Record, Run
from kmp.records.run import RUN_EXPECTED
from kmp.utils import validation
from kmp.utils.float_formats import FLOAT16, FLOAT32

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
    >>> import kmp, numpy as np
    >>> from kmp.records import GradientSample
    >>> counts = np.bincount([0] * 3 + [130] * 5 + [131] * 8 + [132] * 2, minlength=280)[None]
    >>> amax, norm = np.array([2.0**-17]), np.array([1e-5])
    >>> sample = GradientSample(1, 1.0, ("dense/kernel",), counts, amax, norm)
    >>> curve = kmp.what_if([sample])
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
        return bool(self.underflow_bound[0] - self.underflow[0] <= thresholds.MANY_FLUSHED)

    @property
    def is_extrapolated(self) -> np.ndarray:
        """Whether the curve is an extrapolation at each scale; bool of shape `(scales,)`."""
        if self.is_measured:
            return np.zeros(self.log2_scales.shape, bool)
        return self.log2_scales > self.in_use

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
        run: A run, or a sequence of its samples. Variables of layers that compute in float32 are
            ignored. If the run has float32 passes, these decide how many elements are nonzero:
            their smallest elements replace those that were sampled as zero.

    Raises:
        ValueError: If no sample has finite gradients.

    Example:
    >>> import keras, kmp, numpy as np
    >>> with kmp.enable(initial_scale=2.0**10):
    ...     model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> callbacks = kmp.callbacks.defaults()
    >>> _ = model.fit(np.ones((8, 2)), np.ones((8, 1)), callbacks=callbacks, verbose=0)
    >>> kmp.what_if(callbacks[0].run).in_use
    10.0
    """
    if isinstance(run, Sequence) and all(isinstance(sample, GradientSample) for sample in run):
        run = Run([Record(step=sample.step, sample=sample) for sample in run])
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
    lowest = math.inf
    for _, replay in run.replays:
        overflows_backward = replay.is_finite_forward and not replay.is_finite
        if overflows_backward and replay.float32_layers:
            return 0.0
        lowest = min(lowest, replay.gradients.usable_scale or math.inf)
    return lowest


@dataclass(frozen=True, eq=False)
class _Elements:
    """The gradient elements that a curve is computed from.

    Args:
        counts: float64, the numbers of nonzero elements by exponent, without the loss scale.
        zeros: The number of elements that are zero.
        largest: float64, the largest magnitude of each sample, without the loss scale.
    """

    counts: np.ndarray
    zeros: float
    largest: np.ndarray

    @property
    def total(self) -> float:
        """The number of all elements."""
        return float(self.counts.sum() + self.zeros)


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
    newest = samples[-1] if samples else measured[-1]
    in_use = math.log2(newest.loss_scale)
    elements = _Elements(
        counts=unscaled_counts(measured),
        zeros=float(sum(sample.zero_count for sample in measured)),
        largest=np.array([sample.largest for sample in measured]),
    )
    if exact:
        elements = _with_flushed(elements, exact)
    largest = float(elements.largest.max())
    recommended = _recommended(elements.counts, largest, usable_scale(run))
    scales = _scales_around(in_use, largest, recommended)

    counts, total = elements.counts, max(1, elements.total)
    underflow = counts_below(counts, FLOAT16.flush_exponent - scales) / total
    fitting = counts_below(counts, FLOAT16.max_exponent + 1 - scales)
    return WhatIf(
        log2_scales=scales,
        underflow=underflow,
        underflow_bound=underflow if exact else underflow + elements.zeros / total,
        overflow=(counts.sum() - fitting) / total,
        skipped=_skipped(samples, elements.largest, scales),
        in_use=in_use,
        is_measured=bool(exact),
        recommended=recommended,
    )


def _with_flushed(sampled: _Elements, exact: Sequence[SampleStatistics]) -> _Elements:
    """Returns the elements with those that float16 flushed to zero.

    A float32 pass has more nonzero elements; its smallest ones are those that float16 flushed.
    """
    of_pass = unscaled_counts(exact)
    share = sampled.total / sum(sample.total for sample in exact)
    expected = of_pass * share
    missing = float(np.clip(expected.sum() - sampled.counts.sum(), 0.0, sampled.zeros))
    flushed = np.diff(np.minimum(np.cumsum(expected), missing), prepend=0.0)
    largest = sampled.largest
    if not largest.any():  # float16 flushed all of the samples
        largest = np.array([sample.largest for sample in exact])
    return _Elements(sampled.counts + flushed, sampled.zeros - missing, largest)


def _scales_around(
    in_use: float, largest: float, recommended: tuple[int, int] | None
) -> np.ndarray:
    """Returns the exponents of the scales of a curve, int64.

    They are around the one in use, with those that are recommended or where overflow begins.
    """
    lowest = [math.floor(in_use) - _RANGE_BITS]
    highest = [math.ceil(in_use) + _RANGE_BITS]
    if largest:
        limit = math.floor(math.log2(FLOAT16.max / largest)) - 1
        lowest.append(limit)
        highest.append(limit)
    if recommended:
        lowest.append(recommended[0])
        highest.append(recommended[1] + _EXTRA_BITS)
    first = max(min(lowest), FLOAT32.min_exponent)
    last = min(max(highest), FLOAT32.max_exponent)
    return np.arange(first, last + 1)


def _skipped(
    samples: Sequence[SampleStatistics], largest: np.ndarray, scales: np.ndarray
) -> np.ndarray:
    """Returns the share of the sampled steps that would be skipped at each scale.

    Steps with NaN or Inf are skipped at their own loss scale and above; whether they are below is
    unknown.
    """
    nonfinite = [each for each in samples if not each.is_finite]
    skipped_from = np.sort([math.log2(each.loss_scale) for each in nonfinite])
    known = np.searchsorted(skipped_from, scales, side="right")
    limits = _ROUNDS_TO_INF * np.exp2(-scales.astype(np.float64))
    overflows = largest.size - np.searchsorted(np.sort(largest), limits)
    return (overflows + known) / (largest.size + known)


def _recommended(counts: np.ndarray, largest: float, highest: float) -> tuple[int, int] | None:
    """Returns the lowest and the highest `WhatIf.recommended`."""
    if not counts.any() or not largest or not highest:
        return None
    fitting = FLOAT16.max / largest / 2**thresholds.MARGIN_BITS
    high = math.floor(math.log2(min(fitting, highest)))
    candidates = np.arange(-FLOAT32.max_exponent, FLOAT32.max_exponent + 1)
    flushed = counts_below(counts, FLOAT16.flush_exponent - candidates)
    sufficient = candidates[flushed <= thresholds.NEGLIGIBLE * counts.sum()]
    low = int(sufficient[0]) if sufficient.size else high + 1
    high = min(high, FLOAT32.max_exponent)
    return (low, high) if low <= high else None
