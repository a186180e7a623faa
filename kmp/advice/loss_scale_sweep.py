"""Computes the underflow and overflow of sampled gradients at every loss scale."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kmp.advice.sample_statistics import SampleStatistics, statistics, statistics_of, usable
from kmp.records import FIRST_EXPONENT, RUN_EXPECTED, GradientSample, Replay, Run
from kmp.utils import FLOAT16, FLOAT32, is_power_of_two, validation

# Smallest magnitude that rounds to Inf in float16, with rounding to nearest: the maximum plus half a unit.
_ROUNDS_TO_INF = FLOAT16.max + 2.0 ** (FLOAT16.max_exponent - FLOAT16.fraction_bits - 1)
_RANGE_BITS = 24  # on either side of the scale in use
_EXTRA_BITS = 4  # above the recommended scales, so that the curve shows why they end
_TOLERATED_UNDERFLOW = 1e-3
_MARGIN_BITS = 1
_MANY_ZEROS = 0.1


@dataclass(frozen=True, eq=False)
class WhatIf:
    """Shares of gradient elements that float16 loses, with every power of two as the loss scale.

    All arrays have shape `(scales,)`, and are of weight gradients. Gradients of activations may overflow at a lower
    scale; `recommended` includes those that a replay of a batch measured.

    Args:
        log2_scales: int64, the exponents k of the scales 2^k.
        underflow: float64, share of elements that are nonzero and would round to zero. A lower bound if many elements
            are powers of two: exactly 2^-25 rounds to zero too, which counts by exponent do not show.
        underflow_bound: float64, the same plus the elements that were sampled as zero: flushed by float16 or truly
            zero, as with dead ReLUs. The true share lies between the two. Equal to `underflow` with a float32
            reference.
        overflow: float64, share of the elements of finite samples that would be 2^16 or more. (Values from 65520 to
            2^16 also round to Inf. Counts by exponent do not show them, but `skipped` includes them.)
        skipped: float64, share of the sampled steps that would be skipped. A sample with NaN or Inf counts at its own
            loss scale and above; whether it overflows below is unknown.
        in_use: log2 of the newest sample's loss scale.
        is_measured: Whether a float32 pass showed which of the sampled zeros were flushed. If not, values above
            `in_use` are an extrapolation: an unknown number of flushed elements would become nonzero there.
        recommended: Lowest and highest k at which at most 0.1 % of the nonzero elements underflow, every finite sample
            has at least one bit of headroom, and no activation gradient of a replay overflows. `None` if there is none.

    Example:
    >>> from kmp.records import BinCounts
    >>> counts = BinCounts.of(np.bincount([0] * 3 + [130] * 5 + [131] * 8 + [132] * 2, minlength=280)[None])
    >>> sample = GradientSample(1, 1.0, ("dense/kernel",), counts, amax=np.array([2.0**-17]), norm=np.array([1e-5]))
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

        It is not if many elements were sampled as zero, without a float32 reference: those that float16 flushed may
        need a larger scale.
        """
        return bool(self.underflow_bound[0] - self.underflow[0] <= _MANY_ZEROS)

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
                f"`log2_scale` must be from {lowest:g} to {highest:g}. Received: log2_scale={log2_scale!r}"
            )
        index = int(np.argmin(np.abs(self.log2_scales - log2_scale)))
        names = ("underflow", "underflow_bound", "overflow", "skipped")
        return {name: float(getattr(self, name)[index]) for name in names}


def what_if(run: Run | Sequence[GradientSample]) -> WhatIf:
    """Computes from sampled gradients what float16 would lose at every loss scale 2^k.

    Args:
        run: A run, or a sequence of its samples. Ignores variables of layers that compute in float32. If the run has
            float32 passes, the share of nonzero elements is theirs: the smallest of these elements take the place of
            those that were sampled as zero.

    Raises:
        TypeError: If `run` is neither.
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
    if isinstance(run, Run):
        curve = sweep(statistics(run), statistics(run, "reference"), largest_usable_scale(run))
    else:
        curve = sweep(list(map(statistics_of, _samples_in(run))), [])
    if curve is None:
        raise ValueError(
            "The run has no sample of finite gradients. Attach kmp.callbacks.GradientHistogram to sample gradients. If "
            "every sampled step overflowed, kmp.advise(run) reports the cause."
        )
    return curve


def largest_usable_scale(run: Run) -> float:
    """Returns the largest loss scale at which no activation gradient of a replay overflows.

    It is inf without a replay, and 0 if the backward pass of a replay needs float32 at every scale.
    """
    return min((_usable_scale(replay) for _, replay in run.replays), default=math.inf)


def _usable_scale(replay: Replay) -> float:
    fails_at_every_scale = replay.loss is not None and not replay.is_finite and bool(replay.float32_layers)
    return 0.0 if fails_at_every_scale else replay.usable_scale or math.inf


def sweep(
    samples: Sequence[SampleStatistics], references: Sequence[SampleStatistics], usable_scale: float = math.inf
) -> WhatIf | None:
    """Computes what float16 would lose at every loss scale.

    Args:
        samples: Statistics of the samples.
        references: Statistics of float32 passes, which show what was flushed to zero in the samples.
        usable_scale: The largest scale to recommend; 0 for none.

    Returns:
        The shares of lost elements; `None` if no sample has finite gradients.
    """
    measured, exact = usable(samples) or usable(references), usable(references)
    if not measured:
        return None
    in_use = math.log2((samples or measured)[-1].loss_scale)
    counts, zeros = _counts_and_zeros(measured)
    if exact:
        counts, zeros = _with_flushed(counts, zeros, *_counts_and_zeros(exact))
    largest = np.array([sample.largest / sample.loss_scale for sample in measured])
    if not largest.any():  # float16 flushed all of the samples
        largest = np.array([sample.largest / sample.loss_scale for sample in exact or measured])
    recommended = _recommended(counts, float(largest.max()), usable_scale)
    scales = _scales(in_use, float(largest.max()), recommended or ())
    total = max(1, counts.sum() + zeros)
    flushed, overflowing = _count_flushed(counts, scales), _count_overflowing(counts, scales)
    is_measured = bool(exact)
    return WhatIf(
        scales,
        flushed / total,
        (flushed + (0 if is_measured else zeros)) / total,
        overflowing / total,
        _skipped(scales, largest, [sample.loss_scale for sample in samples if not sample.histogram.is_finite]),
        in_use,
        is_measured,
        recommended,
    )


