"""What another loss scale would do to the gradients that were sampled. Needs NumPy alone."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kmp.records import FIRST_EXPONENT, RUN_EXPECTED, GradientSample, Run
from kmp.utils import FLOAT16, FLOAT32, is_power_of_two, validation

# Rounding to nearest, the smallest magnitude that becomes inf in float16: half a unit above the largest value.
_BECOMES_INF = FLOAT16.max + 2.0 ** (FLOAT16.max_exponent - FLOAT16.fraction_bits - 1)
_REACH = 24  # bits to either side of the scale in use
_BEYOND = 4  # and above the recommended ones, so that the curve shows why they end
_TOLERATED = 1e-3
_MARGIN_BITS = 1


@dataclass(frozen=True, eq=False)
class WhatIf:
    """The share of gradient elements that float16 loses, for every power of two as the loss scale.

    All arrays have the shape `(scales,)`. They are of weight gradients, which are what was sampled: gradients of
    activations may overflow at a lower scale.

    Args:
        log2_scales: int64, the exponents k of the scales 2^k.
        underflow: float64, the share of elements that are not zero and would round to zero. A lower bound where many
            are powers of two: exactly 2^-25 rounds to zero too, which counts do not tell.
        underflow_bound: float64, the same with those that were zero: what float16 flushed arrives as a zero, as a dead
            ReLU's gradient does, so the truth lies between the two. Equal to `underflow` where float32 was measured.
        overflow: float64, the share of the elements of finite samples that would be 2^16 or more. (From 65520 on they
            are inf; counts by exponent do not tell these apart, `skipped` does.)
        skipped: float64, the share of the sampled steps that would be skipped. One whose gradients were inf or nan
            counts from its scale on; what it would have been below, it does not tell.
        in_use: log2 of the scale of the newest sample.
        is_measured: Whether the counts are of a float32 reference pass. If not, what lies above `in_use` is an
            extrapolation: what was flushed at the scale in use would come back there, by how much is not known.
        recommended: Lowest and highest k at which at most 0.1 % of the elements that are not zero underflow, and every
            finite sample keeps at least one bit to overflow; `None` if there is none.

    Example:
    >>> gradient = {"zero": 3, "inf": 0, "nan": 0, "first": -20, "counts": [5, 8, 2], "amax": 2.0**-17, "norm": 1e-5}
    >>> curve = what_if(Run([{"step": 1, "sample": {"loss_scale": 1.0, "variables": {"dense/kernel": gradient}}}]))
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
    def is_extrapolated(self) -> np.ndarray:
        """For which scales the curve is an extrapolation; bool."""
        return ~np.full(self.log2_scales.shape, self.is_measured) & (self.log2_scales > self.in_use)

    def at(self, log2_scale: float) -> dict[str, float]:
        """Returns the four shares at the scale nearest to 2^`log2_scale`.

        Raises:
            ValueError: If that is beyond `log2_scales`.
        """
        lowest, highest = float(self.log2_scales[0]), float(self.log2_scales[-1])
        if not lowest - 0.5 <= log2_scale <= highest + 0.5:
            raise ValueError(
                f"`log2_scale` must be from {lowest:g} to {highest:g}. Received: log2_scale={log2_scale!r}"
            )
        place = int(np.argmin(np.abs(self.log2_scales - log2_scale)))
        names = ("underflow", "underflow_bound", "overflow", "skipped")
        return {name: float(getattr(self, name)[place]) for name in names}


def narrow(run: Run, samples: Iterable[GradientSample]) -> list[GradientSample]:
    """Returns samples without the variables whose layers compute in float32: float16 takes nothing from those.

    Where all do, all stay: the question is then what float16 would take.
    """
    wide = run.settings.get("float32_variables") or ()
    pairs = [(sample, sample.without(wide)) for sample in samples]
    return [kept if len(kept) else sample for sample, kept in pairs]


