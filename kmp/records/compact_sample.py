"""The form of a gradient sample in a log; `kmp.records` documents it. Needs no Keras."""

import base64
import zlib
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from kmp.records.bin_counts import BinCounts
from kmp.records.exponent_histogram import BIN_COUNT, FIRST_EXPONENT, INF_BIN, LAST_EXPONENT, NAN_BIN, ZERO_BIN
from kmp.records.gradient_sample import NORMS, UPDATE_COUNTS, GradientSample
from kmp.records.log_schema import HIGHEST_NUMBER, MOST_ELEMENTS

EXACT = 4  # counts through this one are exact
LEVELS = np.unique(np.append(0, np.round(2.0 ** (np.arange(2 * 36 + 1) / 2)))).astype(np.int64)
_BOUNDARIES = np.append(0.5, np.sqrt(LEVELS[1:-1].astype(float) * LEVELS[2:]))
_NORM_BITS = 8  # significant bits of a norm
_AMAX_STEPS = 64  # between two powers of two
_NO_EXPONENT = -1100  # 2 to this power is zero in float64
_FIRST_BIN = ZERO_BIN + 1 - FIRST_EXPONENT  # the bin of exponent 0
_SPECIAL_BINS = {"zero": ZERO_BIN, "inf": INF_BIN, "nan": NAN_BIN}

# Kept with a sample, so that it is encoded once, and a log that is rewritten is not rounded again.
_encodings: WeakKeyDictionary[GradientSample, dict[str, Any]] = WeakKeyDictionary()


def compact(sample: GradientSample) -> dict[str, Any]:
    """Returns the JSON-serializable form of a sample. It is computed once and must not be changed."""
    if sample not in _encodings:
        _encodings[sample] = _encoded(sample)
    return _encodings[sample]


def _encoded(sample: GradientSample) -> dict[str, Any]:
    counts, elements = sample.counts, sample.elements
    norms = {}
    for key in NORMS:
        significands, exponents = np.frexp(getattr(sample, key))
        rounded = np.ldexp(np.round(np.ldexp(significands, _NORM_BITS)), exponents - _NORM_BITS)
        norms[key] = np.where(np.isfinite(rounded), rounded, np.nan)
    with np.errstate(over="ignore"):
        fractions = np.ldexp(np.nan_to_num(sample.amax, posinf=0.0), -_highest_exponents(counts)) - 1
    amax = np.clip(np.round(fractions * _AMAX_STEPS), 0, _AMAX_STEPS - 1)

    order = np.lexsort((norms["norm"], elements))
    data = {"loss_scale": sample.loss_scale} | _packed_bins(counts, order) | {"elements": _packed(elements, "<i8")}
    columns = {"amax": (amax, "<u1")} | {key: (getattr(sample, key), "<i8") for key in UPDATE_COUNTS}
    data |= {key: _packed(values, dtype) for key, (values, dtype) in columns.items() if values.any()}
    data |= {key: _packed(values, "<f8") for key, values in norms.items() if not np.isnan(values).all()}
    if sample.unscaled_bin_counts is not None:
        data["unscaled"] = _packed_bins(sample.unscaled_bin_counts.dense(), order)
    return data | {"names": sample.names}


def expanded(step: int, data: dict[str, Any]) -> GradientSample:
    """Returns the sample for a dictionary from `compact`, which has the types and ranges of `log_schema.Sample`.

    Raises:
        ValueError: If a value is not valid. The message names its key.
    """
    names = tuple(data["names"])
    size = len(names)
    if len(set(names)) < size:
        raise ValueError("`names` must not repeat a name")
    elements = _integers(data, "elements", size)
    norms = {}
    for key in NORMS:
        norms[key] = values = _unpacked(data, key, "<f8", size) if key in data else np.full(size, np.nan)
        if not (np.isnan(values) | ((values >= 0) & (values <= HIGHEST_NUMBER))).all():
            raise ValueError(f"`{key}` must hold NaN, or numbers between 0 and {HIGHEST_NUMBER}")
    order = np.lexsort((norms["norm"], elements))
    counts, correction = _unpacked_bins(data, elements, order)
    unscaled = BinCounts.of(*_unpacked_bins(data["unscaled"], elements, order)) if "unscaled" in data else None
    amax = np.ldexp(1 + _unpacked(data, "amax", "<u1", size) / _AMAX_STEPS, _highest_exponents(counts))
    amax[counts[:, INF_BIN] > 0] = np.inf
    amax[counts[:, NAN_BIN] > 0] = np.nan
    updates = {key: _integers(data, key, size) for key in UPDATE_COUNTS}
    scale, bins = float(data["loss_scale"]), BinCounts.of(counts, correction)
    sample = GradientSample(step, scale, names, bins, amax, **norms, **updates, unscaled_bin_counts=unscaled)
    _encodings[sample] = data
    return sample


def _highest_exponents(counts: np.ndarray) -> np.ndarray:
    """Returns the largest exponent with a count of each variable."""
    is_filled = counts[:, INF_BIN - 1 : ZERO_BIN : -1] > 0
    return np.where(is_filled.any(axis=1), LAST_EXPONENT - is_filled.argmax(axis=1), _NO_EXPONENT)