def _samples_in(run: Any) -> list[GradientSample]:
    is_sequence = isinstance(run, Sequence) and all(isinstance(sample, GradientSample) for sample in run)
    if not is_sequence:
        validation.instance("run", run, Run, f"{RUN_EXPECTED}, or a sequence of its samples")
    return list(run)


def _scales(in_use: float, largest: float, recommended: Sequence[int]) -> np.ndarray:
    limits = [math.floor(math.log2(FLOAT16.max / largest)) - 1] if largest > 0 else []
    low = min([math.floor(in_use) - _RANGE_BITS, *limits, *recommended])
    high = max([math.ceil(in_use) + _RANGE_BITS, *limits, *(bound + _EXTRA_BITS for bound in recommended)])
    return np.arange(max(low, FLOAT32.min_exponent), min(high, FLOAT32.max_exponent) + 1)


def unscaled_exponents(samples: Sequence[SampleStatistics]) -> np.ndarray:
    """Returns how many elements of the unscaled gradients have each binary exponent, all samples together.

    Returns:
        float64 array, with 2^k at `exponent_index(k)`.
    """
    return sum(map(_unscaled_exponents, samples), np.zeros(2 * _MAX_EXPONENT + 1))


def exponent_index(exponent: int) -> int:
    """Returns the index of 2^`exponent` in `unscaled_exponents`."""
    return exponent + _MAX_EXPONENT


def _counts_and_zeros(samples: Sequence[SampleStatistics]) -> tuple[np.ndarray, float]:
    return unscaled_exponents(samples), float(sum(sample.histogram.zeros for sample in samples))


def _with_flushed(
    counts: np.ndarray, zeros: float, exact_counts: np.ndarray, exact_zeros: float
) -> tuple[np.ndarray, float]:
    """Returns the counts with flushed elements, and the number of zeros without them.

    A float32 pass has more nonzero elements; its smallest ones are those that were flushed.
    """
    scaled = exact_counts * ((counts.sum() + zeros) / (exact_counts.sum() + exact_zeros))
    missing = float(np.clip(scaled.sum() - counts.sum(), 0.0, zeros))
    flushed = np.diff(np.minimum(np.cumsum(scaled), missing), prepend=0.0)
    return counts + flushed, zeros - missing


def _unscaled_exponents(sample: SampleStatistics) -> np.ndarray:
    """Counts elements of the unscaled gradient by exponent, from -`_MAX_EXPONENT` to `_MAX_EXPONENT`."""
    histogram, shift = sample.histogram, math.frexp(sample.loss_scale)[1] - 1
    if not is_power_of_two(sample.loss_scale) and histogram.unscaled_counts is not None:
        histogram, shift = histogram.unscaled, 0
    counts = np.zeros(2 * _MAX_EXPONENT + 1)  # float64: the sum over a run's samples may exceed int64
    start = FIRST_EXPONENT - shift + _MAX_EXPONENT
    counts[start : start + histogram.by_exponent.size] = histogram.by_exponent
    return counts


_MAX_EXPONENT = 2 * (FLOAT32.max_exponent - FIRST_EXPONENT)  # large enough for every loss scale


def _count_flushed(counts: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Counts the elements below 2^-25, half of float16's smallest subnormal: they round to zero."""
    cumulative = np.cumsum(np.append(0, counts))
    return cumulative[np.clip(FLOAT16.flush_exponent - scales + _MAX_EXPONENT, 0, counts.size)]


def _count_overflowing(counts: np.ndarray, scales: np.ndarray) -> np.ndarray:
    cumulative = np.cumsum(np.append(0, counts))
    return cumulative[-1] - cumulative[np.clip(FLOAT16.max_exponent + 1 - scales + _MAX_EXPONENT, 0, counts.size)]


def _skipped(scales: np.ndarray, largest: np.ndarray, nonfinite: Sequence[float]) -> np.ndarray:
    """Returns the share of skipped steps. Non-finite samples count only at their own loss scale and above."""
    limits = _ROUNDS_TO_INF * np.exp2(-scales.astype(np.float64))
    overflows = largest.size - np.searchsorted(np.sort(largest), limits)
    known = np.searchsorted(np.sort(np.log2(nonfinite)), scales, side="right")
    return (overflows + known) / (largest.size + known)


def _recommended(counts: np.ndarray, largest: float, usable_scale: float) -> tuple[int, int] | None:
    if not counts.any() or not largest or not usable_scale:
        return None
    high = math.floor(math.log2(min(FLOAT16.max / largest / 2**_MARGIN_BITS, usable_scale)))
    candidates = np.arange(-FLOAT32.max_exponent, FLOAT32.max_exponent + 1)
    sufficient = candidates[_count_flushed(counts, candidates) <= _TOLERATED_UNDERFLOW * counts.sum()]
    low = int(sufficient[0]) if sufficient.size else high + 1
    high = min(high, FLOAT32.max_exponent)
    return (low, high) if low <= high else None