def what_if(run: Run | Sequence[GradientSample]) -> WhatIf:
    """Works out from sampled gradients what float16 would lose at every loss scale 2^k.

    Args:
        run: A run, or samples of one. Where it has float32 reference passes, these are taken. Variables of layers that
            compute in float32 do not count.

    Raises:
        TypeError: If it is neither.
        ValueError: If there is no sample with finite gradients.

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
    samples = narrow(run, run.samples) if isinstance(run, Run) else _samples_in(run)
    references = finite(narrow(run, run.references)) if isinstance(run, Run) else []
    measured = references or finite(samples)
    if not measured:
        raise ValueError(
            "The run has no sample of finite gradients to work from. Attach kmp.callbacks.GradientHistogram, and see "
            "kmp.advise(run) on why every sampled step overflowed."
        )
    in_use = math.log2((samples or measured)[-1].loss_scale)
    counts = np.sum([_unscaled_exponents(sample) for sample in measured], axis=0)
    zeros = sum(sample.histogram.zeros for sample in measured)
    largest = np.array([np.max(sample.amax) / sample.loss_scale for sample in measured])
    recommended = _recommended(counts, float(largest.max()))
    scales = _scales(in_use, largest.max(), recommended or ())
    total, flushed, infinite = counts.sum() + zeros, _below(counts, scales), _beyond(counts, scales)
    overflown = [sample for sample in samples if not sample.histogram.is_finite]
    return WhatIf(
        scales,
        flushed / total,
        (flushed + (0 if references else zeros)) / total,
        infinite / total,
        _skipped(scales, largest, overflown),
        in_use,
        bool(references),
        recommended,
    )


def _samples_in(run: Any) -> list[GradientSample]:
    is_sequence = isinstance(run, Sequence) and all(isinstance(sample, GradientSample) for sample in run)
    if not is_sequence:
        validation.instance("run", run, Run, f"{RUN_EXPECTED}, or samples of one")
    return list(run)


def finite(samples: Iterable[GradientSample]) -> list[GradientSample]:
    """Returns the samples that hold elements, and neither inf nor nan."""
    return [sample for sample in samples if sample.histogram.is_finite and sample.histogram.total]


def _scales(in_use: float, largest: float, recommended: Sequence[int]) -> np.ndarray:
    ends = [math.floor(math.log2(FLOAT16.max / largest)) - 1] if largest > 0 else []  # overflows above it
    low = min([math.floor(in_use) - _REACH, *ends, *recommended])
    high = max([math.ceil(in_use) + _REACH, *ends, *(bound + _BEYOND for bound in recommended)])
    return np.arange(max(low, FLOAT32.min_exponent), min(high, FLOAT32.max_exponent) + 1)


def _unscaled_exponents(sample: GradientSample) -> np.ndarray:
    """Counts by exponent of the gradient without its scale, from -`_WIDE` to `_WIDE`: wide enough for every scale."""
    histogram, shift = sample.histogram, math.frexp(sample.loss_scale)[1] - 1
    if not is_power_of_two(sample.loss_scale) and histogram.unscaled_counts is not None:
        histogram, shift = histogram.unscaled, 0
    wide = np.zeros(2 * _WIDE + 1, np.int64)
    start = FIRST_EXPONENT - shift + _WIDE
    wide[start : start + histogram.by_exponent.size] = histogram.by_exponent
    return wide


_WIDE = 2 * (FLOAT32.max_exponent - FIRST_EXPONENT)


def _below(counts: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Elements that round to zero: below 2^-25, half the smallest float16."""
    until = np.cumsum(np.append(0, counts))
    return until[np.clip(FLOAT16.flush_exponent - scales + _WIDE, 0, counts.size)]


def _beyond(counts: np.ndarray, scales: np.ndarray) -> np.ndarray:
    until = np.cumsum(np.append(0, counts))
    return until[-1] - until[np.clip(FLOAT16.max_exponent + 1 - scales + _WIDE, 0, counts.size)]


def _skipped(scales: np.ndarray, largest: np.ndarray, overflown: Sequence[GradientSample]) -> np.ndarray:
    """Samples that would overflow; of those that did, nothing is known below their scale."""
    skipped = (largest[:, None] * np.exp2(scales.astype(np.float64)) >= _BECOMES_INF).sum(0)
    known = np.array([scales >= math.log2(sample.loss_scale) for sample in overflown]).reshape(-1, scales.size).sum(0)
    return (skipped + known) / (len(largest) + known)


def _recommended(counts: np.ndarray, largest: float) -> tuple[int, int] | None:
    if not counts.any():
        return None
    high = math.floor(math.log2(FLOAT16.max / largest)) - _MARGIN_BITS
    candidates = np.arange(-FLOAT32.max_exponent, FLOAT32.max_exponent + 1)
    enough = candidates[_below(counts, candidates) <= _TOLERATED * counts.sum()]
    low = int(enough[0]) if enough.size else high + 1
    high = min(high, FLOAT32.max_exponent)
    return (low, high) if low <= high else None