def _packed_bins(counts: np.ndarray, order: np.ndarray) -> dict[str, Any]:
    """Packs counts; their codes as differences between variables in `order`, which are small and so compress well."""
    total = counts.sum(axis=0)
    nonempty = np.flatnonzero(total[ZERO_BIN + 1 : INF_BIN])
    first, stop = (int(nonempty[0]) + 1, int(nonempty[-1]) + 2) if nonempty.size else (1, 1)
    special = {key: int(total[index]) for key, index in _SPECIAL_BINS.items()}
    codes = np.searchsorted(_BOUNDARIES, counts[:, first:stop])
    differences = np.diff(codes[order].astype(np.uint8), axis=0, prepend=np.uint8(0))
    return (
        {"total": special | {"first": first - _FIRST_BIN, "counts": total[first:stop].tolist()}}
        | {key: _packed(counts[:, index], "<i8") for key, index in _SPECIAL_BINS.items() if special[key]}
        | {"counts": _packed(differences.T, "<u1")}
    )


def _unpacked_bins(data: Mapping[str, Any], elements: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the counts, int64 of shape `(n, 280)`, and what rounding them took from their sum."""
    size, span = len(elements), len(data["total"]["counts"])
    first = data["total"]["first"] + _FIRST_BIN
    if first + span > INF_BIN:
        raise ValueError(f"`total.counts` must end at exponent {LAST_EXPONENT} or below")
    # Most exponents have no count: in column order, the operating system does not allocate their pages.
    counts = np.zeros((size, BIN_COUNT), np.int64, order="F")
    total = np.zeros(BIN_COUNT, np.int64)
    total[first : first + span] = data["total"]["counts"]
    for key, index in _SPECIAL_BINS.items():
        counts[:, index], total[index] = _integers(data, key, size), data["total"][key]
    codes = np.empty((size, span), np.uint8)
    differences = _unpacked(data, "counts", "<u1", size * span).reshape(span, size)
    codes[order] = np.cumsum(differences, axis=1, dtype=np.uint8).T
    if codes.max(initial=0) >= len(LEVELS):
        raise ValueError(f"`counts` must hold codes below {len(LEVELS)}")
    _fill(counts[:, first : first + span], codes, elements - counts.sum(axis=1))
    special = list(_SPECIAL_BINS.values())
    if total.sum() != elements.sum() or (total[special] != counts[:, special].sum(axis=0)).any():
        raise ValueError("`total` must be the sum of the counts of all variables")
    return counts, total - counts.sum(axis=0)


def _fill(counts: np.ndarray, codes: np.ndarray, elements: np.ndarray) -> None:
    """Decodes counts so that each variable has the right number of elements, which is divided by the rounded counts."""
    exact, weight = np.zeros(len(codes), np.int64), np.zeros(len(codes))
    for column in codes.T:  # one at a time, because a table of all takes much memory
        exact += np.minimum(LEVELS[column], EXACT)
        weight += np.maximum(LEVELS[column] - EXACT, 0)
    rest = elements - exact
    if (rest < 0).any() or (rest[weight == 0] > 0).any():
        raise ValueError("`counts` must agree with `elements`, `zero`, `inf` and `nan`")
    before, sum_before = np.zeros(len(codes)), np.zeros(len(codes))
    for column, result in zip(codes.T, counts.T, strict=True):
        before += np.maximum(LEVELS[column] - EXACT, 0)
        sum_here = np.floor(before / np.maximum(weight, 1) * rest)
        result[:] = np.minimum(LEVELS[column], EXACT) + (sum_here - sum_before).astype(np.int64)
        sum_before = sum_here


def _integers(data: Mapping[str, Any], key: str, size: int) -> np.ndarray:
    values = _unpacked(data, key, "<i8", size)
    if ((values < 0) | (values >= MOST_ELEMENTS)).any():
        raise ValueError(f"`{key}` must hold integers at least 0 and below {MOST_ELEMENTS}")
    return values


def _packed(values: np.ndarray, dtype: str) -> str:
    """Returns numbers as text: first the lowest byte of each, then the next; compressed; in base64."""
    numbers = np.ascontiguousarray(values.ravel(), dtype)
    planes = numbers.view(np.uint8).reshape(numbers.size, numbers.itemsize).T.tobytes()
    compressor = zlib.compressobj(9, strategy=zlib.Z_FILTERED)
    return base64.b64encode(compressor.compress(planes) + compressor.flush()).decode()


def _unpacked(data: Mapping[str, Any], key: str, dtype: str, size: int) -> np.ndarray:
    """Returns `size` numbers for a text from `_packed`, zeros if there is none. Never expands more bytes than these."""
    if key not in data:
        return np.zeros(size, dtype)
    item_size = np.dtype(dtype).itemsize
    decompressor = zlib.decompressobj()
    try:
        content = decompressor.decompress(base64.b64decode(data[key], validate=True), size * item_size + 1)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"`{key}` is not zlib data in base64 ({error})") from error
    if len(content) != size * item_size or not decompressor.eof or decompressor.unused_data:
        raise ValueError(f"`{key}` must expand to {size * item_size} bytes")
    return np.ascontiguousarray(np.frombuffer(content, np.uint8).reshape(item_size, size).T).view(dtype).reshape(size)
